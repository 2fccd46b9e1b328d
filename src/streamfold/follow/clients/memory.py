"""An in-memory stream that obeys every rule of a real one, for testing folds and followers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from streamfold.errors import (
    FencingTokenMismatchError,
    InvalidError,
    PositionUnwrittenError,
    SeqNumMismatchError,
)
from streamfold.follow.clients.client import Appended, StreamRecord
from streamfold.model.positions import SeqNum, StreamPosition, Timestamp
from streamfold.model.records import (
    BATCH_BYTES_MAX,
    BATCH_RECORDS_MAX,
    FENCE_COMMAND,
    TRIM_COMMAND,
    Record,
    SequencedRecord,
    metered_size,
)
from streamfold.notebook import ROWS_MAX, body_text, html_table


def wall_clock() -> int:
    return int(time.time() * 1000)


class MemoryStream:
    """A `StreamClient` that needs no server.

    A trim takes effect at once or, with `lazy_trims`, only when `apply_trims` is called: on a real
    stream, trimmed records stay readable for a while.
    """

    def __init__(
        self,
        name: str = "memory",
        *,
        lazy_trims: bool = False,
        now: Callable[[], int] = wall_clock,
    ) -> None:
        self.name = name
        self._lazy = lazy_trims
        self._now = now
        self._records: list[SequencedRecord] = []
        self._first = 0
        self._trim_point = 0
        self._token = ""
        self._grown = asyncio.Event()

    def __repr__(self) -> str:
        return f"<MemoryStream {self.name}, first {self._first}, tail {len(self._records)}>"

    def _repr_html_(self) -> str:
        last = self._records[max(self._first, len(self._records) - ROWS_MAX) :]
        return html_table(
            f"{self.name}, first {self._first}, tail {len(self._records)}",
            ("seq_num", "timestamp", "body"),
            ((record.seq_num, str(record.timestamp), body_text(record.body)) for record in last),
        )

    async def check_tail(self) -> StreamPosition:
        last = self._records[-1].timestamp if self._records else 0
        return StreamPosition(SeqNum(len(self._records)), Timestamp(last))

    async def peek(self, seq_num: int, count: int) -> Sequence[StreamRecord]:
        return self._batch(max(seq_num, self._first), count)

    async def read(self, seq_num: int) -> AsyncGenerator[Sequence[StreamRecord]]:
        if seq_num > len(self._records):
            tail = await self.check_tail()
            raise PositionUnwrittenError(tail.seq_num, tail.timestamp)
        while True:
            grown = self._grown
            batch = self._batch(max(seq_num, self._first))
            if batch:
                seq_num = batch[-1].seq_num + 1
                yield batch
            else:
                await grown.wait()

    async def append(
        self,
        records: Sequence[Record],
        *,
        match_seq_num: int | None = None,
        fencing_token: str | None = None,
    ) -> Appended:
        _check(records)
        if fencing_token is not None and fencing_token != self._token:
            raise FencingTokenMismatchError(fencing_token, self._token)
        start = len(self._records)
        if match_seq_num is not None and match_seq_num != start:
            raise SeqNumMismatchError(match_seq_num, start)
        for record in records:
            self._sequence(record)
        if not self._lazy:
            self.apply_trims()
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()
        return Appended(start, len(self._records))

    def apply_trims(self) -> None:
        """Remove the records that trim commands have covered."""
        self._first = self._trim_point

    def _batch(self, start: int, count: int = BATCH_RECORDS_MAX) -> list[SequencedRecord]:
        batch, size = [], 0
        for record in self._records[start : start + min(count, BATCH_RECORDS_MAX)]:
            size += metered_size(record)
            if size > BATCH_BYTES_MAX:
                break
            batch.append(record)
        return batch

    def _sequence(self, record: Record) -> None:
        seq_num, now = len(self._records), self._now()
        timestamp = now if record.timestamp is None else min(record.timestamp, now)
        floor = self._records[-1].timestamp if self._records else 0
        stamp = Timestamp(max(timestamp, floor))
        self._records.append(SequencedRecord(SeqNum(seq_num), stamp, record.headers, record.body))
        command = record.headers[0].value if _is_command(record) else None
        if command == FENCE_COMMAND:
            self._token = record.body.decode()
        elif command == TRIM_COMMAND:
            point = min(int.from_bytes(record.body, "big"), seq_num + 1)
            self._trim_point = max(self._trim_point, point)


def _is_command(record: Record) -> bool:
    return len(record.headers) == 1 and not record.headers[0].name


def _check(records: Sequence[Record]) -> None:
    if not 1 <= len(records) <= BATCH_RECORDS_MAX:
        raise InvalidError(
            f"a batch has {len(records)} records and must have 1 to {BATCH_RECORDS_MAX}"
        )
    size = sum(map(metered_size, records))
    if size > BATCH_BYTES_MAX:
        raise InvalidError(
            f"a batch has {size} metered bytes and may have {BATCH_BYTES_MAX}: split it"
        )
    for record in records:
        if _is_command(record):
            _check_command(record)


def _check_command(record: Record) -> None:
    command = record.headers[0].value
    if command == TRIM_COMMAND and len(record.body) == 8:
        return
    if command == FENCE_COMMAND and len(record.body) <= 36:
        return
    raise InvalidError(
        f"command {command!r} with a body of {len(record.body)} bytes is not a valid command"
    )
