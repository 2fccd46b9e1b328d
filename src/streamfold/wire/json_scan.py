"""Splits large JSON in one linear pass, in short steps.

msgspec validates JSON, but a single call holds the GIL from the first byte to the last: for a 32
MiB body, no other thread would run for a second. So numpy first scans the text block by block for
whitespace and for the commas of the outermost array. msgspec then validates one group of elements
at a time. Invalid JSON always has an invalid group, because an array is valid exactly if it
consists of valid values between commas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from streamfold.errors import InvalidError, TooLargeError

#: Bytes scanned per step, which takes 2 ms.
BLOCK: Final = 256 << 10
#: Bytes of elements validated per call. A larger element is validated on its own.
GROUP: Final = 128 << 10
#: Maximum nesting depth of arrays and objects. Other parsers, many with limits near 1,000, read
#: messages again later, and Python's own limit depends on its version.
NESTED_MAX: Final = 512

Bytes: TypeAlias = npt.NDArray[np.uint8]
Flags: TypeAlias = npt.NDArray[np.bool_]
Offsets: TypeAlias = npt.NDArray[np.int64]

_QUOTE, _BACKSLASH, _COMMA, _SPACE = np.frombuffer(b'"\\, ', np.uint8)
#: Setting this bit maps [ to { and ] to }.
_FOLD: Final = np.uint8(0x20)
_OPEN, _CLOSE, _BRACKET = np.frombuffer(b"{}[", np.uint8)
_VALUE: Final = msgspec.json.Decoder(msgspec.Raw)


def _flags(characters: bytes) -> Flags:
    flags = np.zeros(256, np.bool_)
    flags[list(characters)] = True
    return flags


_WHITESPACE: Final = _flags(b" \t\n\r")
#: Bytes other than punctuation. Outside of strings, they belong to a number or a literal.
_SCALAR: Final = ~_flags(b' \t\n\r[]{}:,"')


class Limits(NamedTuple):
    """Array limits. A larger array is rejected before it is split."""

    elements: int
    #: Bytes of one element, or of a value that is not an array, excluding whitespace.
    element_bytes: int


class Pieces(NamedTuple):
    """A JSON value without whitespace between tokens: an array's elements, or the value itself."""

    is_array: bool
    texts: list[bytes]


class JsonLayout(NamedTuple):
    """JSON text without whitespace between tokens, and the offsets of its outermost value's parts.

    Parts are array elements or object members. Nothing is validated here: if all parts are valid,
    so is the text, and if the text is valid, these are its parts.
    """

    text: bytes
    starts: list[int]
    ends: list[int]

    def parts(self) -> list[bytes]:
        text = self.text
        return [text[start:end] for start, end in zip(self.starts, self.ends, strict=True)]

    def groups(self) -> Iterator[bytes]:
        """Yield runs of parts with their commas, about GROUP bytes each.

        A longer part comes alone.
        """
        for first, following in _groups(self.starts, self.ends):
            yield self.text[self.starts[first] : self.ends[following - 1]]


def split_json(body: bytes, limits: Limits, *, block: int = BLOCK) -> Pieces:
    """Split a body into pieces that are each valid JSON. Raises TooLargeError beyond the limits."""
    scan = _scan(body, limits, block)
    text = scan.text()
    if not text.startswith(b"["):
        check_syntax(text)
        return Pieces(False, [text])
    layout = _layout(text, scan, b"]")
    for start, end in zip(layout.starts, layout.ends, strict=True):
        if end - start > limits.element_bytes:
            raise _too_long(end - start, limits)
    for group in layout.groups():
        check_syntax(b"[%b]" % group)
    return Pieces(True, layout.parts())


def lay_out(
    value: bytes, brackets: bytes, parts_max: int, *, block: int = BLOCK
) -> JsonLayout | None:
    """Return the part offsets of an array (brackets `[]`) or an object (brackets `{}`).

    Returns None if there are more than `parts_max` parts.
    """
    scan = _scan(value, Limits(len(value) + 1, len(value)), block)
    text = scan.text()
    if text[:1] != brackets[:1]:
        raise _invalid(f"it does not begin with {brackets[:1].decode()}")
    return None if scan.commas >= parts_max else _layout(text, scan, brackets[1:])


