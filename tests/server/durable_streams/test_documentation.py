"""Every command in docs/reference/durable-streams.md does what the page says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.interop.serving import serving

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "durable-streams.md"
_BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LINE = re.compile(r"curl (.*\S) +# ([0-9]{3})(?: (.*))?")

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


class Example(NamedTuple):
    arguments: str
    status: str
    #: The whole body, where the page shows it.
    body: str | None


def examples() -> list[Example]:
    found = []
    for block in _BLOCK.findall(PAGE.read_text()):
        for line in block.splitlines():
            match = _LINE.fullmatch(line)
            assert match is not None, line
            found.append(Example(*match.groups()))
    return found


def test_every_command_does_what_the_page_says(tmp_path: Path) -> None:
    assert len(examples()) >= 25
    body = tmp_path / "body"
    options = ("--host", "127.0.0.1", "--no-access-log", "--long-poll", "0.1")
    with serving(*options) as exports:
        environment = os.environ | {"S": exports["S2_ACCOUNT_ENDPOINT"]}
        for example in examples():
            body.write_bytes(b"")
            command = f"curl -s -o {body} -w '%{{http_code}}' {example.arguments}"
            done = subprocess.run(
                ["bash", "-c", command],
                env=environment,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert done.stdout == example.status, (example, body.read_text(), done.stderr)
            if example.body is not None:
                assert body.read_text() == example.body
