"""The blocks of a page, in order, and how a reader uses each.

A block is typed into the first terminal. A comment in the line before its fence, which readers of the
page do not see, says otherwise:

    <!-- read: terminal=server until="export" -->

`terminal` names another one, or several with commas between them, `until` is a text after which the
last command of the block is left running, `interrupt` presses Ctrl-C then, `file` saves the block under
a name, `expect` is a text that it must show, `warns` lets another project's program log warnings, and
`skip` says why a block is not run. A comment `<!-- file: PATH -->` says that the block is a file of the
repository, which is its `source`. Blocks of `text` are pictures. Languages in braces are directives,
which Sphinx runs when it builds the site.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

_BLOCK = re.compile(
    r"(?:^<!-- (?P<kind>read|file): (?P<how>[^\n]*?) -->\n)?"
    r"^```(?P<language>\w*|\{[\w-]+\})\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
#: A fence that is not at the start of a line, or of tildes.
_OTHER_FENCE = re.compile(r"^[ \t]+```|^[ \t]*~~~", re.MULTILINE)
_KNOWN = {"terminal", "until", "interrupt", "file", "expect", "skip", "source", "warns"}


@dataclass(frozen=True)
class Block:
    """One block of a page."""

    line: int
    language: str
    text: str
    how: dict[str, str] = field(default_factory=dict)


def every_block(page: Path) -> list[Block]:
    """Every block of a page; one without a language, or with an unknown instruction, is a mistake."""
    text = page.read_text()
    assert not _OTHER_FENCE.search(text), (
        f"{page.name}: blocks begin with ``` at the start of a line"
    )
    found = []
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("language")) + 1
        how = (
            {"source": match["how"]}
            if match["kind"] == "file"
            else dict(part.partition("=")[::2] for part in shlex.split(match["how"] or ""))
        )
        assert how.keys() <= _KNOWN, f"{page.name}:{line}: {how}"
        assert match["language"], f"{page.name}:{line}: the block names no language"
        found.append(Block(line, match["language"], match["text"], how))
    assert len(found) == text.count("\n```") // 2, f"{page.name}: a block was not understood"
    return found


def blocks_of(page: Path) -> list[Block]:
    """The blocks of a page that a reader uses."""
    return [
        block
        for block in every_block(page)
        if block.language != "text" and block.language[0] != "{" and "skip" not in block.how
    ]