def _layout(text: bytes, scan: _Scan, closing: bytes) -> JsonLayout:
    if len(text) < 2 or not text.endswith(closing):
        raise _invalid("it breaks off")
    if len(text) == 2:
        return JsonLayout(text, [], [])
    commas = scan.comma_offsets().tolist()
    starts, ends = [1, *(comma + 1 for comma in commas)], [*commas, len(text) - 1]
    for start, end in zip(starts, ends, strict=True):
        if start == end:
            raise _invalid(f"something is missing before byte {end}")
    return JsonLayout(text, starts, ends)


def check_value(text: bytes) -> None:
    """Raise unless `text` is exactly one JSON value with at most NESTED_MAX levels of nesting."""
    check_syntax(text)
    check_nesting(text)


def check_nesting(text: bytes, outside: int = 0) -> None:
    """Raise if a JSON value inside `outside` arrays exceeds NESTED_MAX levels of nesting."""
    most = NESTED_MAX - outside
    # Nearly all values have too few bytes or too few brackets to nest that deeply.
    if len(text) > 2 * most and text.count(b"[") + text.count(b"{") > most:
        scan = _scan(text, Limits(len(text) + 1, len(text)), BLOCK)
        if scan.nested > most:
            raise _too_deep()


def check_syntax(text: bytes) -> None:
    """Raise unless `text` is exactly one JSON value. msgspec checks everything except UTF-8."""
    try:
        if not text.isascii():
            text.decode()
        _VALUE.decode(text)
    except UnicodeDecodeError as error:
        raise InvalidError(f"the body is not valid UTF-8 at byte {error.start}") from None
    except msgspec.DecodeError as error:
        raise _invalid(str(error)) from None
    except RecursionError:
        raise _too_deep() from None


def _scan(body: bytes, limits: Limits, block: int) -> _Scan:
    """Scan a whole body. Raises as soon as the body proves too large."""
    scan, view = _Scan(), np.frombuffer(body, np.uint8)
    for at in range(0, len(view), block):
        scan.feed(view[at : at + block])
        if scan.nested > NESTED_MAX:
            raise _too_deep()
        if not scan.is_array and scan.size > limits.element_bytes:
            raise _too_long(scan.size, limits)
        if scan.is_array and scan.commas >= limits.elements:
            raise TooLargeError(
                f"the body has more than {limits.elements} messages: send fewer at once"
            )
    return scan


def _groups(starts: Sequence[int], ends: Sequence[int]) -> Iterator[tuple[int, int]]:
    first = 0
    for index, end in enumerate(ends):
        if end - starts[first] > GROUP and index > first:
            yield first, index
            first = index
    if ends:
        yield first, len(ends)


def _invalid(why: str) -> InvalidError:
    return InvalidError(f"the body is not one valid JSON value: {why}")


def _too_deep() -> InvalidError:
    return InvalidError(
        f"the body is nested too deeply: {NESTED_MAX} arrays and objects may be within each other; "
        "send flatter JSON"
    )


def _too_long(size: int, limits: Limits) -> TooLargeError:
    return TooLargeError(
        f"a message of {size} bytes or more is too large: at most {limits.element_bytes}"
    )


