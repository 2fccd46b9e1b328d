"""The blocks of a page, in order, and how a reader uses each.

A block is typed into the first terminal. A comment in the line before its fence, which readers of the
page do not see, says otherwise:

    <!-- read: terminal=server until="export" -->

`terminal` names another one, or several with commas between them, `until` is a text after which the
last command of the block is left running, `interrupt` presses Ctrl-C then, `file` saves the block under
a name, `expect` is a text that it must show, and `skip` says why a block is not run. Blocks of `text`
are pictures.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

_BLOCK = re.compile(
    r"(?:^<!-- read: (?P<how>.*?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_KNOWN = {"terminal", "until", "interrupt", "file", "expect", "skip"}


@dataclass(frozen=True)
class Block:
    """One block of a page."""

    line: int
    language: str
    text: str
    how: dict[str, str] = field(default_factory=dict)


def blocks_of(page: Path) -> list[Block]:
    """The blocks of a page; one without a language, or with an unknown instruction, is a mistake."""
    text = page.read_text()
    found = []
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        how = dict(part.partition("=")[::2] for part in shlex.split(match["how"] or ""))
        assert how.keys() <= _KNOWN, f"{page.name}:{line}: {how}"
        assert match["language"], f"{page.name}:{line}: the block names no language"
        found.append(Block(line, match["language"], match["text"], how))
    assert len(found) == text.count("\n```") // 2, f"{page.name}: a block was not understood"
    return [block for block in found if block.language != "text" and "skip" not in block.how]
