"""A stream as plain Python: what a store must be indistinguishable from."""

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
    """Records in a list, and the few rules of a stream written down as simply as possible."""

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
        """The first record that is neither trimmed nor older than the retention."""
        if self.config.retention == INFINITE:
            return self.trim_point
        horizon = now - int(self.config.retention) * 1000
        return max(self.trim_point, sum(1 for arrival in self.arrivals if arrival < horizon))

    def visible(self, now: int) -> list[SequencedRecord]:
        return self.records[self.first(now) :]

    def refusal(
        self, batch: Sequence[Record], match_seq_num: int | None, fencing_token: str | None
    ) -> type[StreamfoldError] | None:
        """The error that an append must end with, if any."""
        if fencing_token is not None and fencing_token != self.fencing_token:
            return FencingTokenMismatchError
        if match_seq_num is not None and match_seq_num != len(self.records):
            return SeqNumMismatchError
        required = self.config.timestamp_mode is TimestampMode.CLIENT_REQUIRE
        if required and any(record.timestamp is None for record in batch):
            return InvalidError
        return None

    def append(self, batch: Sequence[Record], now: int) -> None:
        """Apply a batch that is not refused."""
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
                wanted = int.from_bytes(record.body, "big")
                self.trim_point = max(self.trim_point, min(wanted, seq_num + 1))

    def _stamp(self, record: Record, now: int) -> int:
        if record.timestamp is None or self.config.timestamp_mode is TimestampMode.ARRIVAL:
            return now
        return record.timestamp if self.config.timestamp_uncapped else min(record.timestamp, now)

    def expire(self, now: int) -> None:
        """Remove what is older than the retention: a longer one does not restore it."""
        self.trim_point = self.first(now)

    def read(
        self, start: int, count: int | None, size: int | None, until: int | None, now: int
    ) -> list[SequencedRecord]:
        """What a read from a seq_num returns under these limits, however many batches it takes."""
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
