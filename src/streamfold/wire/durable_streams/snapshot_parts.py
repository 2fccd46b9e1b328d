"""Snapshots in parts, as in Ursula 0.11: the request headers, and the list of parts.

    POST   {stream}/snapshot/{offset}/parts   a part; the response names it in Stream-Snapshot-Part
    PUT    {stream}/snapshot/{offset}         with Stream-Snapshot-Parts: publishes the listed parts
    DELETE {stream}/snapshot/parts            discards all unpublished parts

The list has one line per part, in the order of the snapshot's bytes. Every line ends with LF.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from streamfold.errors import InvalidError
from streamfold.wire.durable_streams.headers import Header
from streamfold.wire.text import parse_unsigned

#: Maximum parts of one snapshot.
PARTS_MAX: Final = 4096
#: Maximum bytes of a list of parts: each name has at most 64, plus a line break.
MANIFEST_MAX: Final = PARTS_MAX * (64 + 1)

#: Request and response headers, as they are sent.
PART: Final = b"stream-snapshot-part"
PARTS: Final = "stream-snapshot-parts"
DIGEST: Final = "stream-snapshot-digest"
#: Names of limits in `HEAD` responses and in errors.
REQUEST_BYTES_MAX: Final = b"ursula-max-request-bytes"
SNAPSHOT_BYTES_MAX: Final = b"ursula-max-snapshot-bytes"
STAGED_MAX: Final = {"parts": b"ursula-max-staged-parts", "bytes": b"ursula-max-staged-bytes"}

_PART_ID: Final = re.compile(r"[!-~]{1,64}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


class PartsCommit(NamedTuple):
    """The headers of a request that publishes parts."""

    parts: int
    #: Digest of the whole snapshot, in hex.
    digest: str


def parse_parts_commit(header: Header) -> PartsCommit | None:
    """Parse the headers of a request that publishes parts.

    Returns None if the request's body is the snapshot itself.
    """
    text = header(PARTS)
    if text is None:
        return None
    count = parse_unsigned(text, PARTS_MAX)
    if not count:
        raise InvalidError(f"{PARTS} {text[:20]!r} must be 1 to {PARTS_MAX}")
    digest = header(DIGEST)
    if digest is None or not _DIGEST.fullmatch(digest):
        raise InvalidError(
            f"{DIGEST} {(digest or '')[:70]!r} must have the 64 hex digits, in lower case, of the "
            "whole snapshot's digest"
        )
    return PartsCommit(count, digest)


def parse_manifest(body: bytes, count: int) -> list[str]:
    """Parse the names of the parts. Raises InvalidError if a name repeats."""
    lines = body.decode("latin-1").split("\n")
    if lines.pop() or len(lines) != count:
        raise InvalidError(
            f"the list of parts must have {count} lines, as {PARTS} says, each ended by a line feed"
        )
    for number, line in enumerate(lines, 1):
        if not _PART_ID.fullmatch(line):
            raise InvalidError(
                f"line {number} of the list, {line[:70]!r}, is not the name of a part"
            )
    if len(set(lines)) < count:
        raise InvalidError("the list of parts names one twice: give each once, in order")
    return lines
