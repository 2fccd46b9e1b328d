"""The objects that docs/reference/cli.md documents for `--json`, and a comparison with real ones."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"


@dataclass
class Members:
    """The members of a documented object; nested ones only where the page lists their members.

    An object without any, as `{table: folder}`, has names of its own.
    """

    required: set[str] = field(default_factory=set)
    optional: set[str] = field(default_factory=set)
    nested: dict[str, Members] = field(default_factory=dict)

    def fits(self, found: object) -> bool:
        """Return whether an object has these members, and no others."""
        if not isinstance(found, dict) or not self.required <= found.keys():
            return False
        if not self.required | self.optional:
            return True
        if found.keys() - self.required - self.optional:
            return False
        return all(
            members.fits(each)
            for name, members in self.nested.items()
            for each in _each(found.get(name))
        )


def _each(value: object) -> list[object]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def documented(verb: str) -> list[Members]:
    """Return the objects that the page's table has for a verb."""
    section = _PAGE.read_text().partition("\n## JSON\n")[2].partition("\n## ")[0]
    found = []
    for row in re.findall(r"^\| (`.+?) \| (.+) \|$", section, re.MULTILINE):
        verbs, shape = row
        if verb in [re.sub(r" s2://.*", "", name) for name in re.findall(r"`([^`]+)`", verbs)]:
            found += [_members(text) for text in re.findall(r'`(\{"[^`]+)`', shape)]
    return found


def _members(text: str) -> Members:
    root = Members()
    open_objects: list[Members] = []
    last, before = "", ""
    for token in re.findall(r'"\w+"\??|[{}\[\],:]', text):
        if token == "{":
            inner = open_objects[-1].nested.setdefault(last, Members()) if open_objects else root
            open_objects.append(inner)
        elif token == "}":
            open_objects.pop()
        elif token.startswith('"') and before in "{,":
            last = token.strip('"?')
            members = open_objects[-1]
            (members.optional if token.endswith("?") else members.required).add(last)
        before = token
    return root
