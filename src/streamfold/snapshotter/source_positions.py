"""Positions of records in the log of their source; pure, without I/O.

`streamfold ingest` adds headers with the LSN of a record's commit (`ingest.table_stream`). Rows of a
first copy have the LSN of its snapshot, and are the table only once the copy has ended. A repeated
copy begins at 0/0, and nothing before it counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamfold.archive.manifest.model import SourceRange
from streamfold.archive.manifest.positions import LSN, format_time

#: Headers with an LSN: of the commit, and of the later snapshot that ended an interrupted copy.
_POSITIONS = pa.array([b"lsn", b"snapshot"])
_COPY, _COPY_END, _NO_ROWS = b"copy", b"end", b"0"
_PATTERN = "^[0-9A-Fa-f]{1,8}/[0-9A-Fa-f]{1,8}$"
_COPY_START = "0/0"
#: More than the characters of an LSN.
_FORMS = 32


class SourceSpan(msgspec.Struct, frozen=True, array_like=True):
    """The source commits of a run of records; LSNs are numbers."""

    first: int
    #: The newest, after the last start of a copy.
    last: int
    #: Whether the run ends in the middle of a first copy.
    copying: bool
    #: Whether a copy restarts in the run, so that nothing before it counts.
    restarts: bool
    #: Milliseconds since 1970 of the last one.
    time: int = 0
    #: Whether a first copy begins in the run: once it has ended, the table has all rows.
    begins: bool = False

    def then(self, later: SourceSpan) -> SourceSpan:
        """Return the span of these records and the following ones."""
        return SourceSpan(
            min(self.first, later.first),
            later.last if later.restarts else max(self.last, later.last),
            later.copying,
            self.restarts or later.restarts,
            later.time,
            self.begins or later.begins,
        )

    def range_after(self, before: SourceRange | None) -> SourceRange:
        """Return the range of a diff of these records after an artifact with range `before`."""
        previous = LSN.rank(before.last) if before is not None and not self.restarts else 0
        return SourceRange(
            first=LSN.position(self.first),
            last=LSN.position(max(previous, self.last)),
            time=format_time(datetime.fromtimestamp(self.time / 1000, UTC)),
            copying=self.copying,
        )


def joined(spans: list[SourceSpan | None]) -> SourceSpan | None:
    """Join the spans of consecutive runs; None if no record has a position."""
    joint: SourceSpan | None = None
    for span in spans:
        joint = span if joint is None else joint if span is None else joint.then(span)
    return joint


@dataclass(frozen=True, slots=True)
class SourcePositions:
    """The positions of the records that have one, in order."""

    #: Index and upper-case LSN of each record.
    indices: npt.NDArray[np.int64]
    lsns: pa.Array
    #: Indices of first-copy rows, without the end of the copy.
    copied: npt.NDArray[np.int64]
    #: Indices of records that begin a first copy, before its rows.
    copy_starts: npt.NDArray[np.int64]

    @classmethod
    def of(cls, headers: pa.Array | None) -> SourcePositions | None:
        """Return the positions in headers of records; None if there are none."""
        if headers is None:
            return None
        pairs, owners = headers.flatten(), pc.list_parent_indices(headers)
        names, values = (pairs.field(name).cast(pa.binary()) for name in ("name", "value"))
        chosen = pc.is_in(names, value_set=_POSITIONS)
        if not pc.any(chosen).as_py():
            return None
        texts, indices = values.filter(chosen), owners.filter(chosen)
        readable = pc.match_substring_regex(texts, _PATTERN)
        texts, indices = texts.filter(readable).cast(pa.string()), indices.filter(readable)
        copies = pc.and_(pc.equal(names, _COPY), pc.not_equal(values, _COPY_END))
        starts = pc.and_(pc.equal(names, _COPY), pc.equal(values, _NO_ROWS))
        return cls(
            _numbers(indices),
            pc.ascii_upper(texts),
            _numbers(owners.filter(copies)),
            _numbers(owners.filter(starts)),
        )

    def only(self, indices: npt.NDArray[np.int64]) -> SourcePositions:
        """Return the positions of the records with these indices, which are in order."""
        mask = np.isin(self.indices, indices, assume_unique=False)
        return SourcePositions(
            self.indices[mask],
            self.lsns.filter(pa.array(mask)),
            self.copied[np.isin(self.copied, indices)],
            self.copy_starts[np.isin(self.copy_starts, indices)],
        )

    def at(self, indices: npt.NDArray[np.int64]) -> SourcePositions:
        """Return the same positions, with the records' indices in a larger batch."""
        copied, starts = indices[self.copied], indices[self.copy_starts]
        return SourcePositions(indices[self.indices], self.lsns, copied, starts)

    def span(self, start: int, end: int, time: int) -> SourceSpan | None:
        """Return the commits of the records `[start, end)`; `time` is the last one's."""
        first, last = np.searchsorted(self.indices, [start, end])
        if first == last:
            return None
        lsns = self.lsns.slice(first, last - first)
        starts = np.flatnonzero(pc.equal(lsns, _COPY_START).to_numpy(zero_copy_only=False))
        least, newest = _extremes(lsns)
        if len(starts):
            _, newest = _extremes(lsns.slice(int(starts[-1])))
        return SourceSpan(
            least,
            newest,
            bool(np.isin(self.indices[last - 1], self.copied)),
            bool(len(starts)),
            time,
            bool(np.any((self.copy_starts >= start) & (self.copy_starts < end))),
        )


def _numbers(values: pa.Array) -> npt.NDArray[np.int64]:
    numbers: npt.NDArray[np.int64] = values.to_numpy(zero_copy_only=False).astype(np.int64)
    return numbers


def _extremes(texts: pa.Array) -> tuple[int, int]:
    """Return the oldest and newest LSN. Texts of equal length, slash included, compare like LSNs."""
    lengths, slashes = pc.utf8_length(texts).to_numpy(), pc.find_substring(texts, "/").to_numpy()
    forms = lengths * _FORMS + slashes
    ranks = []
    for form in np.unique(forms):
        bounds = pc.min_max(texts.filter(pa.array(forms == form)))
        ranks += [LSN.rank(bounds["min"].as_py()), LSN.rank(bounds["max"].as_py())]
    return min(ranks), max(ranks)
