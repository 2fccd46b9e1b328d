"""Parses the part of HOCON that published configurations use.

Objects and arrays with `=`, `:` or nothing before the bracket, dotted keys, quoted and bare values,
commas or line ends between members, and comments (`#`, `//`, `/* */`). Objects of one name are merged;
of other values, the last one counts. Includes, substitutions and joined values are rejected: `${HOME}`
must not become text.

Bare values are text, as in environment variables; their readers decide the type.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

#: Nested objects and arrays: more than any configuration needs.
_DEPTH_MAX = 64
_COMMENT = r"(?:#|//)[^\n]*|/\*(?s:.*?)\*/"
_BLANK = re.compile(rf"(?:[ \t\r\ufeff]|{_COMMENT})*")
_BLANK_LINES = re.compile(rf"(?:[\s\ufeff]|{_COMMENT})*")
_KEY = re.compile(r"[A-Za-z0-9_-]+")
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_BARE = re.compile(r"(?:(?!//|/\*)[^\n,{}\[\]#\"=:$+^*&!@\\?`]|(?<=\w):(?=[/\w]))+")


class HoconError(ValueError):
    """The text is invalid; the message names the line."""


def parse_hocon(text: str) -> dict[str, Any]:
    """Parse the text; HoconError names the wrong line."""
    return _Parser(text).root()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0

    def root(self) -> dict[str, Any]:
        self._skip(_BLANK_LINES)
        members = self._object(0) if self._next("{") else self._members("", 0)
        self._skip(_BLANK_LINES)
        if self._position < len(self._text):
            self._fail("unexpected text after the last object")
        return members

    def _object(self, depth: int) -> dict[str, Any]:
        if depth > _DEPTH_MAX:
            self._fail(f"objects are nested more than {_DEPTH_MAX} deep")
        self._position += 1
        members = self._members("}", depth)
        self._position += 1
        return members

    def _members(self, end: str, depth: int) -> dict[str, Any]:
        members: dict[str, Any] = {}
        self._skip(_BLANK_LINES)
        while not self._at_end(end):
            path = self._path()
            self._skip(_BLANK)
            if not (self._next("{") or self._next("[")):
                if not (self._take("=") or self._take(":")):
                    name = ".".join(path)
                    self._fail(f"{name!r} must be followed by = and a value, or by {{ or [")
                self._skip(_BLANK_LINES)
            _put(members, path, self._value(depth))
            self._separator(end)
        return members

    def _path(self) -> list[str]:
        path = [self._name()]
        while self._take("."):
            path.append(self._name())
        if path == ["include"]:
            self._fail("include is not supported: write one file")
        return path

    def _name(self) -> str:
        if quoted := _QUOTED.match(self._text, self._position):
            return self._unquoted(quoted)
        bare = _KEY.match(self._text, self._position)
        if bare is None:
            self._fail("expected the name of a setting")
        self._position = bare.end()
        return bare[0]

    def _value(self, depth: int) -> Any:
        if self._next("{"):
            return self._object(depth + 1)
        if self._next("["):
            return self._array(depth + 1)
        if self._next('"""'):
            return self._long_text()
        if quoted := _QUOTED.match(self._text, self._position):
            return self._unquoted(quoted)
        bare = _BARE.match(self._text, self._position)
        if bare is None or not bare[0].strip():
            self._fail("expected a value")
        word = bare[0].strip()
        if word.endswith(":"):
            self._fail(f"{word}// would end in a comment: put the value into quotes")
        self._position = bare.end()
        return None if word == "null" else word

    def _array(self, depth: int) -> list[Any]:
        if depth > _DEPTH_MAX:
            self._fail(f"arrays are nested more than {_DEPTH_MAX} deep")
        self._position += 1
        items: list[Any] = []
        self._skip(_BLANK_LINES)
        while not self._at_end("]"):
            items.append(self._value(depth))
            self._separator("]")
        self._position += 1
        return items

    def _long_text(self) -> str:
        end = self._text.find('"""', self._position + 3)
        if end < 0:
            self._fail('a text that begins with """ must end with it')
        text, self._position = self._text[self._position + 3 : end], end + 3
        return text

    def _unquoted(self, quoted: re.Match[str]) -> str:
        try:
            text: str = json.loads(quoted[0])
        except ValueError as error:
            self._fail(f"the text in quotes is not valid: {error}")
        self._position = quoted.end()
        return text

    def _separator(self, end: str) -> None:
        """Skip a comma, a line end, or nothing before `end`."""
        before = self._position
        self._skip(_BLANK_LINES)
        crossed = "\n" in self._text[before : self._position]
        comma = self._take(",")
        self._skip(_BLANK_LINES)
        if not (comma or crossed or self._at_end(end)):
            self._fail("expected a comma, a line end or the end after a value")

    def _at_end(self, end: str) -> bool:
        if self._position < len(self._text):
            return bool(end) and self._next(end)
        if end:
            self._fail(f"{end} is missing")
        return True

    def _skip(self, blank: re.Pattern[str]) -> None:
        if match := blank.match(self._text, self._position):
            self._position = match.end()

    def _next(self, what: str) -> bool:
        return self._text.startswith(what, self._position)

    def _take(self, what: str) -> bool:
        if self._next(what):
            self._position += len(what)
            return True
        return False

    def _fail(self, rule: str) -> NoReturn:
        if self._next("/*"):
            rule = "a comment that begins with /* must end with */"
        line = self._text.count("\n", 0, self._position) + 1
        if self._next("${"):
            rule = (
                "substitutions are not supported: set the value by an environment variable instead"
            )
        raise HoconError(f"line {line}: {rule}")


def _put(members: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        inner = members.get(name)
        if not isinstance(inner, dict):
            inner = members[name] = {}
        members = inner
    old = members.get(path[-1])
    if isinstance(old, dict) and isinstance(value, dict):
        for name, item in value.items():
            _put(old, [name], item)
    else:
        members[path[-1]] = value