class _Scan:
    """Text without insignificant whitespace, and the comma offsets of its outermost array.

    Feed it all blocks in order. Every block takes the same time, whatever its content.
    """

    def __init__(self) -> None:
        #: Bytes kept so far, and commas counted so far.
        self.size = 0
        self.commas = 0
        self.is_array = False
        self._texts: list[bytes] = []
        self._comma_offsets: list[Offsets] = []
        self._in_string = False
        #: Whether the last block ended with a backslash that escapes the next byte.
        self._escaping = False
        self._depth = 0
        #: The deepest nesting of arrays and objects so far.
        self.nested = 0
        #: Whether the last byte kept belongs to a number or literal, and whether whitespace was
        #: dropped after it.
        self._after_scalar = False
        self._after_space = False

    def text(self) -> bytes:
        return b"".join(self._texts)

    def comma_offsets(self) -> Offsets:
        return np.concatenate(self._comma_offsets) if self._comma_offsets else np.empty(0, np.int64)

    def feed(self, block: Bytes) -> None:
        """Scan the next bytes. Only punctuation and whitespace are examined."""
        at = np.flatnonzero(_is_mark(block))
        marks = block[at]
        quotes = self._unescaped_quotes(block, at, marks)
        # After an odd number of quotes, the text is inside a string.
        inside = (np.cumsum(quotes, dtype=np.int32) + self._in_string) % 2 == 1
        outside = ~(inside | quotes)
        folded = marks | _FOLD
        depth = np.cumsum(
            (outside & (folded == _OPEN)).astype(np.int8) - (outside & (folded == _CLOSE)),
            dtype=np.int32,
        )
        commas = at[outside & (marks == _COMMA) & (depth == 1 - self._depth)]
        spaces = at[outside & (marks <= _SPACE) & _WHITESPACE[marks]]
        if len(at):
            self._in_string = bool(inside[-1])
            self.nested = max(self.nested, self._depth + int(depth.max()))
            self._depth += int(depth[-1])
        if len(spaces) or self._after_space:
            block, commas = self._squeeze(block, spaces, commas)
        elif len(block):
            self._after_scalar = bool(_SCALAR[block[-1]]) and not self._in_string
        if not self.size and len(block):
            self.is_array = block[0] == _BRACKET
        self._comma_offsets.append(commas + self.size)
        self._texts.append(block.tobytes())
        self.size += len(block)
        self.commas += len(commas)

    def _unescaped_quotes(self, block: Bytes, at: Offsets, marks: Bytes) -> Flags:
        quotes: Flags = marks == _QUOTE
        slashes = at[marks == _BACKSLASH]
        if not (len(slashes) or self._escaping):
            return quotes
        # An odd run of backslashes escapes the quote after it. An unfinished run from the previous
        # block counts as one backslash before this block.
        slashes = np.concatenate(([-1], slashes)) if self._escaping else slashes
        order = np.arange(len(slashes))
        begins = np.diff(slashes, prepend=-3) > 1
        lengths = order - np.maximum.accumulate(np.where(begins, order, 0)) + 1
        at_quotes = np.flatnonzero(quotes)
        before = np.searchsorted(slashes, at[at_quotes]) - 1
        adjacent = (before >= 0) & (slashes[before] == at[at_quotes] - 1)
        quotes[at_quotes[adjacent & (lengths[before] % 2 == 1)]] = False
        self._escaping = bool(slashes[-1] == len(block) - 1 and lengths[-1] % 2)
        return quotes

    def _squeeze(self, block: Bytes, spaces: Offsets, commas: Offsets) -> tuple[Bytes, Offsets]:
        """Remove whitespace from the block. Raises if only whitespace separates two values."""
        keep = np.ones(len(block), np.bool_)
        keep[spaces] = False
        remaining = np.flatnonzero(keep)
        if not len(remaining):
            self._after_space = True
            return block[:0], commas
        text = block[remaining]
        gaps = np.flatnonzero(np.diff(remaining) > 1)
        split = _SCALAR[text[gaps]] & _SCALAR[text[gaps + 1]]
        spaced = self._after_space or remaining[0] > 0
        if split.any() or (spaced and self._after_scalar and _SCALAR[text[0]]):
            raise _invalid("whitespace splits a value, or a comma is missing")
        self._after_space = bool(remaining[-1] < len(block) - 1)
        self._after_scalar = bool(_SCALAR[text[-1]]) and not self._in_string
        return text, np.searchsorted(remaining, commas)


def _is_mark(block: Bytes) -> Flags:
    """Flag the bytes that are brackets, commas, quotes, backslashes or whitespace."""
    folded = block | _FOLD
    marks: Flags = (
        (block <= _SPACE)
        | (block == _QUOTE)
        | (block == _BACKSLASH)
        | (block == _COMMA)
        | (folded == _OPEN)
        | (folded == _CLOSE)
    )
    return marks
