"""Events as records of a thread's stream.

Each record has one header, `langgraph`: format, the thread's incarnation, event id, part number and
number of the last part. Its body is the event as msgpack, or one part of it. The parts of an event
are contiguous. Another event's records between them invalidate them, and their writer starts over.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec

from streamfold.errors import DataCorruptError, FormatUnsupportedError
from streamfold.follow import StreamRecord
from streamfold.follow.encoding.codecs import MsgpackCodec
from streamfold.model.records import BATCH_BYTES_MAX, Header, Record
from streamfold_langgraph.thread import Event, Thread
from streamfold_langgraph.values import compress, decompress

logger = logging.getLogger(__name__)

HEADER: Final = b"langgraph"
FORMAT: Final = "1"
#: Bytes of an event per record: an append has at most 1 MiB, including headers.
PART_BYTES: Final = BATCH_BYTES_MAX - 1024

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Event)


class ReplacedError(Exception):
    """A record has another incarnation: the thread's stream was deleted and recreated."""


class _Mark(NamedTuple):
    incarnation: str
    event: str
    part: int
    last: int


def to_records(event: Event, incarnation: str, event_id: str) -> list[Record]:
    """Encode an event as one record, or as several if it exceeds 1 MiB."""
    body = _encoder.encode(event)
    starts = range(0, len(body), PART_BYTES)
    return [
        Record(
            body[start : start + PART_BYTES],
            (
                Header(
                    HEADER, f"{FORMAT} {incarnation} {event_id} {part} {len(starts) - 1}".encode()
                ),
            ),
        )
        for part, start in enumerate(starts)
    ]


class Folding:
    """The fold of one thread's stream, which also remembers the newest event."""

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self._warned = False
        #: Id of the newest event.
        self.newest = ""

    def __call__(self, thread: Thread, record: StreamRecord) -> Thread:
        mark = self._mark(record)
        if mark is None:
            self._warn(record)
            return thread
        if thread.incarnation not in ("", mark.incarnation):
            raise ReplacedError
        thread.incarnation = mark.incarnation
        if mark.part == 0:
            thread.parts, thread.parts_of = [], mark.event
        if thread.parts_of == mark.event and mark.part == len(thread.parts):
            parts = [*thread.parts, bytes(record.body)]
            if mark.part < mark.last:
                thread.parts = parts
            else:
                thread.apply(self._event(record, b"".join(parts)))
                thread.parts, thread.parts_of, self.newest = [], "", mark.event
        return thread

    def may_be_newest(self, record: StreamRecord) -> bool:
        """Return whether a record can be the last one folded. Foreign records always can."""
        mark = self._mark(record)
        return mark is None or mark.event == self.newest

    def _mark(self, record: StreamRecord) -> _Mark | None:
        value = next((value for name, value in record.headers if name == HEADER), None)
        if value is None:
            return None
        form, *words = value.decode("ascii", "replace").split(" ")
        if form != FORMAT:
            raise FormatUnsupportedError(
                f"record {record.seq_num} of stream {self._stream} has the format {form[:20]!r}, this "
                f"version of streamfold-langgraph reads {FORMAT}: install a newer one"
            )
        try:
            incarnation, event, part, last = words
            return _Mark(incarnation, event, int(part), int(last))
        except ValueError:
            raise self._corrupt(record, "its header `langgraph` is damaged") from None

    def _event(self, record: StreamRecord, body: bytes) -> Event:
        try:
            event: Event = _decoder.decode(body)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise self._corrupt(record, str(error)) from error
        return event

    def _corrupt(self, record: StreamRecord, reason: str) -> DataCorruptError:
        return DataCorruptError(
            f"record {record.seq_num} of stream {self._stream} is marked as a checkpoint and is none: "
            f"{reason}; find out who appended it, then copy what is before it to another stream"
        )

    def _warn(self, record: StreamRecord) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "record %d of stream %s is not a checkpoint: it is ignored, as are others like it",
                record.seq_num,
                self._stream,
            )


class ThreadCodec:
    """Encodes threads in snapshots as msgpack, compressed because ids and names repeat."""

    name = "langgraph"

    def __init__(self) -> None:
        self._msgpack: MsgpackCodec[Thread] = MsgpackCodec(Thread)

    def encode(self, state: Thread) -> Iterator[bytes | memoryview]:
        yield compress(b"".join(self._msgpack.encode(state)))

    def decode(self, pieces: Iterator[bytes]) -> Thread:
        return self._msgpack.decode(iter([decompress(b"".join(pieces))]))
