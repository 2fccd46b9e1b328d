"""Every code block in README and documentation is run by a test or parsed by its consumer.

Most pages are followed from top to bottom (`test_reading.py`, `test_postgres_guide.py`). Here are the
blocks of the others that need no more than a loader, and the test that notices a block without a check.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streamfold.archive.events import decode_event
from streamfold.archive.events.cursor import EventCursor
from streamfold.archive.formats import JsonlFormat
from streamfold.archive.formats.protobuf.published import DiffChange, SnapshotRow
from streamfold.snapshotter.config.files import load_configuration
from streamfold.snapshotter.decoding.envelope import EnvelopeDecoder
from streamfold.snapshotter.errors import ConfigurationError
from streamfold.testing.change_decoder_kit import records
from tests.archive.tables import SCHEMA
from tests.docs.markdown import Block, every_block
from tests.docs.test_postgres_guide import GUIDE
from tests.docs.test_reading import PAGES, ROOT
from tests.interop.serving import serving

DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(path for path in sorted(ROOT.glob("docs/**/*.md")) if path.parent.name != "generated"),
]
#: Pages whose blocks a reader follows in their order.
FOLLOWED = {*(ROOT / page for page in PAGES), GUIDE}
#: Blocks that are checked by a test of their subject: page, language, and the file of the test.
ELSEWHERE = {
    ("docs/contributing/extending.md", "python"): "tests/docs/test_extending.py",
    ("docs/contributing/extending.md", "sh"): "tests/docs/test_extending.py",
    ("docs/contributing/extending.md", "toml"): "tests/docs/test_extending.py",
    ("docs/guides/ai-chat.md", "sh"): "tests/interop/test_ai_chat.py",
    ("docs/guides/collaboration.md", "sh"): "tests/interop/test_browser_sync.py",
    ("docs/reference/archive-events.md", "python"): "tests/archive/events/test_documentation.py",
    ("docs/reference/durable-streams.md", "sh"): "tests/server/test_documentation.py",
    ("docs/reference/s2.md", "sh"): "tests/server/test_documentation.py",
    ("docs/reference/spark.md", "python"): "tests/spark/test_documentation.py",
}
#: The beginning of a line that a reader can run, so that its block must not be a picture.
COMMAND = re.compile(r"^\s*(\$ |(streamfold|curl|pip|python3?|docker|make|kubectl|helm) )", re.M)


def objects(text: str) -> list[Any]:
    """The JSON values of a block, one after the other."""
    found, rest = [], text.strip()
    while rest:
        value, end = json.JSONDecoder().raw_decode(rest)
        found.append(value)
        rest = rest[end:].strip()
    return found


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving("--host", "127.0.0.1", "--no-access-log") as exports:
        yield exports["S2_ACCOUNT_ENDPOINT"]


@pytest.fixture
def run(endpoint: str, tmp_path: Path) -> Callable[[str], str]:
    """Runs lines of a shell that must all succeed, in a folder and with a configuration of its own."""

    def run(text: str) -> str:
        (tmp_path / "pip").write_text("#!/bin/sh\n")  # tests/packaging installs
        (tmp_path / "pip").chmod(0o755)
        path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        names = {name: value for name, value in os.environ.items() if name[:3] != "S2_"}
        done = subprocess.run(
            ["bash", "-ec", text.replace("http://localhost:8080", endpoint)],
            cwd=tmp_path,
            env={**names, "PATH": path, "STREAMFOLD_CONFIG": str(tmp_path / "config.toml")},
            input="token-that-is-long-enough\n",
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def check_commands(block: Block, run: Callable[[str], str]) -> None:
    run(block.text)


def check_resources(block: Block, run: Callable[[str], str]) -> None:
    """The file is applied, and what it says is there then."""
    shown = run(
        f"cat > resources.json <<'END'\n{block.text}END\n"
        "streamfold config set endpoint http://localhost:8080\n"
        "streamfold apply resources.json && streamfold diff resources.json"
    )
    assert "shop-prod/orders" in shown


def check_configuration(block: Block, folder: Path) -> None:
    file = folder / "snapshotter.toml"
    file.write_text(block.text)
    assert load_configuration(file, environment={}).tables


def check_problems(block: Block, folder: Path) -> None:
    """The configuration with these mistakes is refused with these words."""
    table = tomllib.loads((ROOT / "examples" / "snapshotter.toml").read_text())
    file = folder / "snapshotter.json"
    mistakes = {"snapshot": {"max_diff_fraction": 1.5}, "difff": {}}
    file.write_text(json.dumps({"tables": [table, table | mistakes]}))
    with pytest.raises(ConfigurationError) as failure:
        load_configuration(file, environment={})
    assert set(block.text.splitlines()) <= set(failure.value.problems)


def check_envelopes(block: Block, folder: Path) -> None:
    """Every record is a change, an end or a declaration of columns."""
    bodies = objects(block.text)
    decoded = EnvelopeDecoder(("id",)).decode(
        records([json.dumps(body).encode() for body in bodies]), None
    )
    assert decoded.dead_letters.num_rows == 0, decoded.dead_letters.to_pylist()
    assert decoded.changes.num_rows == sum(body["op"] not in "es" for body in bodies)


def check_diff_lines(block: Block, folder: Path) -> None:
    [batch] = JsonlFormat().read_changes(BytesIO(block.text.encode()), SCHEMA)
    assert [change["key"]["id"] for change in batch.to_pylist()] == [5, 6, 7]


def check_messages(block: Block, folder: Path) -> None:
    """The page declares the messages as the code does."""
    declared = re.findall(r"message (\w+) \{ (.*) \}\n", block.text)
    assert declared == [
        (
            message.DESCRIPTOR.name,
            " ".join(
                f"{f.message_type.full_name if f.message_type else 'string'} {f.name} = {f.number};"
                for f in message.DESCRIPTOR.fields
            ),
        )
        for message in (SnapshotRow, DiffChange)
    ]


def check_event(block: Block, folder: Path) -> None:
    """An event, or the cursor of a sink: with all members, and no others."""
    [shown] = objects(block.text)
    kind: Any = EventCursor if "sink" in shown else decode_event
    read = msgspec.convert(shown, EventCursor) if kind is EventCursor else kind(block.text)
    assert msgspec.to_builtins(read) == shown


Check = Callable[[Block, Path], None]
#: Checks of blocks that are data: by page and language.
READ: dict[tuple[str, str], Check] = {
    ("docs/guides/laredo.md", "toml"): check_configuration,
    ("docs/reference/archive-events.md", "json"): check_event,
    ("docs/reference/archive-format.md", "json"): check_diff_lines,
    ("docs/reference/archive-format.md", "protobuf"): check_messages,
    ("docs/reference/ingest.md", "json"): check_envelopes,
    ("docs/reference/snapshotter-config.md", "json"): check_envelopes,
    ("docs/reference/snapshotter-config.md", "text"): check_problems,
}
#: Checks of blocks that need a server.
RUN: dict[tuple[str, str], Callable[[Block, Callable[[str], str]], None]] = {
    ("docs/reference/cli.md", "sh"): check_commands,
    ("docs/reference/cli.md", "json"): check_resources,
}


def all_blocks() -> Iterator[tuple[str, Block]]:
    for path in DOCUMENTS:
        for block in every_block(path):
            yield str(path.relative_to(ROOT)), block


def cases(checks: dict[tuple[str, str], Any]) -> list[Any]:
    """The blocks of these pages and languages, with the check of each."""
    return [
        pytest.param(checks[page, block.language], block, id=f"{page}:{block.line}")
        for page, block in all_blocks()
        if (page, block.language) in checks and "skip" not in block.how
    ]


def _guides() -> list[Path]:
    """Pages that a new user follows: those whose blocks are run, and the other guides."""
    return sorted({*FOLLOWED, *(ROOT / "docs/guides").glob("*.md")})


@pytest.mark.parametrize(("check", "block"), cases(READ))
def test_a_block_of_data_is_what_the_page_says(check: Check, block: Block, tmp_path: Path) -> None:
    check(block, tmp_path)


@pytest.mark.parametrize(("check", "block"), cases(RUN))
def test_a_block_of_commands_succeeds(
    check: Callable[[Block, Callable[[str], str]], None], block: Block, run: Callable[[str], str]
) -> None:
    check(block, run)


@pytest.mark.parametrize(
    "block",
    [pytest.param(b, id=f"{page}:{b.line}") for page, b in all_blocks() if "skip" in b.how],
)
def test_a_block_that_cannot_be_run_here_says_why_and_has_no_syntax_error(block: Block) -> None:
    assert block.how["skip"]
    if block.language == "python":
        compile(block.text, "block", "exec")
        return
    assert block.language == "sh", "this language has no check of its syntax"
    subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)


def check_of(page: str, block: Block) -> str | None:
    """How a block is checked; None if nothing does."""
    kind = (page, block.language)
    if block.language.startswith("{"):
        return "test_site.py, by Sphinx"
    if "skip" in block.how:
        return "its syntax"
    if kind in READ or kind in RUN:
        return "above"
    if block.language == "text":
        return None if COMMAND.search(block.text) else "a picture"
    return "followed" if ROOT / page in FOLLOWED else ELSEWHERE.get(kind)


def test_every_block_of_the_documentation_is_run_or_read() -> None:
    blocks = list(all_blocks())
    assert len(blocks) > 120
    unchecked = [f"{page}:{b.line} ({b.language})" for page, b in blocks if not check_of(page, b)]
    assert not unchecked, f"run these blocks in a test, or give them a check here: {unchecked}"


@pytest.mark.parametrize(
    ("page", "test"), sorted({(page, test) for (page, _), test in ELSEWHERE.items()})
)
def test_a_test_elsewhere_takes_its_blocks_from_the_page(page: str, test: str) -> None:
    text = (ROOT / test).read_text()
    assert Path(page).name in text
    assert "blocks_of(" in text or "follow_guide(" in text


def test_the_extras_that_pages_install_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for path in DOCUMENTS:
        for extras in re.findall(r"(?:streamfold|'\.)\[([a-z,]+)\]", path.read_text()):
            assert set(extras.split(",")) <= set(project["optional-dependencies"]), path


@pytest.mark.parametrize("page", _guides(), ids=lambda page: page.name)
def test_a_page_that_installs_the_package_says_how_to_install_a_clone(page: Path) -> None:
    text = " ".join(page.read_text().split())
    assert "pip install" not in text or ("make wheel" in text and "PIP_FIND_LINKS" in text)
