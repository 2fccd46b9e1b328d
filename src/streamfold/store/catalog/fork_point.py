"""Where exactly a fork leaves its source."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple

from streamfold.errors import InvalidError
from streamfold.model.positions import SeqNum, StreamPosition, Timestamp
from streamfold.model.records import CONTINUED, SequencedRecord, is_command
from streamfold.records import payload as payloads
from streamfold.store.log.sealing import SealingKey
from streamfold.store.log.stream_log import StreamLog
from streamfold.store.mount import Session
from streamfold.store.read import lineage
from streamfold.store.read.cursor import Cursor
from streamfold.store.read.requests import Allowance
from streamfold.store.read.seek import chunk_from


class ForkPoint(NamedTuple):
    """What a fork has from its source, and what it begins with itself."""

    #: After the last record that is inherited.
    end: StreamPosition
    #: The position from which `end` was counted.
    anchor: int
    #: The beginning of the record at `end`, if the fork leaves in the middle of it.
    part: bytes | None


async def find_fork_point(
    session: Session,
    source: StreamLog,
    anchor: int,
    sub_offset: int,
    key: SealingKey | None,
    *,
    in_records: bool,
) -> ForkPoint:
    """The point `sub_offset` records or bytes into the append at `anchor`."""
    end, left, part = anchor, sub_offset, None
    begin = anchor if sub_offset else None
    async for record in _append_at(session, source, begin, key, in_records=in_records):
        size = 1 if in_records else len(record.body)
        if size > left:
            part = record.body[:left] if left else None
            left = 0
            break
        left -= size
        end = record.seq_num + 1
        if not left:
            break
    if left:
        what = "messages" if in_records else "bytes"
        raise InvalidError(
            f"fork sub-offset {sub_offset} is {left} {what} more than the append at its offset has"
        )
    return ForkPoint(await _position(session, source, end, key), anchor, part)


async def _append_at(
    session: Session,
    source: StreamLog,
    seq_num: int | None,
    key: SealingKey | None,
    *,
    in_records: bool,
) -> AsyncIterator[SequencedRecord]:
    """The records of the append that begins at `seq_num`; of a fork, what it has of that append."""
    if seq_num is None:
        return
    cursor = Cursor(session, source, seq_num, Allowance(None, None, None), key)
    try:
        while batch := await cursor.next(fill=False):
            for record in batch.records():
                if not is_command(record):
                    yield record
                    end = record.seq_num + 1
                    cut = in_records and lineage.ends_at(source.row, end)
                    if cut or CONTINUED not in record.headers:
                        return
    finally:
        await cursor.close()


async def _position(
    session: Session, source: StreamLog, end: int, key: SealingKey | None
) -> StreamPosition:
    """The position `end` with the timestamp of the record before it."""
    if end == source.durable.seq_num:
        return source.durable
    if end <= source.retained_from:
        return StreamPosition(SeqNum(end), Timestamp(0))
    chunk = await chunk_from(session, source, end - 1, key)
    if chunk is None:
        return StreamPosition(SeqNum(end), Timestamp(0))
    index = payloads.measure(lineage.own(chunk, source.row, key).payload)
    stamp = int(index.timestamps[end - 1 - chunk.first_seq_num])
    return StreamPosition(SeqNum(end), Timestamp(stamp))
