"""Checks files: manifests, tables, the log, snapshots, and files that no row names."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

from streamfold.blob import BlobMeta, BlobStore
from streamfold.errors import BlobNotFoundError, DataCorruptError, StorageError
from streamfold.store import keys
from streamfold.store.backup.store_files import LOG, LogFiles, StoreFiles
from streamfold.store.engine.location import CHUNKS, DATABASE, SNAPSHOTS, Location
from streamfold.store.engine.native import EngineError, SlateManifest, message_of
from streamfold.store.engine.slatedb import log_reader, open_admin, table_check
from streamfold.store.engine.wal_files import (
    MARKER,
    RestorePoint,
    WalFiles,
    first_unreadable,
    is_damage,
    read_restore_point,
)
from streamfold.store.inspection.report import CheckFinding, CheckReport, RowScan, Severity
from streamfold.store.inspection.stream_index import StreamIndex, describe
from streamfold.store.log import chunks
from streamfold.store.log.chunk_files import FileName
from streamfold.store.rows import SnapshotRow
from streamfold.store.settings import StoreSettings

#: Bytes of a snapshot read at a time.
_PIECE: Final = 4 << 20
#: Seconds after the grace period by which upkeep should have deleted files that no row names.
_OVERDUE: Final = 86_400.0
_PARTS: Final = "parts/"


class SnapshotHash(Protocol):
    """Computes the digest of a snapshot."""

    def update(self, data: bytes) -> None: ...
    def hexdigest(self) -> str: ...


#: Creates the hash for a snapshot of a content type.
NewSnapshotHash: TypeAlias = Callable[[str], SnapshotHash]


class DatabaseCheck:
    """Checks SlateDB's files before anything is read through SlateDB."""

    def __init__(self, location: Location, files: StoreFiles, report: CheckReport) -> None:
        self._location = location
        self._files = files
        self._report = report
        #: Records in log files that cannot be replayed, with the first such file, by stream id.
        self._lost: dict[int, tuple[range, str]] = {}

    def _find(self, code: str, message: str, file: str, **more: Any) -> None:
        self._report.add(CheckFinding(code=code, message=message, file=file, **more))

    async def check_tables(self, manifest: SlateManifest) -> None:
        """Check that every table exists, and check its filter, which a scan does not read."""
        sizes = {
            meta.key.rpartition("/")[2]: meta.size
            async for meta in self._files.database.list("compacted/")
        }
        check = table_check(self._location, open_admin(self._location), manifest)
        for view in manifest.views:
            name = view.file
            self._report.counts.tables += 1
            self._report.counts.table_bytes += sizes.get(name, 0)
            file = f"{DATABASE}/compacted/{name}"
            if name not in sizes:
                self._find("table_missing", f"the table {file!r} is missing: put it back", file)
            elif await check.filter_damaged(view):
                message = f"the filter in {file!r} is damaged: reads are slower"
                self._find("filter_damaged", message, file)

    async def check_restore_point(self) -> None:
        """On local disk, check that everything needed to start after a power cut exists."""
        folder = self._location.folder
        if folder is None:
            return
        try:
            point = read_restore_point(folder)
            fault = await self._fault_of(folder, point) if point and point.manifest else None
            if fault is not None and read_restore_point(folder) != point:
                await self.check_restore_point()  # the server replaced the restore point meanwhile
                return
        except DataCorruptError as error:
            fault = str(error)
        if fault is not None:
            message = f"the store would not start after a power cut: {fault}"
            self._find("restore_point_damaged", message, f"{DATABASE}/{MARKER}")

    async def _fault_of(self, folder: Path, point: RestorePoint) -> str | None:
        """Return what a start from the restore point would miss, or None if everything exists."""
        try:
            manifest = await open_admin(self._location).read_manifest(point.manifest)
        except EngineError as error:
            if not is_damage(error):
                raise
            return f"manifest {point.manifest} cannot be read ({message_of(error)})"
        if manifest is None:
            return f"manifest {point.manifest} is missing"
        absent = [
            name for name in sorted(manifest.files) if not (folder / "compacted" / name).exists()
        ]
        return f"the table {absent[0]!r} is missing" if absent else None

    async def check_log(self, manifest: SlateManifest) -> bool:
        """Read every log file after `manifest`. Returns False if one is damaged."""
        after = manifest.replay_after
        log = await self._files.log_files(after)
        self._report.counts.log_files = len(log.files)
        damage = await self._first_damage(after, log)
        if damage is None:
            return True
        number, fault, end = damage
        file = f"{DATABASE}/{LOG}/{number:020d}.sst"
        message = (
            f"log file {file!r} {fault}: it and {max(0, end - number)} files after it cannot be "
            f"replayed, and the rest of this check sees only what is in tables"
        )
        self._find("log_damaged", message, file)
        await self._name_lost(number, end, file)
        return False

    async def _first_damage(self, after: int, log: LogFiles) -> tuple[int, str, int] | None:
        """Return the number and fault of the first damaged log file, and the last file's number."""
        reader = log_reader(self._location)
        folder = self._location.folder
        point = read_restore_point(folder) if folder is not None else None
        if folder is not None and point is not None:
            # Any number of writers may have left marks since the restore point.
            damage = await WalFiles(folder).first_damage(
                reader, point, after, float("inf"), read=False
            )
            if damage is not None:
                return damage.number, damage.fault, damage.last
        fault = await first_unreadable(reader, after + 1, log.last)
        if fault is not None:
            return *fault, log.end
        return None if log.missing is None else (log.missing, "is missing", log.end)

    async def _name_lost(self, first: int, last: int, file: str) -> None:
        """Find the records in these log files, as far as the files are readable."""
        reader = log_reader(self._location)
        spans: dict[int, range] = {}
        written = {
            _number(meta) async for meta in self._files.database.list(f"{LOG}/") if meta.size
        }
        for number in range(first, last + 1):
            if number not in written:
                continue
            try:
                rows = await reader.rows(number)
            except EngineError as error:
                if not is_damage(error):
                    raise
                continue
            for row in rows:
                if row.value is None or not keys.is_chunk(row.key):
                    continue
                stream_id, end = keys.chunk_parts(row.key)
                try:
                    begin = chunks.decode(row.value).first_seq_num
                except StorageError:
                    begin = end
                before = spans.get(stream_id, range(begin, end + 1))
                spans[stream_id] = range(min(before.start, begin), max(before.stop, end + 1))
        self._lost = {stream_id: (span, file) for stream_id, span in spans.items()}

    def report_lost(self, streams: StreamIndex) -> None:
        """Report the records in log files that cannot be replayed.

        Call once stream names are known.
        """
        for stream_id, (span, file) in sorted(self._lost.items()):
            facts = streams.facts(stream_id)
            message = f"{describe(span)} of {facts.label} are in log files that cannot be replayed"
            streams.find("records_not_replayed", facts, message, seq_nums=span, file=file)


