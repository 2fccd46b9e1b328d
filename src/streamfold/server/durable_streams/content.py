"""Request bodies as records, and records as response bodies."""

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
from streamfold.records.append_input import parse_append_input
from streamfold.records.batch import RecordBatch
from streamfold.records.columns import cells, content_compiled
from streamfold.records.payload import decode
from streamfold.records.plain import encode_rest
from streamfold.records.protobuf import varint
from streamfold.server.http.bodies import check_end, check_plain
from streamfold.server.http.offload import COPIED_BYTES
from streamfold.server.http.request import Request
from streamfold.server.snapshots import UpdateParts
from streamfold.store.durable_streams import APPEND_BYTES_MAX
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


class Body(msgspec.Struct, frozen=True, gc=False):
    """A whole body in the pieces in which it arrived: joining 32 MiB would block the event loop."""

    parts: list[bytes]

    @property
    def size(self) -> int:
        parts = self.parts
        return len(parts[0]) if len(parts) == 1 else sum(map(len, parts))

    def joined(self) -> bytes:
        """The whole body as one; call it in a thread if the body is large."""
        return self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)


async def read_body(request: Request) -> Body:
    """The whole body; TooLargeError if it has more than an append may have."""
    if not request.end_is_certain:
        if await _declares_nothing(request):
            return Body([])
        check_end(request)
    if request.declared_size != 0:
        check_plain(request)
    parts = await request.body_parts(APPEND_BYTES_MAX)
    if parts is None:
        raise TooLargeError(f"the body has more than {APPEND_BYTES_MAX} bytes: send less at once")
    return Body(parts)


async def _declares_nothing(request: Request) -> bool:
    """Whether a request of undeclared size has no body: curl declares no size where it sends none.

    An append that closes its stream and breaks off before its content is never taken for a mere close:
    content has a type.
    """
    appends = request.method == "POST" and request.header("content-type") is not None
    return not appends and await request.has_no_body()


#: Metered bytes of a record beyond its body, in an append of several records.
_OVERHEAD: Final = RECORD_OVERHEAD + HEADER_OVERHEAD + len(CONTINUED.name) + len(CONTINUED.value)
#: Bytes of body that fit into one record.
PIECE_MAX: Final = BATCH_BYTES_MAX - _OVERHEAD
#: Messages in one append: each costs some microseconds and some hundred bytes of memory.
MESSAGES_MAX: Final = 100_000

_LIMITS: Final = Limits(MESSAGES_MAX, PIECE_MAX)
#: The mark with which a continued record begins, encoded as in an AppendInput.
_MARK: Final = b"\x12" + encode_rest(Record(b"", (CONTINUED,)))[1:]


class Updates(NamedTuple):
    """The units of a bootstrap: messages of a JSON stream, appends of any other."""

    bodies: list[bytes]
    #: The position after the last of them; None without any.
    end: int | None


def is_light(content: Body, content_type: str) -> bool:
    """Whether `to_batches` of a body takes a millisecond at most, whatever the content."""
    if is_json(content_type):
        return content.size <= PLAIN_BYTES and is_plain(content.joined())
    return content.size <= COPIED_BYTES


def to_batches(content: Body, content_type: str, *, allow_empty: bool) -> Sequence[RecordBatch]:
    """The records of one append, in batches to be appended together."""
    body = content.joined()
    if is_json(content_type):
        pieces = split_messages(body, _LIMITS, allow_empty=allow_empty) if body else []
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
    """The pieces of a text, none of which begins within a character or a CRLF.

    A live read sends each as lines of its own: what was cut would arrive as something else.
    """
    pieces, at = [], 0
    while len(body) - at > PIECE_MAX:
        end = at + PIECE_MAX
        # A character has up to four bytes, and all but the first begin with the bits 10.
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
    """Records that all carry the mark, but the last only if the append is continued after it."""
    if len(pieces) == 1:
        # A single piece is usually large: this way it is copied least often.
        return RecordBatch.of([Record(pieces[0], (CONTINUED,) if continued else ())])
    # Encoded as an AppendInput of S2, which is the quickest form for many records.
    marks = [_MARK] * (len(pieces) - 1) + [_MARK if continued else b""]
    return parse_append_input(b"".join(map(_encoded, pieces, marks))).batch


def _encoded(piece: bytes, mark: bytes) -> bytes:
    """One record as a field of an AppendInput."""
    content = b"%b\x1a%b%b" % (mark, varint(len(piece)), piece)
    return b"\x0a%b%b" % (varint(len(content)), content)


def bodies(records: Sequence[SequencedRecord]) -> list[bytes]:
    """The bodies that readers get; command records are not content."""
    return [record.body for record in records if not record.headers or not is_command(record)]


def bodies_of(batch: ReadBatch) -> list[bytes]:
    """The same of a batch, by compiled code where it can."""
    payload = batch.payload()
    found = content_compiled(payload)
    return bodies(decode(payload)) if found is None else cells(found)


def messages_of(batch: ReadBatch) -> list[bytes]:
    """The messages of a batch of a JSON stream, those of the State Protocol with their offset."""
    payload = batch.payload()
    if not may_be_state(payload):
        return bodies_of(batch)
    found = content_compiled(payload)
    if found is not None:
        return stamp(enumerate(cells(found), batch.first_seq_num))
    return stamp(
        (record.seq_num, record.body) for record in decode(payload) if not is_command(record)
    )


def join(batches: Iterable[ReadBatch], content_type: str) -> bytes:
    """The body of a read."""
    if is_json(content_type):
        return join_messages([message for batch in batches for message in messages_of(batch)])
    return b"".join(map(_content, batches))


def _content(batch: ReadBatch) -> bytes:
    """The bodies one after the other, as the compiled code has them already."""
    payload = batch.payload()
    found = content_compiled(payload)
    return b"".join(bodies(decode(payload))) if found is None else found.content.tobytes()


def updates(
    records: Iterable[SequencedRecord], content_type: str, *, whole: bool = True
) -> Updates:
    """Messages, or appends; if `whole`, an append whose end is missing is left out."""
    found: list[bytes] = []
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
            found.append(b"".join(parts))
            parts, end = [], following
    if parts and not whole:
        found.append(b"".join(parts))
        end = following
    return Updates(found, end)


def whole_updates(
    request: Request, status: StreamStatus, batches: Sequence[ReadBatch]
) -> UpdateParts:
    """Each message, or each append, as a part of its own."""
    content_type = status.traits.content_type
    at_tail = bool(batches) and batches[-1].end_seq_num >= status.tail
    # Batch by batch: a hundred thousand records at once would keep the garbage collector busy.
    records = (record for batch in batches for record in batch.records())
    return UpdateParts(content_type, *updates(records, content_type, whole=not at_tail))
