"""Copies one stream from one server to another. An interrupted copy can be resumed.

The target's tail alone determines how far the copy is. Every batch is appended with
`match_seq_num`, so no record is copied twice, whatever was interrupted. Records keep headers, body
and timestamp, and their seq_num unless they are renumbered. Commands are records and are copied as
such.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from time import monotonic
from typing import TYPE_CHECKING, Final

from blake3 import blake3
from s2_sdk import (
    AppendInput,
    CommandRecord,
    ReadLimit,
    ReadUnwrittenError,
    Record,
    S2Basin,
    S2ServerError,
    SeqNum,
    StreamConfig,
    Timestamp,
    Timestamping,
    TimestampingMode,
)

from streamfold.cli.exit_status import VerbFailedError
from streamfold.cli.output import ProgressBar
from streamfold.cli.records.append import AppendCounts, append_all
from streamfold.model.records import BATCH_RECORDS_MAX, TRIM_COMMAND

if TYPE_CHECKING:
    from s2_sdk import AppendAck, S2Stream, SequencedRecord

#: Maximum unacknowledged metered bytes, and batches.
_UNACKED_BYTES: Final = 16 << 20
_UNACKED_BATCHES: Final = 64
#: Records from which a progress bar is drawn.
_BAR_RECORDS: Final = 10_000
#: Seconds between progress notes.
_NOTE_INTERVAL: Final = 2.0
#: The target's timestamping mode during the copy, which preserves timestamps.
_COPIED_STAMPS: Final = Timestamping(mode=TimestampingMode.CLIENT_REQUIRE, uncapped=True)
_EXISTS: Final = "resource_already_exists"


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """How to copy a source whose first records were trimmed, and how to verify the copy."""

    pad: bool
    renumber: bool
    verify: str


@dataclass(frozen=True, slots=True)
class CopyReport:
    """The outcome of copying one stream."""

    records: int
    #: The target's tail before and after the copy.
    start: int
    tail: int
    #: By how much seq_nums are lower in the target.
    shift: int
    #: Number of records compared in both streams, and their BLAKE3 hash. None if none were
    #: compared.
    verified: int | None
    digest: str | None


class StreamCopy:
    """Copies one stream from a source to a target, and reports progress through `note`.

    `prepare` makes the target preserve timestamps. It is called once the target is known to be a
    copy.
    """

    def __init__(
        self,
        source: S2Stream,
        target: S2Stream,
        options: CopyOptions,
        note: Callable[[str], None],
        prepare: Callable[[], Awaitable[object]],
    ) -> None:
        self._source = source
        self._target = target
        self._options = options
        self._note = note
        self._prepare = prepare

    async def run(self) -> CopyReport:
        """Copy everything up to the source's current tail."""
        first, end = await _extent(self._source)
        tail = (await self._target.check_tail()).seq_num
        shift = await self._shift(first.seq_num, tail)
        self._check_positions(first.seq_num, end, tail, shift)
        await self._check_last(tail, shift)
        await self._prepare()
        records = end - shift - tail
        with ProgressBar("copy", records, "records", least=_BAR_RECORDS) as bar:
            progress = _Noted(self._note, records, bar)
            async with self._target.append_session(
                max_unacked_bytes=_UNACKED_BYTES, max_unacked_batches=_UNACKED_BATCHES
            ) as session:
                await append_all(session, self._batches(first, end, tail, shift), progress)
        verified = digest = None
        if self._options.verify != "none":
            start = 0 if self._options.verify == "all" else max(tail, first.seq_num - shift)
            with ProgressBar("verify", end - shift - start, "records", least=_BAR_RECORDS) as bar:
                verified, digest = await compare(
                    self._source, self._target, start, end - shift, shift, bar
                )
        return CopyReport(records, tail, end - shift, shift, verified, digest)

    async def _shift(self, first: int, tail: int) -> int:
        if not self._options.renumber:
            return 0
        return first if tail == 0 else await self._find_shift(tail)

    async def _find_shift(self, tail: int) -> int:
        """Find out by how much an earlier copy lowered seq_nums, from its last record's position."""
        last = await _record(self._target, tail - 1)
        if last is not None:
            # A bounded read, which ends at the tail. Many records may share a timestamp.
            stamps = last.timestamp, last.timestamp + 1
            async for record in _each_between(self._source, *stamps):
                shift: int = record.seq_num - last.seq_num
                if shift >= 0 and _same(translate(record, shift), last):
                    return shift
        raise VerbFailedError(
            "copy_unrelated",
            f"the target ends at seq_num {tail}, and no record of the source equals its last: delete "
            "the target and copy again, or choose another",
        )

    def _check_positions(self, first: int, end: int, tail: int, shift: int) -> None:
        if tail > end - shift:
            raise VerbFailedError(
                "copy_unrelated",
                f"the target ends at seq_num {tail}, beyond the source, which ends at {end - shift}: "
                "it holds other records; choose another target",
            )
        if tail < first - shift and not self._options.pad:
            raise VerbFailedError(
                "source_trimmed",
                f"the source starts at seq_num {first}, since older records were trimmed, and the "
                f"target ends at {tail}: give --pad to fill the gap with {first - shift - tail} "
                "empty records, trimmed at once, so that seq_nums stay as they are"
                + ("" if tail else ", or --renumber to start at 0"),
            )

    async def _check_last(self, tail: int, shift: int) -> None:
        """Raise if the target's last record differs from the source's."""
        if tail == 0:
            return
        copied = await _record(self._target, tail - 1)
        original = await _record(self._source, tail - 1 + shift)
        if copied and original and not _same(translate(original, shift), copied):
            raise VerbFailedError(
                "copy_unrelated",
                f"record {tail - 1} of the target differs from the source's: the target holds "
                "other records; choose another, or delete it",
            )

    async def _batches(
        self, first: _First, end: int, tail: int, shift: int
    ) -> AsyncIterator[AppendInput]:
        following = tail
        for padding in _padding(tail, first.seq_num - shift, first.timestamp):
            yield AppendInput(padding, match_seq_num=following)
            following += len(padding)
        async for records in read_range(self._source, following + shift, end):
            if records[0].seq_num != following + shift:
                raise VerbFailedError(
                    "source_trimmed",
                    f"the source was trimmed to seq_num {records[0].seq_num} while it was copied, and "
                    f"{following + shift} is gone: copy again to see the options",
                )
            copied = [translate(record, shift) for record in records]
            yield AppendInput(copied, match_seq_num=following)
            following += len(copied)


