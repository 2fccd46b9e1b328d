"""Changes gathered into appends: by a kernel once many have come, and otherwise one by one.

To load the kernel takes most of a second, to compile it the first time several; meanwhile, and without
numba, `ChangeRecords` alone makes the same records.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from streamfold.extras import needing_extra
from streamfold.follow.clients.client import EncodedBatch
from streamfold.ingest.postgres.changes import ChangeRecords, TableRecord
from streamfold.ingest.postgres.control import TableNote
from streamfold.ingest.postgres.pgoutput import LSN_ZERO, Lsn
from streamfold.ingest.table_stream import TableStream
from streamfold.model.records import BATCH_BYTES_MAX, BATCH_RECORDS_MAX, Record, metered_size

if TYPE_CHECKING:
    # Only for types: at run time this would load the compiler.
    from streamfold.ingest.postgres.encoding.change_writer import ChangeWriter, Written
    from streamfold.ingest.postgres.encoding.runs import Run, RunReader

#: Messages after which the kernel is loaded: to encode fewer in Python is as quick as to load it.
KERNEL_AFTER: Final = 5000

_log = logging.getLogger(__name__)
_loading: threading.Thread | None = None
_writer: type[ChangeWriter] | None = None
_reader: type[RunReader] | None = None


def load_kernel() -> bool:
    """Compile the kernel, or load it from the disk cache; False if numba is missing or broken."""
    global _writer, _reader
    try:
        with needing_extra("postgres"):
            from streamfold.ingest.postgres.encoding.change_writer import ChangeWriter, compiled
            from streamfold.ingest.postgres.encoding.runs import RunReader
        compiled()
    except Exception as error:  # whatever a broken compiler raises, Python encodes the changes
        _log.warning("changes are encoded in plain Python, slower: %s", error)
        return False
    _reader, _writer = RunReader, ChangeWriter
    return True


def _load_in_thread() -> None:
    global _loading
    if _loading is None:
        _loading = threading.Thread(target=load_kernel, name="load the kernel for changes")
        _loading.start()


@dataclass(slots=True)
class ChangeBatch:
    """Records for several streams, and what may be confirmed when they are appended."""

    #: By stream; encoded if its client takes that.
    records: defaultdict[str, list[Record]] = field(default_factory=lambda: defaultdict(list))
    encoded: defaultdict[str, list[EncodedBatch]] = field(default_factory=lambda: defaultdict(list))
    #: Records by table.
    changes: Counter[str] = field(default_factory=Counter)
    size: int = 0
    #: Of the last commit that has a record in the batch.
    lsn: Lsn = LSN_ZERO
    committed_at: int = 0
    #: By table: the columns that records of the batch declare.
    declared: dict[str, TableNote] = field(default_factory=dict)
    #: Unix seconds: when this batch and those before it last had everything that the server had sent.
    drained_at: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.records or self.encoded)


class ChangeBatches:
    """Gathers what `changes` yields; the streams are by table."""

    def __init__(self, changes: ChangeRecords, streams: Mapping[str, TableStream]) -> None:
        self._changes = changes
        self._names = {table: stream.name for table, stream in streams.items()}
        self._encoded = all(stream.takes_encoded for stream in streams.values())
        self._received = 0
        self._reader: RunReader | None = None
        self._writer: ChangeWriter | None = None
        self.batch = ChangeBatch()

    def take(self) -> ChangeBatch:
        """Return what was gathered, and begin another batch."""
        batch, self.batch = self.batch, ChangeBatch()
        return batch

    @property
    def reader(self) -> RunReader | None:
        """What reads messages as the kernel takes them; None if it is not loaded, or of no use."""
        if self._reader is None and self._encoded and _reader is not None and _writer is not None:
            self._reader, self._writer = _reader(), _writer(self._changes)
        return self._reader

    def count(self, messages: int) -> None:
        """Count messages that came: after many of them, the kernel is loaded."""
        self._received += messages
        if self._encoded and self._received >= KERNEL_AFTER:
            _load_in_thread()

    def write(self, run: Run, at: int) -> Written:
        """Add messages from `at` on, up to one that must be fed to `changes`, and given to `add`."""
        assert self._writer is not None  # noqa: S101 - `reader` made it
        written = self._writer.write(run, at)
        for table, made in written.batches:
            self.batch.encoded[self._names[table]].append(made)
            self.batch.size += made.metered
        self.batch.changes.update(written.changes)
        if written.commit is not None:
            self.batch.lsn = written.commit.commit_lsn
            self.batch.committed_at = written.commit.commit_time
        return written

    def add(self, found: Sequence[TableRecord]) -> None:
        """Add what `changes` yielded for one message."""
        for table, record in found:
            if self._encoded:
                self.batch.encoded[self._names[table]].append(EncodedBatch.of([record]))
            else:
                self.batch.records[self._names[table]].append(record)
            self.batch.changes[table] += 1
            self.batch.size += metered_size(record)
        # A commit without a record is in no stream: it counts when a note says how far they are.
        if found and not self._changes.in_transaction:
            self.batch.lsn = self._changes.committed
            self.batch.committed_at = self._changes.committed_at


def joined(batches: Sequence[EncodedBatch]) -> list[EncodedBatch]:
    """Return the same records in fewer batches, each as one append can take it."""
    found: list[list[EncodedBatch]] = [[]]
    count = metered = 0
    for batch in batches:
        count, metered = count + batch.record_count, metered + batch.metered
        if count > BATCH_RECORDS_MAX or metered > BATCH_BYTES_MAX:
            found.append([])
            count, metered = batch.record_count, batch.metered
        found[-1].append(batch)
    return [
        EncodedBatch(
            sum(batch.record_count for batch in parts),
            sum(batch.metered for batch in parts),
            b"".join(batch.records for batch in parts),
        )
        for parts in found
        if parts
    ]