def _number(meta: BlobMeta) -> int:
    stem = meta.key.rpartition("/")[2].partition(".")[0]
    return int(stem) if stem.isdecimal() else -1


class SnapshotCheck:
    """Checks that every snapshot's bytes exist."""

    def __init__(
        self,
        scan: RowScan,
        streams: StreamIndex,
        blobs: BlobStore,
        report: CheckReport,
        new_hash: NewSnapshotHash | None,
        advance: Callable[[int], None],
    ) -> None:
        self._scan = scan
        self._streams = streams
        self._blobs = blobs
        self._report = report
        self._new_hash = new_hash
        self._advance = advance
        #: Hashes of the blob names in rows.
        self.named: set[int] = set()

    async def run(self) -> None:
        async for page in self._scan.pages(b"\x0d", b"\x0e", "snapshots"):
            for key, value in page:
                await self._check(int.from_bytes(key[1:9], "big"), key, value)

    async def _check(self, stream_id: int, key: bytes, value: bytes) -> None:
        facts = self._streams.facts(stream_id)
        seq_num = keys.snapshot_seq_num(key)
        row = self._scan.decode(value, SnapshotRow, f"the snapshot at {seq_num} of {facts.label}")
        self._report.counts.snapshots += 1
        if row is None:
            return
        self.named.add(hash(row.blob))
        fault = await self._fault(row)
        tail = facts.tail
        if fault is None and tail is not None and facts.row is not None and seq_num > tail:
            fault = f"it covers more than the stream has: its tail is {tail}"
        if fault is not None:
            message = f"the snapshot at {seq_num} of {facts.label} cannot be used: {fault}"
            self._streams.find(
                "snapshot_damaged",
                facts,
                message,
                seq_nums=range(seq_num, seq_num),
                file=f"{SNAPSHOTS}/{row.blob}",
            )

    async def _fault(self, row: SnapshotRow) -> str | None:
        digest = self._new_hash(row.content_type) if self._new_hash is not None else None
        size = 0
        try:
            async for piece in self._blobs.stream(row.blob, _PIECE):
                size += len(piece)
                self._advance(len(piece))
                if digest is not None:
                    digest.update(piece)
        except BlobNotFoundError:
            return f"its blob {row.blob!r} is missing"
        self._report.counts.snapshot_bytes += size
        if size != row.size:
            return f"its blob {row.blob!r} has {size} of {row.size} bytes"
        if digest is not None and digest.hexdigest() != row.digest:
            return f"its blob {row.blob!r} has other bytes than were published"
        return None


class UnnamedFiles:
    """Counts the files that no row names, and reports those that upkeep should have deleted."""

    def __init__(self, report: CheckReport, leftovers: dict[str, dict[str, int]]) -> None:
        self._report = report
        self._leftovers = leftovers

    async def count_chunk_files(self, blobs: BlobStore, named: set[int]) -> None:
        async for meta in blobs.list():
            name = FileName.parse(meta.key)
            if name is None:
                continue
            self._report.counts.chunk_files += 1
            self._report.counts.chunk_file_bytes += meta.size
            if hash(meta.key) not in named:
                self._note(meta, "chunk", CHUNKS)

    async def count_snapshots(self, blobs: BlobStore, named: set[int]) -> None:
        async for meta in blobs.list():
            if meta.key.startswith(_PARTS):
                self._report.counts.staged_parts += 1
            elif hash(meta.key) not in named:
                self._note(meta, "snapshot", SNAPSHOTS)

    def _note(self, meta: BlobMeta, kind: str, area: str) -> None:
        self._report.counts.unnamed_files += 1
        self._report.counts.unnamed_bytes += meta.size
        since = self._leftovers.get(kind, {}).get(meta.key)
        grace = StoreSettings().leftover_grace + _OVERDUE
        if since is not None and time.time() - since / 1000 > grace:
            file = f"{area}/{meta.key}"
            days = round((time.time() - since / 1000) / 86_400)
            message = (
                f"no row has named the file {file!r} for {days} days: a running server deletes "
                f"such files after its --leftover-grace"
            )
            self._report.add(
                CheckFinding(
                    code="file_unnamed", message=message, severity=Severity.WARNING, file=file
                )
            )
