"""README and guides, followed as a reader does: block by block, typed into a real shell and REPL.

What is replaced: ports, which others on this machine may use, addresses of other machines, and the
installation, which `tests/packaging` tries with the wheel: the environment of the tests is lent to the
reader's.
"""

from __future__ import annotations

import os
import re
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.docs.markdown import Block, blocks_of
from tests.docs.terminal import Terminal
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
#: Pages whose blocks are followed.
PAGES = ["README.md", "docs/quickstart.md", "docs/guides/snapshot-and-follow.md",
         "docs/guides/read-an-archive.md", "docs/guides/snapshotter.md", "docs/guides/cluster.md",
         "docs/guides/agents.md", "docs/guides/event-sourcing.md", "docs/guides/browser-sync.md",
         "docs/guides/time-travel.md", "docs/guides/embedding.md",
         "docs/guides/langgraph.md", "docs/guides/mcp.md"]  # fmt: skip
#: Pages that begin where another one is, with the text of its last block that is followed before.
BEGINNINGS = {"docs/guides/cluster.md": ("docs/guides/snapshotter.md", "destinations = ")}
#: Machines of a cluster, all of which are this one.
_MACHINES = ("10.0.0.1", "10.0.0.9")
_WARNINGS = ("WARN", "Warning")
#: What no block may show: a refusal of the server, an error of Python, a command that failed, or a
#: warning, which a reader who does as told has not deserved.
WRONG = (
    '{"code":', "Traceback (most recent call last)", "SyntaxError", "[failed:", "error: ", *_WARNINGS,
)  # fmt: skip


def lend(folder: Path) -> None:
    """Make an environment that has what the tests' own has, and a pip that finds it all there."""
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "lent.pth").write_text("\n".join(path for path in sys.path if path))
    (folder / "lent").mkdir()  # what is there before the reader has an environment
    for name, text in {
        "bin/streamfold": f"#!{folder}/bin/python\nfrom streamfold.cli.main import main\nmain()\n",
        # Until there are releases, pip finds the wheels in a folder that a page must name.
        "bin/pip": '#!/bin/sh\necho "$PIP_FIND_LINKS" | grep -q /dist$\n',
        "lent/python3": f'#!/bin/sh\nln -s {folder} "$3"\n',  # python3 -m venv FOLDER
    }.items():
        script = folder / name
        script.write_text(text)
        script.chmod(0o755)


class Reader:
    """Follows a page, with as many terminals as it asks for."""

    def __init__(self, folder: Path, environment: Path) -> None:
        self._folder = folder
        self._ports = {written: free_port() for written in ("8080", "8081", "7077", "4438")}
        self._terminals: dict[str, Terminal] = {}
        names = {name: text for name, text in os.environ.items() if name[:3] not in ("S2_", "PYT")}
        self._variables = {
            **names,
            "PATH": f"{environment}/lent:{os.environ['PATH']}",
            "SPARK_DAEMON_JAVA_OPTS": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",  # start sooner
        }

    def follow(self, block: Block) -> str:
        """Do what a reader does with a block; returns what was shown."""
        names = block.how.get("terminal", "first").split(",")
        return "".join(self._follow(block, self._terminal(name)) for name in names)

    def _follow(self, block: Block, terminal: Terminal) -> str:
        # In one pass: a free port may have the digits of another that is written.
        written = re.compile("|".join(self._ports))
        text = written.sub(lambda port: str(self._ports[port[0]]), block.text)
        for machine in _MACHINES:
            text = text.replace(machine, "127.0.0.1")
        if file := block.how.get("file"):
            (terminal.folder / file).write_text(text)
            return ""
        *lines, last = text.splitlines()
        shown = "".join(terminal.type(line) for line in lines)
        if until := block.how.get("until"):
            shown += terminal.start(last, until)
            if "interrupt" in block.how:
                terminal.interrupt()
            return shown
        shown += terminal.type(last)
        # The Enter that ends a block which Python waits for the rest of.
        return shown + (terminal.type("") if block.language == "python" else "")

    def _terminal(self, name: str) -> Terminal:
        if name not in self._terminals:
            self._terminals[name] = Terminal(self._folder, self._variables)
        return self._terminals[name]

    def interrupt(self, name: str) -> None:
        """Press Ctrl-C in a terminal."""
        self._terminal(name).interrupt()

    def leave(self) -> None:
        for terminal in self._terminals.values():
            terminal.close()


@contextmanager
def reading(folder: Path, environment: Path) -> Iterator[Reader]:
    reader = Reader(folder, environment)
    try:
        yield reader
    finally:
        reader.leave()


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("sh", "true\nfalse\ntrue\n"),
        ("sh", "no-such-command\n"),
        ("python", "1 / 0\n"),
        ("python", "if True:\n    pass\nprint(1)\n"),
    ],
)
def test_a_block_that_goes_wrong_is_noticed(language: str, text: str, tmp_path: Path) -> None:
    with reading(tmp_path, tmp_path) as reader:
        if language == "python":
            reader.follow(Block(1, "sh", f"{sys.executable} -m asyncio\n"))
        shown = reader.follow(Block(2, language, text))
    assert any(wrong in shown for wrong in WRONG), shown


def beginning_of(page: str) -> list[Block]:
    """The blocks of another page that this one takes as followed."""
    if page not in BEGINNINGS:
        return []
    other, last = BEGINNINGS[page]
    blocks = blocks_of(ROOT / other)
    [until] = [at for at, block in enumerate(blocks) if last in block.text]
    return blocks[: until + 1]


@pytest.mark.timeout(1800)  # dozens of commands, some of which start Spark
@pytest.mark.parametrize("page", PAGES)
def test_a_page_can_be_followed_from_top_to_bottom(page: str, tmp_path: Path) -> None:
    folder = tmp_path / "reader"
    folder.mkdir()
    lend(tmp_path / "lent")
    if page == "README.md":
        (folder / ".venv").symlink_to(tmp_path / "lent")  # as `make demo` leaves it
    with reading(folder, tmp_path / "lent") as reader:
        for block in [*beginning_of(page), *blocks_of(ROOT / page)]:
            shown = reader.follow(block)
            unwanted = WRONG if "warns" not in block.how else WRONG[: -len(_WARNINGS)]
            wrong = [text for text in unwanted if text in shown]
            assert not wrong, f"{page}:{block.line} showed {wrong}:\n{shown}"
            expected = block.how.get("expect", "")
            assert expected in shown, f"{page}:{block.line} did not show {expected!r}:\n{shown}"