@dataclass(frozen=True, slots=True)
class _First:
    """The first record left in a stream, or its tail if there is none."""

    seq_num: int
    timestamp: int


class _Noted(AppendCounts):
    """Counts acknowledged records, and prints progress notes unless a bar shows progress."""

    def __init__(self, note: Callable[[str], None], total: int, bar: ProgressBar) -> None:
        super().__init__()
        self._bar = bar
        self._note_progress = note
        self._total = total
        self._next = monotonic() + _NOTE_INTERVAL

    def note(self, ack: AppendAck) -> None:
        super().note(ack)
        self._bar.update(ack.end.seq_num - ack.start.seq_num)
        if not self._bar.shown and monotonic() >= self._next:
            self._next = monotonic() + _NOTE_INTERVAL
            self._note_progress(f"{self.records} of {self._total} records")


async def create_target(
    source: S2Basin, target: S2Basin, source_stream: str, target_stream: str
) -> StreamConfig:
    """Create the target unless it exists, preserving timestamps.

    Returns the source's configuration.
    """
    config = await source.get_stream_config(source_stream)
    copying = replace(config, timestamping=_COPIED_STAMPS)
    try:
        await target.create_stream(target_stream, config=copying)
    except S2ServerError as error:
        if error.code != _EXISTS:
            raise
    return config


async def keep_stamps(target: S2Basin, stream: str) -> None:
    """Make the target accept the source's timestamps unchanged."""
    await target.reconfigure_stream(stream, config=StreamConfig(timestamping=_COPIED_STAMPS))


def translate(record: SequencedRecord, shift: int) -> Record:
    """Return a record as appended to the target. A trim's seq_num is shifted like all others."""
    body = record.body
    if shift and record.is_command_record() and record.headers[0][1] == TRIM_COMMAND:
        body = max(0, int.from_bytes(body, "big") - shift).to_bytes(8, "big")
    return Record(body=body, headers=record.headers, timestamp=record.timestamp)


