"""Indexes what a store's rows say about its streams, by stream id.

Takes about 600 bytes of memory per stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from streamfold.store.inspection.report import CheckFinding, CheckReport, Severity
from streamfold.store.rows import HeldRow, Segment, StateRow, StreamRow


@dataclass(slots=True)
class StreamFacts:
    """One stream: the content of its rows, and the range of its stored records."""

    id: int
    basin: str | None = None
    name: str | None = None
    row: StreamRow | None = None
    state: StateRow | None = None
    #: Whether its state's row is unreadable.
    state_damaged: bool = False
    #: Whether background work is removing it.
    purged: bool = False
    #: Forks that need its records, by id.
    forks: set[int] = field(default_factory=set)
    bytes_row: HeldRow | None = None
    #: The first stored record, and the one after the last. None if there is none.
    first: int | None = None
    end: int = 0
    last_timestamp: int = 0
    #: Unreadable records within that range.
    gaps: list[range] = field(default_factory=list)
    #: Metered bytes of the chunks that `bytes_row` counts.
    metered: int = 0

    @property
    def trim_point(self) -> int:
        return self.state.trim_point if self.state is not None else 0

    @property
    def lineage(self) -> Sequence[Segment]:
        return self.row.lineage if self.row is not None else ()

    @property
    def own_start(self) -> int:
        """The first record that the stream wrote itself."""
        return self.lineage[-1].end if self.lineage else 0

    @property
    def tail(self) -> int | None:
        """The seq_num of the next record; None if that is unknown."""
        if self.state_damaged:
            return None
        state = self.state or StateRow()
        if state.tail is not None:
            return state.tail.seq_num
        # Formats before 4 did not store the tail: it follows the last chunk.
        return max(self.end, state.bare_seq_num, self.own_start)

    @property
    def label(self) -> str:
        """The stream's name, for messages."""
        if self.name is None:
            return f"the stream with id {self.id}, whose name is unknown,"
        return f"stream {self.name!r} in basin {self.basin!r}"

    def missing(self, first: int, end: int) -> Iterator[range]:
        """Yield the records of `[first, end)` that are missing or unreadable."""
        if first >= end:
            return
        if self.first is None:
            yield range(first, end)
            return
        if first < self.first:
            yield range(first, min(self.first, end))
        for gap in self.gaps:
            part = range(max(gap.start, first), min(gap.stop, end))
            if part:
                yield part
        if self.end < end:
            yield range(max(self.end, first), end)


class StreamIndex:
    """All streams of a store."""

    def __init__(self, report: CheckReport) -> None:
        self._report = report
        self.by_id: dict[int, StreamFacts] = {}
        #: Whether rows with stream names are unreadable. If so, an unknown id proves nothing.
        self.names_damaged = False

    def facts(self, stream_id: int) -> StreamFacts:
        facts = self.by_id.get(stream_id)
        if facts is None:
            facts = self.by_id[stream_id] = StreamFacts(stream_id)
        return facts

    def find(
        self,
        code: str,
        facts: StreamFacts,
        message: str,
        *,
        seq_nums: range | None = None,
        file: str | None = None,
        severity: Severity = Severity.DAMAGE,
    ) -> None:
        """Add a finding about a stream."""
        self._report.add(
            CheckFinding(
                code=code,
                message=message,
                severity=severity,
                basin=facts.basin,
                stream=facts.name,
                stream_id=facts.id,
                first_seq_num=None if seq_nums is None else seq_nums.start,
                next_seq_num=None if seq_nums is None else seq_nums.stop,
                file=file,
            )
        )


def describe(seq_nums: range) -> str:
    """Describe records in a message."""
    if len(seq_nums) == 1:
        return f"record {seq_nums.start}"
    return f"records {seq_nums.start} to {seq_nums.stop - 1}"
