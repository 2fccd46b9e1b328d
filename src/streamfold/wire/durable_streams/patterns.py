"""Globs over stream paths, by which a subscription finds its streams.

`*` stands for one whole segment, `**` for any number of them, also none. A segment is what is between
two slashes. Matching takes one step per segment of the path, whatever the pattern: a set of positions
in the pattern, held as the bits of one integer, moves along with the path.
"""

from __future__ import annotations

from typing import Final

from streamfold.errors import InvalidError

#: Characters: twice a stream's longest name.
PATTERN_MAX: Final = 1024

_ONE, _MANY = "*", "**"


class Pattern:
    """A glob that was checked, ready to match paths."""

    __slots__ = ("_here", "_many", "_one", "_start", "_whole", "text")

    def __init__(self, text: str) -> None:
        #: Without a leading slash.
        self.text = text.removeprefix("/")
        segments = _segments(self.text)
        #: Bit i: the i-th segment of the pattern is this text, is `*`, is `**`.
        self._here: dict[str, int] = {}
        for index, segment in enumerate(segments):
            self._here[segment] = self._here.get(segment, 0) | 1 << index
        self._one = self._here.pop(_ONE, 0)
        self._many = self._here.pop(_MANY, 0)
        self._start = self._skip(1)
        self._whole = 1 << len(segments)

    def matches(self, path: str) -> bool:
        """Whether the whole path fits; a leading slash of it does not count."""
        positions = self._start
        for segment in path.removeprefix("/").split("/"):
            passed = (positions & (self._one | self._here.get(segment, 0))) << 1
            positions = self._skip(passed | positions & self._many)
            if not positions:
                return False
        return bool(positions & self._whole)

    def _skip(self, positions: int) -> int:
        """`**` may stand for nothing. Two never follow each other, so one step is enough."""
        return positions | (positions & self._many) << 1

    def __repr__(self) -> str:
        return f"Pattern({self.text!r})"


def _segments(text: str) -> list[str]:
    if not 0 < len(text) <= PATTERN_MAX:
        raise InvalidError(
            f"pattern of {len(text)} characters: it must have 1 to {PATTERN_MAX} after the first /"
        )
    segments: list[str] = []
    for segment in text.split("/"):
        _check_segment(segment, text)
        if segment != _MANY or segments[-1:] != [_MANY]:
            segments.append(segment)
    return segments


def _check_segment(segment: str, text: str) -> None:
    if not segment:
        raise InvalidError(f"pattern {text[:60]!r} has an empty segment: use single slashes")
    if "*" in segment and segment not in (_ONE, _MANY):
        raise InvalidError(
            f"pattern {text[:60]!r}: {segment[:60]!r} mixes * with text; "
            "* stands for one whole segment, ** for any number of them"
        )
    if "\0" in segment:
        raise InvalidError(f"pattern {text[:60]!r} contains a NUL character: remove it")