async def compare(
    source: S2Stream, target: S2Stream, start: int, end: int, shift: int, bar: ProgressBar
) -> tuple[int, str]:
    """Read and compare both streams record by record. Returns the number of records and their hash.

    Skips only leading records that either stream has trimmed meanwhile.
    """
    copies, originals = _each(target, start, end), _each(source, start + shift, end + shift)
    copied, original = await anext(copies, None), await anext(originals, None)
    while copied and original and copied.seq_num + shift != original.seq_num:
        if copied.seq_num + shift < original.seq_num:
            copied = await anext(copies, None)
        else:
            original = await anext(originals, None)
    digest, compared = blake3(), 0
    while copied and original:
        if copied.seq_num + shift != original.seq_num or not _same(
            translate(original, shift), copied
        ):
            raise _different(copied.seq_num)
        digest.update(_encoded(copied))
        compared += 1
        bar.update(1)
        copied, original = await anext(copies, None), await anext(originals, None)
    if copied or original:
        raise _different(start + compared)
    return compared, digest.hexdigest()


def _different(seq_num: int) -> VerbFailedError:
    return VerbFailedError(
        "copy_differs",
        f"record {seq_num} of the target differs from the source's: another writer appends to the "
        "target, or one of the servers is at fault; delete the target and copy again",
    )


async def read_range(
    stream: S2Stream, start: int, end: int
) -> AsyncIterator[list[SequencedRecord]]:
    """Yield batches of records from `start`, or from the first one left, up to `end`."""
    if start >= end:
        return
    session = stream.read_session(start=SeqNum(start), limit=ReadLimit(count=end - start))
    try:
        async for batch in session:
            records = [record for record in batch.records if record.seq_num < end]
            if records:
                yield records
            if batch.records and batch.records[-1].seq_num + 1 >= end:
                return
    except ReadUnwrittenError:
        return
    finally:
        await session.close()


async def _each(stream: S2Stream, start: int, end: int) -> AsyncIterator[SequencedRecord]:
    async for records in read_range(stream, start, end):
        for record in records:
            yield record


async def _each_between(stream: S2Stream, since: int, until: int) -> AsyncIterator[SequencedRecord]:
    """Yield records with timestamps from `since` up to but excluding `until`."""
    session = stream.read_session(start=Timestamp(since), until_timestamp=until, clamp_to_tail=True)
    try:
        async for batch in session:
            for record in batch.records:
                yield record
    except ReadUnwrittenError:
        return
    finally:
        await session.close()


async def _record(stream: S2Stream, seq_num: int) -> SequencedRecord | None:
    """Return the record with that seq_num, or None if it was trimmed or does not exist yet."""
    try:
        batch = await stream.read(start=SeqNum(seq_num), limit=ReadLimit(count=1))
    except ReadUnwrittenError:
        return None
    record = batch.records[0] if batch.records else None
    return record if record is not None and record.seq_num == seq_num else None


async def _extent(stream: S2Stream) -> tuple[_First, int]:
    """Return where a stream starts and ends."""
    tail = await stream.check_tail()
    try:
        batch = await stream.read(start=SeqNum(0), limit=ReadLimit(count=1))
    except ReadUnwrittenError:
        return _First(tail.seq_num, tail.timestamp), tail.seq_num
    if not batch.records:
        return _First(tail.seq_num, tail.timestamp), tail.seq_num
    return _First(batch.records[0].seq_num, batch.records[0].timestamp), tail.seq_num


def _padding(start: int, end: int, timestamp: int) -> Iterator[list[Record]]:
    """Yield batches of empty records that replace trimmed ones. The last record trims them."""
    for at in range(start, end, BATCH_RECORDS_MAX):
        size = min(BATCH_RECORDS_MAX, end - at)
        batch = [Record(body=b"", timestamp=timestamp)] * size
        if at + size == end:
            batch[-1] = replace(CommandRecord.trim(end), timestamp=timestamp)
        yield batch


def _same(expected: Record, record: SequencedRecord) -> bool:
    return (expected.body, list(map(tuple, expected.headers)), expected.timestamp) == (
        record.body,
        list(map(tuple, record.headers)),
        record.timestamp,
    )


def _encoded(record: SequencedRecord) -> bytes:
    """Encode a record for the hash, with each part after its length, so that parts cannot merge."""
    parts = [part for header in record.headers for part in header]
    parts += [record.body, record.timestamp.to_bytes(8, "big")]
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)
