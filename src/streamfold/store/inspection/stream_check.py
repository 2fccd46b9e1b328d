"""Compares the records that streams and forks must have with those that are stored."""

from __future__ import annotations

from streamfold.store.engine.location import CHUNKS
from streamfold.store.inspection.chunk_check import ChunkCheck
from streamfold.store.inspection.report import Severity
from streamfold.store.inspection.stream_index import StreamFacts, StreamIndex, describe
from streamfold.store.read_only import ReaderEngine


class StreamCheck:
    """Checks all streams after their chunks have been read."""

    def __init__(self, streams: StreamIndex, chunks: ChunkCheck) -> None:
        self._streams = streams
        self._chunks = chunks

    async def check_missing_files(self, now: ReaderEngine) -> None:
        """Report chunks whose file is missing and still needed. `now` has the newest state.

        A file is deleted before its row, so the file of a trimmed chunk that no fork needs may be
        missing. A server of an earlier version also deletes files that were needed when this check
        began.
        """
        for key, facts, chunk in self._chunks.missing_files:
            if not self._needed(facts, chunk.last_seq_num) or await now.get(key) is None:
                continue
            seq_nums = range(chunk.first_seq_num, chunk.last_seq_num + 1)
            self._chunks.note_gap(facts, seq_nums)
            file = f"{CHUNKS}/{chunk.part.file}"
            message = (
                f"{describe(seq_nums)} of {facts.label} cannot be read: the file {file!r} is missing; "
                "put it back from a backup"
            )
            self._streams.find("chunk_file_missing", facts, message, seq_nums=seq_nums, file=file)

    def _needed(self, facts: StreamFacts, last_seq_num: int) -> bool:
        """Return whether the stream or one of its forks can return this record."""
        if last_seq_num >= facts.trim_point and not facts.purged:
            return True
        forks = [self._streams.by_id[fork] for fork in facts.forks if fork in self._streams.by_id]
        return any(fork.trim_point <= last_seq_num for fork in forks if not fork.purged)

    def run(self) -> None:
        for facts in list(self._streams.by_id.values()):
            facts.gaps.sort(key=lambda gap: gap.start)
            self._check_owner(facts)
            if not facts.purged:
                self._check_tail(facts)
                self._check_own_records(facts)
                self._check_held(facts)
        for facts in self._streams.by_id.values():
            if facts.lineage and not facts.purged:
                self._check_lineage(facts)

    def _check_owner(self, facts: StreamFacts) -> None:
        """Check that rows and records belong to a named stream, or to one being deleted."""
        if facts.row is not None or facts.purged or self._streams.names_damaged:
            return
        if facts.first is None and facts.state is None:
            return
        seq_nums = range(facts.first, facts.end) if facts.first is not None else None
        what = describe(seq_nums) if seq_nums is not None else "the state"
        message = f"{what} of {facts.label} cannot be reached: no stream has this id"
        self._streams.find("stream_missing", facts, message, seq_nums=seq_nums)

    def _check_tail(self, facts: StreamFacts) -> None:
        tail = facts.tail
        if tail is None or facts.row is None:
            return
        if facts.trim_point > tail:
            message = f"{facts.label} is trimmed up to {facts.trim_point}, beyond its tail {tail}"
            self._streams.find("trim_beyond_tail", facts, message)
        if facts.first is not None and facts.end > tail:
            beyond = range(tail, facts.end)
            message = (
                f"{describe(beyond)} of {facts.label} are stored beyond its tail {tail}: the "
                f"next appends would replace them"
            )
            self._streams.find("records_beyond_tail", facts, message, seq_nums=beyond)
        mark = facts.state.tail if facts.state is not None else None
        if mark is None or facts.end != tail or facts.first is None:
            return
        if mark.timestamp < facts.last_timestamp:
            message = (
                f"{facts.label} has a tail with timestamp {mark.timestamp}, before that of "
                f"its last record, {facts.last_timestamp}"
            )
            self._streams.find("timestamp_decreases", facts, message)

    def _check_own_records(self, facts: StreamFacts) -> None:
        tail = facts.tail
        if facts.row is None:
            return
        end = facts.end if tail is None else tail
        reported = self._reported(facts)
        for seq_nums in facts.missing(max(facts.own_start, facts.trim_point), end):
            if seq_nums in reported:
                continue
            self._report_missing(facts, facts, seq_nums)

    def _check_lineage(self, fork: StreamFacts) -> None:
        """Check that every inherited record that the fork can return is stored by its writer."""
        start = fork.trim_point
        for segment in fork.lineage:
            source = self._streams.by_id.get(segment.stream_id)
            if start < segment.end:
                if source is None:
                    source = StreamFacts(segment.stream_id)
                for seq_nums in source.missing(start, segment.end):
                    self._report_missing(fork, source, seq_nums)
            start = max(start, segment.end)
        for ancestor in fork.row.ancestors if fork.row is not None else ():
            source = self._streams.by_id.get(ancestor)
            if source is None or fork.id not in source.forks:
                label = source.label if source is not None else f"the stream with id {ancestor}"
                message = (
                    f"{fork.label} inherits records of {label}, which does not know the fork "
                    f"and may delete them"
                )
                self._streams.find("fork_unprotected", fork, message)

    def _report_missing(self, facts: StreamFacts, source: StreamFacts, seq_nums: range) -> None:
        file = self._chunks.file_of(source, seq_nums)
        inherited = "" if source is facts else f", which it inherits from {source.label},"
        fault = f"the file {file!r} is damaged" if file else "they are not stored"
        message = f"{describe(seq_nums)} of {facts.label}{inherited} cannot be read: {fault}"
        self._streams.find("records_missing", facts, message, seq_nums=seq_nums, file=file)

    def _reported(self, facts: StreamFacts) -> set[range]:
        """Return gaps that a separate finding reports: chunks that are stored but unreadable."""
        return self._chunks.reported.get(facts.id, set())

    def _check_held(self, facts: StreamFacts) -> None:
        row = facts.bytes_row
        if row is None or facts.gaps or self._chunks.file_of(facts, range(facts.end + 1)):
            return
        if row.size != facts.metered:
            message = (
                f"{facts.label} holds {facts.metered} metered bytes below {row.counted_to}, but "
                f"{row.size} are counted"
            )
            self._streams.find("held_wrong", facts, message, severity=Severity.WARNING)
