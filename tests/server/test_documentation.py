"""Every request in the reference of both protocols gets the answer that the page shows."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.docs.markdown import blocks_of
from tests.interop.serving import serving

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
#: Each page, and how many requests it shows at least.
PAGES = {"durable-streams.md": 25, "s2.md": 2}
#: What the pages take for granted.
RESOURCES = {"basins": [{"name": "my-basin", "streams": [{"name": "orders"}]}]}
_LINE = re.compile(r"curl (.*\S) +# ([0-9]{3})(?: (.*))?")


class Example(NamedTuple):
    arguments: str
    status: str
    #: The whole body, where the page shows it.
    body: str | None


def examples(page: str) -> list[Example]:
    found = []
    for block in blocks_of(REFERENCE / page):
        for line in block.text.splitlines():
            match = _LINE.fullmatch(line)
            assert match is not None, f"{page}:{block.line}: {line}"
            found.append(Example(*match.groups()))
    return found


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A server, and the variables by which the pages name it."""
    resources = tmp_path_factory.mktemp("served") / "init.json"
    resources.write_text(json.dumps(RESOURCES))
    options = ("--host", "127.0.0.1", "--no-access-log", "--long-poll", "0.1")
    with serving(*options, "--init-file", str(resources)) as exports:
        yield {**os.environ, **exports, "S": exports["S2_ACCOUNT_ENDPOINT"]}


@pytest.mark.parametrize("page", PAGES)
def test_every_request_gets_the_answer_that_the_page_shows(
    page: str, variables: dict[str, str], tmp_path: Path
) -> None:
    assert len(examples(page)) >= PAGES[page]
    body = tmp_path / "body"
    for example in examples(page):
        body.write_bytes(b"")
        command = f"curl -s -o {body} -w '%{{http_code}}' {example.arguments}"
        done = subprocess.run(
            ["bash", "-c", command],
            env=variables,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.stdout == example.status, (example, body.read_text(), done.stderr)
        if example.body is not None:
            assert body.read_text() == example.body
