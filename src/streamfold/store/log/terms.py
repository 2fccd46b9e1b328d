"""The terms of a stream: its closed flag, last Stream-Seq and producers' progress.

One step checks an append against the newest accepted terms, durable or not, and updates them.
"""

from __future__ import annotations

import msgspec

from streamfold.errors import (
    ContentTypeMismatchError,
    InvalidError,
    ProducerGapError,
    ProducersExhaustedError,
    ProducerStaleError,
    StreamClosedError,
    StreamSeqError,
)
from streamfold.model.resources import OCTETS, Claim, Producer, StreamTraits, media_type
from streamfold.store import keys, rows
from streamfold.store.engine.engine import Op
from streamfold.store.rows import ProducerRow, StateRow

#: Maximum producers that a stream remembers. Idle producers make room for new ones.
PRODUCERS_MAX = 4096
#: Milliseconds of inactivity after which a producer may be forgotten: 7 days.
PRODUCER_IDLE = 7 * 24 * 3600 * 1000


class Terms(msgspec.Struct, gc=False):
    """The conditions that the next append to a stream must meet."""

    closed: bool
    closed_by: tuple[str, int, int] | None
    stream_seq: str | None
    content_type: str
    _stream: str
    _producers: dict[str, ProducerRow]
    #: Producer ids. An empty dictionary takes less memory than an empty set.
    _changed: dict[str, None] = {}

    @classmethod
    def of(
        cls,
        stream: str,
        traits: StreamTraits | None,
        state: StateRow,
        producers: dict[str, ProducerRow],
    ) -> Terms:
        """Return the terms of a stream in this state."""
        content_type = media_type(traits.content_type) if traits else OCTETS
        return cls(state.closed, state.closed_by, state.stream_seq, content_type, stream, producers)

    @property
    def changed(self) -> bool:
        """Whether `take_changes` has rows to return."""
        return bool(self._changed)

    @property
    def has_producers(self) -> bool:
        return bool(self._producers)

    @property
    def producers(self) -> dict[str, ProducerRow]:
        """The last append of each producer, by id. Do not modify."""
        return self._producers

    @property
    def producer_count(self) -> int:
        return len(self._producers)

    def producer(self, producer_id: str) -> ProducerRow | None:
        """Return a producer's newest epoch and last sequence number."""
        return self._producers.get(producer_id)

    def check_open(self) -> None:
        """Raise if the stream is closed."""
        if self.closed:
            raise StreamClosedError(self._stream)

    def repeats(self, claim: Claim, now: int) -> bool:
        """Return whether this append was made before. Raises if it is new and rejected."""
        if self.closed:
            if self._repeats_close(claim):
                return True
            raise StreamClosedError(self._stream)
        if claim.content_type is not None and claim.content_type != self.content_type:
            raise ContentTypeMismatchError(claim.content_type, self.content_type)
        if claim.producer is not None and self._repeats(claim.producer, now):
            return True
        if claim.stream_seq is not None and not _follows(claim.stream_seq, self.stream_seq):
            raise StreamSeqError(claim.stream_seq, self.stream_seq or "")
        return False

    def apply(self, claim: Claim, now: int) -> None:
        """Apply the claim of an accepted append."""
        if producer := claim.producer:
            self._producers[producer.id] = ProducerRow(producer.epoch, producer.seq, now)
            self._changed[producer.id] = None
        if claim.stream_seq is not None:
            self.stream_seq = claim.stream_seq
        if claim.close:
            self.closed = True
            if producer:
                self.closed_by = producer.id, producer.epoch, producer.seq

    def take_changes(self, stream_id: int) -> list[Op]:
        """Return the rows of producers that changed since the last call."""
        ops: list[Op] = []
        for producer_id in self._changed:
            row = self._producers.get(producer_id)
            ops.append((keys.producer(stream_id, producer_id), rows.encode(row) if row else None))
        self._changed.clear()
        return ops

    def _repeats_close(self, claim: Claim) -> bool:
        if producer := claim.producer:
            return self.closed_by == (producer.id, producer.epoch, producer.seq)
        return claim.close and claim.content_type is None

    def _repeats(self, producer: Producer, now: int) -> bool:
        former = self._producers.get(producer.id)
        if former is None:
            if producer.seq:
                raise ProducerGapError(producer.id, 0, producer.seq)
            self._make_room(now)
            return False
        if producer.epoch < former.epoch:
            raise ProducerStaleError(producer.id, producer.epoch, former.epoch)
        if producer.epoch > former.epoch:
            if producer.seq:
                raise InvalidError(
                    f"producer {producer.id!r} starts epoch {producer.epoch} with sequence number "
                    f"{producer.seq}: start a new epoch with 0"
                )
            return False
        if producer.seq > former.seq + 1:
            raise ProducerGapError(producer.id, former.seq + 1, producer.seq)
        return producer.seq <= former.seq

    def _make_room(self, now: int) -> None:
        if len(self._producers) < PRODUCERS_MAX:
            return
        idle = [key for key, row in self._producers.items() if row.at < now - PRODUCER_IDLE]
        if not idle:
            raise ProducersExhaustedError(
                f"stream {self._stream!r} has {PRODUCERS_MAX} producers that were active within the "
                "last 7 days: reuse their ids instead of new ones"
            )
        for producer_id in idle:
            del self._producers[producer_id]
        self._changed.update(dict.fromkeys(idle))


def _follows(seq: str, last: str | None) -> bool:
    """Compare by bytes, not by characters."""
    return last is None or seq.encode() > last.encode()
