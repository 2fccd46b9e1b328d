"""Server-sent events of a read session: batches, heartbeats, and how it ended."""

from __future__ import annotations

import re
from typing import Final

from msgspec import Struct

from streamfold.model.positions import U64_MAX, StreamPosition
from streamfold.wire.s2.errors import BadHeaderError, Failure
from streamfold.wire.s2.records_json import encode_position

#: The last event of a session that ended as it should; a failed one ends without it.
DONE: Final = b"data: [DONE]\n\n"

_EVENT_ID = re.compile(r"([0-9]{1,20}),([0-9]{1,20}),([0-9]{1,20})")


class EventId(Struct, frozen=True, gc=False):
    """How far a session got; a client that reconnects with it continues there."""

    #: Of the last record in the batch.
    seq_num: int
    #: Records and metered bytes delivered so far.
    count: int
    metered: int

    @classmethod
    def parse(cls, header: str) -> EventId:
        """The value of a `last-event-id` header."""
        match = _EVENT_ID.fullmatch(header.strip())
        numbers = [int(number) for number in match.groups()] if match else []
        if not match or max(numbers) > U64_MAX or numbers[0] == U64_MAX:
            raise BadHeaderError(
                f"last-event-id {header[:80]!r} was not issued by this server: omit it"
            )
        return cls(*numbers)

    def __str__(self) -> str:
        return f"{self.seq_num},{self.count},{self.metered}"


#: Follows the data of an event.
EVENT_END: Final = b"\n\n"


def batch_head(event_id: EventId) -> bytes:
    """What goes before a batch; the batch, as `records_json.encode_read_batch` has it, is one line."""
    numbers = event_id.seq_num, event_id.count, event_id.metered
    return b"event: batch\nid: %d,%d,%d\ndata: " % numbers


def encode_ping(now_ms: int, tail: StreamPosition) -> bytes:
    """A heartbeat: everything below `tail` was delivered, and nothing was appended since."""
    return b'event: ping\ndata: {"timestamp":%d,"tail":%b}\n\n' % (now_ms, encode_position(tail))


def encode_error(failure: Failure) -> bytes:
    """The last event of a session that failed; it does not carry the status."""
    return b"event: error\ndata: %b\n\n" % failure.body
