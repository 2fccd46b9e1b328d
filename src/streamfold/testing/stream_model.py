"""A reference model of a stream in plain Python. A store must behave identically."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from streamfold.errors import (
    FencingTokenMismatchError,
    InvalidError,
    SeqNumMismatchError,
    StreamfoldError,
)
from streamfold.model.configs import INFINITE, StreamConfig, TimestampMode
from streamfold.model.positions import SeqNum, StreamPosition, Timestamp
from streamfold.model.records import (
    FENCE_COMMAND,
    TRIM_COMMAND,
    Header,
    Record,
    SequencedRecord,
    metered_size,
)


@dataclass(slots=True)
class StreamModel:
    """A list of records and the rules of a stream, written as simply as possible."""

    config: StreamConfig
    records: list[SequencedRecord] = field(default_factory=list)
    arrivals: list[int] = field(default_factory=list)
    trim_point: int = 0
    fencing_token: str = ""

    @property
    def tail(self) -> StreamPosition:
        last = self.records[-1].timestamp if self.records else 0
        return StreamPosition(SeqNum(len(self.records)), Timestamp(last))

    def first(self, now: int) -> int:
        """Return the seq_num of the first record neither trimmed nor past its retention."""
        if self.config.retention == INFINITE:
            return self.trim_point
        horizon = now - int(self.config.retention) * 1000
        return max(self.trim_point, sum(1 for arrival in self.arrivals if arrival < horizon))

    def visible(self, now: int) -> list[SequencedRecord]:
        return self.records[self.first(now) :]

    def refusal(
        self, batch: Sequence[Record], match_seq_num: int | None, fencing_token: str | None
    ) -> type[StreamfoldError] | None:
        """Return the error an append must raise, or None if it must succeed."""
        if fencing_token is not None and fencing_token != self.fencing_token:
            return FencingTokenMismatchError
        if match_seq_num is not None and match_seq_num != len(self.records):
            return SeqNumMismatchError
        required = self.config.timestamp_mode is TimestampMode.CLIENT_REQUIRE
        if required and any(record.timestamp is None for record in batch):
            return InvalidError
        return None

    def append(self, batch: Sequence[Record], now: int) -> None:
        """Append a batch that `refusal` allows."""
        for record in batch:
            seq_num = len(self.records)
            timestamp = max(self._stamp(record, now), self.tail.timestamp)
            placed = SequencedRecord(
                SeqNum(seq_num), Timestamp(timestamp), record.headers, record.body
            )
            self.records.append(placed)
            self.arrivals.append(now)
            if record.headers == (Header(b"", FENCE_COMMAND),):
                self.fencing_token = record.body.decode()
            elif record.headers == (Header(b"", TRIM_COMMAND),):
                point = int.from_bytes(record.body, "big")
                self.trim_point = max(self.trim_point, min(point, seq_num + 1))

    def _stamp(self, record: Record, now: int) -> int:
        if record.timestamp is None or self.config.timestamp_mode is TimestampMode.ARRIVAL:
            return now
        return record.timestamp if self.config.timestamp_uncapped else min(record.timestamp, now)

    def expire(self, now: int) -> None:
        """Trim records past their retention. A later, longer retention does not restore them."""
        self.trim_point = self.first(now)

    def read(
        self, start: int, count: int | None, size: int | None, until: int | None, now: int
    ) -> list[SequencedRecord]:
        """Return the records a read must deliver under these limits, over all its batches."""
        result: list[SequencedRecord] = []
        used = 0
        for record in self.records[max(start, self.first(now)) :]:
            used += metered_size(record)
            if (
                (count is not None and len(result) >= count)
                or (size is not None and used > size)
                or (until is not None and record.timestamp >= until)
            ):
                break
            result.append(record)
        return result
