"""Server-sent events of a read session: batches, heartbeats, and the final event."""

from __future__ import annotations

import re
from typing import Final

from msgspec import Struct

from streamfold.model.positions import U64_MAX, StreamPosition
from streamfold.wire.s2.errors import BadHeaderError, Failure
from streamfold.wire.s2.records_json import encode_position

#: Last event of a session that ended normally. A failed session ends without it.
DONE: Final = b"data: [DONE]\n\n"

_EVENT_ID = re.compile(r"([0-9]{1,20}),([0-9]{1,20}),([0-9]{1,20})")


class EventId(Struct, frozen=True, gc=False):
    """A session's progress. A client that reconnects with it continues from there."""

    #: seq_num of the last record in the batch.
    seq_num: int
    #: Records, and metered bytes, delivered so far.
    count: int
    metered: int

    @classmethod
    def parse(cls, header: str) -> EventId:
        """Parse the value of a `last-event-id` header."""
        match = _EVENT_ID.fullmatch(header.strip())
        numbers = [int(number) for number in match.groups()] if match else []
        if not match or max(numbers) > U64_MAX or numbers[0] == U64_MAX:
            raise BadHeaderError(
                f"last-event-id {header[:80]!r} was not issued by this server: omit it"
            )
        return cls(*numbers)

    def __str__(self) -> str:
        return f"{self.seq_num},{self.count},{self.metered}"


#: Ends an event, after its data.
EVENT_END: Final = b"\n\n"


def batch_head(event_id: EventId) -> bytes:
    """Return the bytes before a batch from `records_json.encode_read_batch`, which is one line."""
    numbers = event_id.seq_num, event_id.count, event_id.metered
    return b"event: batch\nid: %d,%d,%d\ndata: " % numbers


def encode_ping(now_ms: int, tail: StreamPosition) -> bytes:
    """Encode a heartbeat: everything below `tail` was delivered, and nothing was appended since."""
    return b'event: ping\ndata: {"timestamp":%d,"tail":%b}\n\n' % (now_ms, encode_position(tail))


def encode_error(failure: Failure) -> bytes:
    """Encode the last event of a failed session. It does not carry the status."""
    return b"event: error\ndata: %b\n\n" % failure.body
