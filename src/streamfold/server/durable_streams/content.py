"""Converts request bodies to records, and records to response bodies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from streamfold.errors import InvalidError, TooLargeError
from streamfold.model.records import (
    BATCH_BYTES_MAX,
    BATCH_RECORDS_MAX,
    CONTINUED,
    HEADER_OVERHEAD,
    RECORD_OVERHEAD,
    Record,
    SequencedRecord,
    is_command,
)
from streamfold.model.resources import StreamStatus
from streamfold.records.batch import RecordBatch, parse_append_input
from streamfold.records.payload import contents
from streamfold.records.protobuf import encode_append_header, varint
from streamfold.server.http.bodies import check_plain
from streamfold.server.http.offload import COPIED_BYTES
from streamfold.server.http.request import Request
from streamfold.server.http.router import memoize_short
from streamfold.server.snapshots import UpdateParts
from streamfold.store.append_queues import APPEND_BYTES_MAX
from streamfold.store.read.requests import ReadBatch
from streamfold.wire.durable_streams.content import (
    PLAIN_BYTES,
    is_json,
    is_plain,
    is_text,
    join_messages,
    split_messages,
)
from streamfold.wire.durable_streams.state_protocol import may_be_state, stamp
from streamfold.wire.json_scan import Limits


class ContentBody(msgspec.Struct, frozen=True, gc=False):
    """A whole body, in the pieces in which it arrived. Joining 32 MiB would block the event loop."""

    parts: list[bytes]

    @property
    def size(self) -> int:
        parts = self.parts
        return len(parts[0]) if len(parts) == 1 else sum(map(len, parts))

    def joined(self) -> bytes:
        """Return the whole body as one bytes object. Call it in a thread for large bodies."""
        return self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)


async def read_body(request: Request) -> ContentBody:
    """Read the whole body. Raises TooLargeError beyond the maximum size of an append."""
    if request.declared_size != 0:
        check_plain(request)
    parts = await request.body_parts(APPEND_BYTES_MAX)
    if parts is None:
        raise TooLargeError(f"the body has more than {APPEND_BYTES_MAX} bytes: send less at once")
    return ContentBody(parts)


#: Metered bytes of a record besides its body, in an append of several records.
_OVERHEAD: Final = RECORD_OVERHEAD + HEADER_OVERHEAD + len(CONTINUED.name) + len(CONTINUED.value)
#: Bytes of a body that fit in one record.
PIECE_MAX: Final = BATCH_BYTES_MAX - _OVERHEAD
#: Maximum messages in one append. Each costs some microseconds and some hundred bytes of memory.
MESSAGES_MAX: Final = 100_000

_LIMITS: Final = Limits(MESSAGES_MAX, PIECE_MAX)
_is_json: Final = memoize_short(is_json)
#: The first header of a continued record, encoded as in an AppendInput.
_MARK: Final = encode_append_header(CONTINUED)


class Updates(NamedTuple):
    """The units of a bootstrap: messages of a JSON stream, or appends of any other stream."""

    bodies: list[bytes]
    #: The position after the last unit, or None without units.
    end: int | None


def is_light(content: ContentBody, content_type: str) -> bool:
    """Return whether `to_batches` takes at most a millisecond, whatever the content."""
    if _is_json(content_type):
        return content.size <= PLAIN_BYTES and is_plain(content.joined())
    return content.size <= COPIED_BYTES


def to_batches(
    content: ContentBody, content_type: str, *, allow_empty: bool
) -> Sequence[RecordBatch]:
    """Convert one append's body to batches, to be appended together."""
    body = content.joined()
    if _is_json(content_type):
        pieces = split_messages(body, _LIMITS, allow_empty=allow_empty) if body else []
    elif len(body) <= PIECE_MAX:
        pieces = [body] if body else []
    else:
        pieces = _cut_text(body) if is_text(content_type) else _cut(body)
    if not pieces:
        if allow_empty:
            return []
        raise InvalidError("the body is empty: send content, or Stream-Closed: true to close")
    if len(pieces) == 1:
        return [RecordBatch.of_one(pieces[0])]
    return list(_batches(pieces))


