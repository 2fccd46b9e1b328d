"""What a key may be: the rules that every backend can keep, so that keys move between them.

key      = segment *( "/" segment )         at most KEY_MAX bytes
segment  = 1 to SEGMENT_MAX bytes of UTF-8, not "." or "..", no control characters
"""

from __future__ import annotations

from streamfold.errors import InvalidError

#: Bytes of UTF-8. S3 takes 1,024 for the store's prefix and the key together.
KEY_MAX = 900
#: Bytes of UTF-8: the longest file name that common file systems take.
SEGMENT_MAX = 255


def check_key(key: str) -> None:
    """Refuse a key that could leave the store's root or that some backend cannot hold."""
    _check_text(key, "blob key")
    for segment in key.split("/"):
        _check_segment(key, segment, "blob key")


def check_prefix(prefix: str) -> None:
    """Refuse a prefix that no key can start with; the empty one matches all."""
    if not prefix:
        return
    _check_text(prefix, "blob prefix")
    *folders, last = prefix.split("/")
    for segment in folders:
        _check_segment(prefix, segment, "blob prefix")
    # The last segment may be incomplete: "a/." is a prefix of "a/.hidden".
    if last not in ("", ".", ".."):
        _check_segment(prefix, last, "blob prefix")


def check_range(key: str, start: int, length: int) -> None:
    """Refuse a range that counts from the end or backwards."""
    if start < 0 or length < 0:
        raise InvalidError(
            f"range of blob {key!r} has start {start} and length {length}: neither may be negative"
        )


def check_chunk_size(chunk_size: int) -> None:
    """Refuse empty pieces, which would never end."""
    if chunk_size < 1:
        raise InvalidError(f"chunk_size {chunk_size} must be at least 1 byte")


def _check_text(text: str, what: str) -> None:
    if any(ord(character) < 0x20 or ord(character) == 0x7F for character in text):
        raise InvalidError(f"{what} {text!r} contains a control character: remove it")
    if _size(text, what, text) > KEY_MAX:
        raise InvalidError(f"{what} {text[:80]!r}... has more than {KEY_MAX} bytes: shorten it")


def _check_segment(text: str, segment: str, what: str) -> None:
    if segment in ("", ".", ".."):
        raise InvalidError(
            f"{what} {text!r} has a segment {segment!r}: segments between slashes may not be "
            "empty, '.' or '..', and keys do not begin or end with a slash"
        )
    if _size(segment, what, text) > SEGMENT_MAX:
        raise InvalidError(
            f"{what} {text[:80]!r}... has a segment of more than {SEGMENT_MAX} bytes: split it"
        )


def _size(part: str, what: str, text: str) -> int:
    try:
        return len(part.encode())
    except UnicodeEncodeError:
        raise InvalidError(
            f"{what} {text!r} cannot be written as UTF-8: remove lone surrogates"
        ) from None
