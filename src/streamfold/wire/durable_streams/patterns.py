"""Globs over stream paths, by which a subscription finds its streams.

`*` stands for one whole segment, `**` for any number of them, also none. A segment is what is between
two slashes. Matching takes one step per segment of the path, whatever the pattern: the set of reached
segments, held as the bits of one integer, moves along with the path.
"""

from __future__ import annotations

from typing import Final

from streamfold.errors import InvalidError

#: Characters: twice a stream's longest name.
PATTERN_MAX: Final = 1024
#: Segments, and `**` among them, of a new pattern: each stream is matched against each subscription.
SEGMENTS_MAX: Final = 32
MANY_MAX: Final = 4

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
        reached, here, one, many = self._start, self._here.get, self._one, self._many
        for segment in path.removeprefix("/").split("/"):
            passed = (reached & (one | here(segment, 0))) << 1 | reached & many
            reached = passed | (passed & many) << 1  # as _skip, without a call per segment
            if not reached:
                return False
        return bool(reached & self._whole)

    def require_simple(self) -> None:
        """Raise InvalidError if matching takes too long for a new subscription."""
        segments, many = self._whole.bit_length() - 1, self._many.bit_count()
        if segments > SEGMENTS_MAX or many > MANY_MAX:
            raise InvalidError(
                f"pattern {self.text[:60]!r} has {segments} segments, {many} of them **: it can have "
                f"{SEGMENTS_MAX} and {MANY_MAX}; use fewer, or name the streams instead"
            )

    def _skip(self, reached: int) -> int:
        """`**` may stand for nothing. Two never follow each other, so one step is enough."""
        return reached | (reached & self._many) << 1

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
