"""Snapshots in parts, as Ursula 0.11 takes them: headers of the requests, and the list of parts.

    POST   {stream}/snapshot/{offset}/parts   a part; the answer names it in Stream-Snapshot-Part
    PUT    {stream}/snapshot/{offset}         with Stream-Snapshot-Parts: publishes those it lists
    DELETE {stream}/snapshot/parts            discards all parts that are not published

The list has a line for each part, in the order of the snapshot's bytes; every line ends with LF.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from streamfold.errors import InvalidError
from streamfold.wire.durable_streams.headers import Header
from streamfold.wire.text import parse_unsigned

#: Parts of one snapshot.
PARTS_MAX: Final = 4096
#: Bytes of a list of parts: each name has 64 at most, and a line break.
MANIFEST_MAX: Final = PARTS_MAX * (64 + 1)

#: Headers of requests and answers, as they are sent.
PART: Final = b"stream-snapshot-part"
PARTS: Final = "stream-snapshot-parts"
DIGEST: Final = "stream-snapshot-digest"
#: Limits, as a `HEAD` and refusals name them.
REQUEST_BYTES_MAX: Final = b"ursula-max-request-bytes"
SNAPSHOT_BYTES_MAX: Final = b"ursula-max-snapshot-bytes"
STAGED_MAX: Final = {"parts": b"ursula-max-staged-parts", "bytes": b"ursula-max-staged-bytes"}

_PART_ID: Final = re.compile(r"[!-~]{1,64}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


class PartsCommit(NamedTuple):
    """What the head of a request says that publishes parts."""

    parts: int
    #: Of the whole snapshot, in hex.
    digest: str


def parse_parts_commit(header: Header) -> PartsCommit | None:
    """The commit that a request's head describes; None if its body is the snapshot itself."""
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
    """The names of the parts, each once."""
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