def _cut(body: bytes) -> list[bytes]:
    return [body[at : at + PIECE_MAX] for at in range(0, len(body), PIECE_MAX)]


def _cut_text(body: bytes) -> list[bytes]:
    """Split text into pieces, none of which begins inside a character or a CRLF.

    A live read sends each piece as separate lines, so a split character or CRLF would arrive
    altered.
    """
    pieces, at = [], 0
    while len(body) - at > PIECE_MAX:
        end = at + PIECE_MAX
        # A character has up to four bytes. All except the first begin with the bits 10.
        starts = (end - back for back in range(4) if body[end - back] & 0xC0 != 0x80)
        end = next(starts, end)
        if body[end - 1 : end + 1] == b"\r\n":
            end -= 1
        pieces.append(body[at:end])
        at = end
    return [*pieces, body[at:]] if body else []


def _batches(pieces: Sequence[bytes]) -> Iterator[RecordBatch]:
    group: list[bytes] = []
    metered, last = 0, len(pieces) - 1
    for index, piece in enumerate(pieces):
        size = len(piece) + _OVERHEAD
        if group and (len(group) == BATCH_RECORDS_MAX or metered + size > BATCH_BYTES_MAX):
            yield _batch(group, continued=True)
            group, metered = [], 0
        group.append(piece)
        metered += size
        if index == last:
            yield _batch(group, continued=False)


def _batch(pieces: Sequence[bytes], *, continued: bool) -> RecordBatch:
    """Build a batch.

    All records carry the mark, the last one only if the append continues after it.
    """
    if len(pieces) == 1:
        # A single piece is usually large. This path copies it least often.
        return RecordBatch.of([Record(pieces[0], (CONTINUED,) if continued else ())])
    # Encoded as an S2 AppendInput, which is the fastest form for many records.
    marks = [_MARK] * (len(pieces) - 1) + [_MARK if continued else b""]
    return parse_append_input(b"".join(map(_encoded, pieces, marks))).batch


def _encoded(piece: bytes, mark: bytes) -> bytes:
    """Encode one record as an AppendInput field."""
    content = b"%b\x1a%b%b" % (mark, varint(len(piece)), piece)
    return b"\x0a%b%b" % (varint(len(content)), content)


def bodies_of(batch: ReadBatch) -> list[bytes]:
    """Return the bodies that readers receive. Command records are not content."""
    return contents(batch.payload()).bodies


def messages_of(batch: ReadBatch) -> list[bytes]:
    """Return the messages of a JSON stream's batch, adding offsets to State Protocol messages."""
    records = contents(batch.payload())
    if not may_be_state(batch.payload()):
        return records.bodies
    return stamp(zip(records.seq_nums, records.bodies, strict=True))


def join(batches: Iterable[ReadBatch], content_type: str) -> bytes:
    """Build the body of a read."""
    if is_json(content_type):
        return join_messages([message for batch in batches for message in messages_of(batch)])
    return b"".join([body for batch in batches for body in bodies_of(batch)])


def updates(
    records: Iterable[SequencedRecord], content_type: str, *, whole: bool = True
) -> Updates:
    """Return the messages or appends in `records`. `whole` omits an append whose end is missing."""
    bodies: list[bytes] = []
    single = is_json(content_type)
    parts: list[bytes] = []
    end: int | None = None
    following = 0
    for record in records:
        following = record.seq_num + 1
        if is_command(record):
            continue
        parts.append(record.body)
        if single or CONTINUED not in record.headers:
            bodies.append(b"".join(parts))
            parts, end = [], following
    if parts and not whole:
        bodies.append(b"".join(parts))
        end = following
    return Updates(bodies, end)


def whole_updates(
    request: Request, status: StreamStatus, batches: Sequence[ReadBatch]
) -> UpdateParts:
    """Return each message or append as a separate part."""
    content_type = status.traits.content_type
    at_tail = bool(batches) and batches[-1].end_seq_num >= status.tail
    # Batch by batch: a hundred thousand records at once would keep the garbage collector busy.
    records = (record for batch in batches for record in batch.records())
    return UpdateParts(content_type, *updates(records, content_type, whole=not at_tail))
