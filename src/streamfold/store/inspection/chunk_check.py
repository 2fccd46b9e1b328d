"""Checks every chunk of every stream: gapless seq_nums, non-decreasing times, checksums, files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from streamfold.blob import BlobStore
from streamfold.errors import BlobNotFoundError, DataCorruptError, StorageError
from streamfold.records.payload import measure
from streamfold.store import keys
from streamfold.store.engine.engine import KeySpan, Row
from streamfold.store.engine.location import CHUNKS
from streamfold.store.inspection.report import CheckReport, RowScan
from streamfold.store.inspection.stream_index import StreamFacts, StreamIndex, describe
from streamfold.store.log import chunks
from streamfold.store.log.chunk_files import FileName, payloads_of
from streamfold.store.log.chunks import Chunk
from streamfold.store.log.sealing import Sealing

#: Maximum bytes of adjacent chunks read at once: more than one commit writes.
_RUN_MAX = 128 << 20


class ChunkCheck:
    """Reads all chunks in key order, and records what each stream contains."""

    def __init__(
        self,
        scan: RowScan,
        streams: StreamIndex,
        blobs: BlobStore,
        report: CheckReport,
        advance: Callable[[int], None],
    ) -> None:
        self._scan = scan
        self._streams = streams
        self._blobs = blobs
        self._report = report
        self._advance = advance
        #: Hashes of the file names in rows. The names would take ten times the memory.
        self.named_files: set[int] = set()
        #: Records that are stored but unreadable, by stream id.
        self.reported: dict[int, set[range]] = {}
        #: Chunks whose file is missing, with the keys of their rows.
        self.missing_files: list[tuple[bytes, StreamFacts, Chunk]] = []

    async def run(self) -> None:
        start, end = keys.chunks_start(0), keys.CLEANUPS_START
        async for page in self._scan.pages(start, end, "records"):
            run: list[tuple[bytes, StreamFacts, Chunk]] = []
            for row in page:
                decoded = self._decoded(row)
                if decoded is None:
                    continue
                if run and run[0][2].part.file != decoded[2].part.file:
                    await self._check_run(run)
                    run = []
                run.append(decoded)
            if run:
                await self._check_run(run)

    def _decoded(self, row: Row) -> tuple[bytes, StreamFacts, Chunk] | None:
        """Decode a row's chunk and record it as the next of its stream, or None if damaged."""
        key, value = row
        stream_id, last = keys.chunk_parts(key)
        facts = self._streams.facts(stream_id)
        self._report.counts.chunks += 1
        try:
            chunk = chunks.decode(value)
        except StorageError as error:
            self._skip(facts, last, str(error))
            return None
        if not chunk.records or chunk.last_seq_num != last:
            fault = f"its key ends at {last}, and its header at {chunk.last_seq_num}"
            self._skip(facts, last, fault)
            return None
        self._follow(facts, chunk)
        return key, facts, chunk

    def _skip(self, facts: StreamFacts, last: int, fault: str) -> None:
        """Report the unreadable chunk that ends with record `last`. Its first record is unknown."""
        first = max(facts.end, facts.own_start, facts.trim_point)
        seq_nums = range(min(first, last), last + 1)
        self.note_gap(facts, seq_nums)
        self._unreadable(facts, seq_nums, fault)
        if facts.first is None:
            facts.first = seq_nums.start
        facts.end = last + 1

    def _follow(self, facts: StreamFacts, chunk: Chunk) -> None:
        """Record the chunk as the next one of its stream."""
        if facts.first is None:
            facts.first = chunk.first_seq_num
        elif chunk.first_seq_num > facts.end:
            facts.gaps.append(range(facts.end, chunk.first_seq_num))
        elif chunk.first_seq_num < facts.end:
            twice = range(chunk.first_seq_num, min(facts.end, chunk.last_seq_num + 1))
            message = f"{describe(twice)} of {facts.label} are stored twice"
            self._streams.find("seq_num_repeated", facts, message, seq_nums=twice)
        if chunk.first_timestamp < facts.last_timestamp and facts.end:
            self._earlier(facts, chunk.first_seq_num, chunk.first_timestamp)
        facts.end = max(facts.end, chunk.last_seq_num + 1)
        facts.last_timestamp = chunk.last_timestamp
        if facts.bytes_row is not None and chunk.last_seq_num < facts.bytes_row.counted_to:
            facts.metered += chunk.metered
        self._report.counts.records += chunk.records

    def _earlier(self, facts: StreamFacts, seq_num: int, timestamp: int) -> None:
        message = (
            f"record {seq_num} of {facts.label} has timestamp {timestamp}, before the record's "
            f"before it"
        )
        self._streams.find(
            "timestamp_decreases", facts, message, seq_nums=range(seq_num, seq_num + 1)
        )

    async def _check_run(self, run: Sequence[tuple[bytes, StreamFacts, Chunk]]) -> None:
        """Check adjacent chunks that are all in the same file, or all in rows."""
        file = run[0][2].part.file
        if not file:
            for _, facts, chunk in run:
                self._check_payload(facts, chunk)
            return
        self.named_files.add(hash(file))
        if FileName.parse(file) is None:
            for _, facts, chunk in run:
                self._damaged(
                    facts, chunk, f"it names the file {file!r}, which cannot be one", None
                )
            return
        start = run[0][2].part.offset
        length = run[-1][2].part.offset + run[-1][2].part.size - start
        if not 0 < length <= _RUN_MAX:
            for each in run if len(run) > 1 else ():
                await self._check_run([each])
            if len(run) == 1:
                self._damaged(*run[0][1:], f"it has {length} bytes in its file", f"{CHUNKS}/{file}")
            return
        try:
            data = memoryview(await self._blobs.get_range(file, start, length))
        except BlobNotFoundError:
            self.missing_files += run
            return
        self._advance(len(data))
        for _, facts, chunk in run:
            try:
                [whole] = payloads_of(data[chunk.part.offset - start :], [chunk])
            except DataCorruptError as error:
                self._damaged(facts, chunk, str(error), f"{CHUNKS}/{file}")
            else:
                self._check_payload(facts, whole, f"{CHUNKS}/{file}")

    def _check_payload(self, facts: StreamFacts, chunk: Chunk, file: str | None = None) -> None:
        if chunk.sealing is not Sealing.CLEAR:
            self._report.counts.sealed_chunks += 1
            return
        try:
            fault = _fault_of(chunks.unpacked(chunk) if chunk.packed else chunk)
        except DataCorruptError as error:
            fault = str(error)
        if fault is not None:
            self._damaged(facts, chunk, fault, file)

    def _damaged(self, facts: StreamFacts, chunk: Chunk, fault: str, file: str | None) -> None:
        seq_nums = range(chunk.first_seq_num, chunk.last_seq_num + 1)
        self.note_gap(facts, seq_nums)
        self._unreadable(facts, seq_nums, fault, file)

    def note_gap(self, facts: StreamFacts, seq_nums: range) -> None:
        """Record a gap of stored but unreadable records, which a separate finding reports."""
        facts.gaps.append(seq_nums)
        self.reported.setdefault(facts.id, set()).add(seq_nums)

    def _unreadable(
        self, facts: StreamFacts, seq_nums: range, fault: str, file: str | None = None
    ) -> None:
        message = f"{describe(seq_nums)} of {facts.label} cannot be read: {fault}"
        self._streams.find("records_damaged", facts, message, seq_nums=seq_nums, file=file)

    def file_of(self, facts: StreamFacts, seq_nums: range) -> str | None:
        """Return the damaged table that should contain these records of a stream."""
        start, end = keys.chunk(facts.id, seq_nums.start), keys.chunk(facts.id, seq_nums.stop)
        return self._scan.file_of(KeySpan(start, end + b"\x00"))


def _fault_of(chunk: Chunk) -> str | None:
    """Return what is wrong with an unsealed chunk, or None if its records match its header."""
    index = measure(chunk.payload)
    if index.count != chunk.records:
        return f"a chunk has {index.count} records, but its header says {chunk.records}"
    if index.first_seq_num != chunk.first_seq_num:
        return (
            f"a chunk begins with seq_num {index.first_seq_num}, but its header says "
            f"{chunk.first_seq_num}"
        )
    metered = index.metered[-1]
    if metered != chunk.metered:
        return f"a chunk has {metered} metered bytes, but its header says {chunk.metered}"
    stamps = index.timestamps
    if any(after < before for before, after in pairwise(stamps)):
        return "timestamps decrease within a chunk"
    if (stamps[0], stamps[-1]) != (chunk.first_timestamp, chunk.last_timestamp):
        return "a chunk has other timestamps than its header says"
    return None
