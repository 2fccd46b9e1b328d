"""A Delta Lake log over an archive's Parquet files: each base is a version, and no file is copied.

`_delta_log/` in the table's folder names the files of bases. It is derived from the manifest and
never decides anything. A version is written after its base is committed, and versions that could
not be written are written with the next one. `deltalake` creates the log entries in a local copy of
the log. They are stored in the same way as the archive's own files, so every destination and its
credentials work. An entry is stored only if its version is absent, so two processes cannot write
the same one. Once epochs have left the manifest, a checkpoint is stored at the first remaining
version and the entries before it are deleted, which tells Delta readers that older versions are
gone.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

import msgspec
import pyarrow as pa

from streamfold.archive.destinations.destination import Destination, name_destination_on_error
from streamfold.archive.engines.column_types import DELTA, EngineColumns
from streamfold.archive.formats.parquet import loosened, visible
from streamfold.archive.manifest.model import Artifact, Manifest, Part
from streamfold.archive.manifest.positions import PositionOrder, parse_time
from streamfold.archive.schema import TableSchema
from streamfold.blob.blob_store import BlobChangedError
from streamfold.blob.local_files import finish
from streamfold.errors import (
    BlobExistsError,
    BlobNotFoundError,
    ConflictError,
    InvalidError,
    StorageError,
    StreamfoldError,
)
from streamfold.extras import check_installed

if TYPE_CHECKING:
    from deltalake import DeltaTable, Schema
    from deltalake.transaction import AddAction, RemoveAction

#: The log's folder, which Delta readers look for.
LOG = "_delta_log/"
#: Names the newest checkpoint. Readers list the log from there on, and some open it without
#: listing. It never goes back to an older checkpoint, which may have been deleted.
HINT = LOG + "_last_checkpoint"
#: Versions between two checkpoints. A reader fetches at most this many entries.
CHECKPOINT_INTERVAL = 10
#: Characters of paths that the log holds unescaped. It is written with URIs.
_SAFE = "/=-_.~"
_VERSION = re.compile(r"_delta_log/(\d{20})\.(json|checkpoint\.parquet)")
#: Commit metadata in which an entry records its base.
EPOCH_KEY, POSITION_KEY = "streamfold.epoch", "streamfold.position"


@dataclass(frozen=True, slots=True)
class DeltaReport:
    """The versions that a run wrote and removed."""

    #: Epochs of bases that became versions.
    epochs: tuple[int, ...] = ()
    #: Versions removed from the log.
    removed: tuple[int, ...] = ()


async def has_delta_log(destination: Destination) -> bool:
    """Return whether the archive has a Delta log."""
    with name_destination_on_error(destination.uri):
        async for _ in destination.blobs.list(LOG):
            return True
    return False


async def publish_delta_log(
    destination: Destination, order: PositionOrder | None = None
) -> DeltaReport:
    """Bring a destination's Delta log up to date with its manifest. Repeating this is harmless.

    Raises `InvalidError` for a table that Delta Lake cannot represent, `ConflictError` if another
    process writes to the log at the same time, and `StorageError` if `deltalake` rejects something.
    """
    check_installed("deltalake", "delta")
    stored = await destination.read(order)
    if stored is None:
        return DeltaReport()
    try:
        return await _publish(destination, stored.manifest)
    except StreamfoldError:
        raise
    except Exception as error:  # the library's own errors, and those of the temporary folder
        raise StorageError(f"the Delta log of {destination.uri} is not written: {error}") from error


async def _publish(destination: Destination, manifest: Manifest) -> DeltaReport:
    with name_destination_on_error(destination.uri), tempfile.TemporaryDirectory() as folder:
        log = _LocalLog(destination, Path(folder))
        await log.fetch()
        epochs = [base.epoch for base in _bases(manifest) if await log.add(manifest, base)]
        removed = await log.trim(manifest)
    return DeltaReport(tuple(epochs), removed)


def _bases(manifest: Manifest) -> Iterable[Artifact]:
    return (a for a in manifest.artifacts if a.is_base and "parquet" in a.formats)


class _Hint(msgspec.Struct):
    """The fields of the hint that are needed here."""

    version: int


class _LocalLog:
    """A copy of the log in a local folder, to which `deltalake` adds entries."""

    def __init__(self, destination: Destination, folder: Path) -> None:
        self._blobs = destination.blobs
        self._folder = folder
        #: Versions in storage that have an entry, and those that have a checkpoint.
        self._entries: set[int] = set()
        self._checkpoints: set[int] = set()

    async def fetch(self) -> None:
        """Fetch the newest checkpoint and the entries after it."""
        async for meta in self._blobs.list(LOG):
            if version := _VERSION.fullmatch(meta.key):
                (self._entries if version[2] == "json" else self._checkpoints).add(int(version[1]))
        await self._fetch_range(max(self._checkpoints, default=0), max(self._entries, default=-1))

    async def add(self, manifest: Manifest, base: Artifact) -> bool:
        """Store a version for a base, unless the log already has it or a later one."""
        schema = delta_schema(manifest, base)
        if schema is None:
            return False
        before = self._names()
        if not await finish(asyncio.to_thread(self._commit, manifest, base, schema)):
            return False
        await self._store(self._names() - before)
        return True

    async def trim(self, manifest: Manifest) -> tuple[int, ...]:
        """Remove the versions of epochs before the manifest's first one, and return them.

        Raises `InvalidError` if none would remain, because then no base in the manifest is in
        Parquet.
        """
        oldest = manifest.artifacts[0].epoch
        first = None
        for version in sorted(self._entries):
            epoch = await self._epoch(version)
            if epoch is None or epoch >= oldest:
                first = version
                break
        if first is None and self._entries:
            raise InvalidError(
                f"every version of the Delta log is of an epoch before {oldest}, the first that is "
                "kept, and no later base is in Parquet: write Parquet again, or delete _delta_log/"
            )
        old = sorted(v for v in self._entries if first is not None and v < first)
        if first is None or not old:
            return ()
        await self._checkpoint(first)
        for version in sorted({*old, *(v for v in self._checkpoints if v < first)}):
            await self._blobs.delete(_checkpoint_key(version))
            await self._blobs.delete(_entry_key(version))
        return tuple(old)

    async def _checkpoint(self, version: int) -> None:
        """Store a checkpoint of a version, which makes it independent of earlier entries."""
        if version in self._checkpoints:
            return
        await self._fetch_range(min(self._checkpoints | self._entries), version)
        await finish(asyncio.to_thread(self._write_checkpoint, version))
        await self._store([_checkpoint_key(version)])

    def _write_checkpoint(self, version: int) -> None:
        from deltalake import DeltaTable

        DeltaTable(self._folder, version=version).create_checkpoint()

    def _commit(self, manifest: Manifest, base: Artifact, schema: pa.Schema) -> bool:
        """Add an entry for the base to the local log. Returns whether it needed one."""
        from deltalake import (
            CommitProperties,
            DeltaTable,
            PostCommitHookProperties,
            Schema,
            Transaction,
        )
        from deltalake.transaction import create_table_with_add_actions

        writer = f"streamfold-{manifest.archive_id}"
        properties = CommitProperties(
            app_transactions=[Transaction(writer, base.epoch)],
            custom_metadata={EPOCH_KEY: str(base.epoch), POSITION_KEY: base.to_position},
        )
        hooks = PostCommitHookProperties(create_checkpoint=True, cleanup_expired_logs=False)
        columns = Schema.from_arrow(schema)
        parts = {quote(part.path, safe=_SAFE): part for part in base.formats["parquet"].parts}
        if not self._entries:
            create_table_with_add_actions(
                str(self._folder), columns, _adds(parts, base), name=manifest.table,
                configuration={"delta.checkpointInterval": str(CHECKPOINT_INTERVAL)},
                commit_properties=properties, post_commithook_properties=hooks,
            )  # fmt: skip
            return True
        table = DeltaTable(self._folder)
        epoch = table.transaction_version(writer) or 0
        if epoch >= base.epoch:
            return False
        _allow_local_times(table, schema, epoch)
        actions, mode = _changes(table, columns, parts, base)
        table.create_write_transaction(
            actions, mode, columns,
            commit_properties=properties, post_commithook_properties=hooks,
        )  # fmt: skip
        return True

    async def _epoch(self, version: int) -> int | None:
        """Return the epoch that a version shows, or None if it does not record one."""
        name = _entry_key(version)
        await self._fetch([name])
        for line in (self._folder / name).read_bytes().splitlines():
            action = msgspec.json.decode(line, type=dict[str, dict[str, Any] | None])
            if epoch := (action.get("commitInfo") or {}).get(EPOCH_KEY):
                return int(epoch)
        return None

    def _names(self) -> set[str]:
        paths = (self._folder / LOG).glob("*") if (self._folder / LOG).exists() else ()
        return {LOG + path.name for path in paths if _VERSION.fullmatch(LOG + path.name)}

    async def _fetch_range(self, first: int, last: int) -> None:
        names = [_entry_key(v) for v in self._entries if first <= v <= last]
        names += [_checkpoint_key(v) for v in self._checkpoints if first <= v <= last]
        await self._fetch(names)

    async def _fetch(self, names: Iterable[str]) -> None:
        (self._folder / LOG).mkdir(exist_ok=True)
        for name in names:
            if not (self._folder / name).exists():
                (self._folder / name).write_bytes(await self._blobs.get(name))

    async def _store(self, names: Iterable[str]) -> None:
        """Store new files of the local log: first entries, which are the commit, then checkpoints."""
        for name in sorted(names, key=lambda name: (not name.endswith(".json"), name)):
            data = (self._folder / name).read_bytes()
            version = _version(name)
            if name.endswith(".json"):
                await self._store_entry(name, data)
                self._entries.add(version)
                continue
            await self._blobs.put(name, data)
            self._checkpoints.add(version)
            if version == max(self._checkpoints):
                await self._name_checkpoint(version, (self._folder / HINT).read_bytes())

    async def _name_checkpoint(self, version: int, hint: bytes) -> None:
        """Make the hint name a checkpoint, unless it names a newer one that exists."""
        while True:
            try:
                stored, etag = await self._blobs.get_with_etag(HINT)
            except BlobNotFoundError:
                stored, etag = None, None
            if stored is not None and await self._has_checkpoint(stored, version):
                return
            try:
                if etag is None:
                    await self._blobs.put_if_absent(HINT, hint)
                else:
                    await self._blobs.put_if_match(HINT, hint, etag)
            except (BlobExistsError, BlobChangedError, BlobNotFoundError):
                continue  # another writer was faster
            return

    async def _has_checkpoint(self, hint: bytes, version: int) -> bool:
        """Return whether `hint` names a checkpoint of `version` or later that is in the log."""
        try:
            named = msgspec.json.decode(hint, type=_Hint).version
        except msgspec.DecodeError:
            return False
        if named <= version:
            return named == version
        try:
            await self._blobs.head(_checkpoint_key(named))
        except BlobNotFoundError:
            return False
        return True

    async def _store_entry(self, name: str, data: bytes) -> None:
        try:
            await self._blobs.put_if_absent(name, data)
        except BlobExistsError:
            # An earlier attempt of this request may have succeeded although its response was lost.
            if await self._blobs.get(name) != data:
                raise ConflictError(
                    f"another process wrote {name!r}: the Delta log is written again with the next base"
                ) from None


def delta_schema(manifest: Manifest, base: Artifact) -> pa.Schema | None:
    """Return a base's columns as Delta Lake reads them from its files.

    Leaves out columns without any value yet. Returns None if no column has a type. Raises
    InvalidError naming the column if the files hold a type differently from Delta Lake.
    """
    if base.schema_id is None:
        raise InvalidError(f"the base at {base.to_position!r} has no schema: Delta Lake needs one")
    table = TableSchema.from_json(manifest.schemas[base.schema_id]).arrow
    fields = [pa.field(f.name, loosened(f.type), f.nullable) for f in table]
    typed = pa.schema([field for field in fields if not pa.types.is_null(field.type)])
    columns = EngineColumns.of(typed, DELTA).target
    for before, after in zip(typed, columns, strict=True):
        if visible(before.type) != visible(after.type):
            raise InvalidError(
                f"column {before.name!r} has type {before.type}, which Delta Lake cannot read from "
                "the archive's own files: delete _delta_log/ and use `archive export --delta`, which "
                "converts it"
            )
    return columns if len(columns) else None


def _adds(parts: Mapping[str, Part], base: Artifact) -> list[AddAction]:
    from deltalake.transaction import AddAction

    written_at = round(parse_time(base.created_at).timestamp() * 1000)
    return [
        AddAction(
            path=path,
            size=part.size_bytes,
            partition_values={},
            modification_time=written_at,
            data_change=True,
            # Without a count there are no statistics, by which readers count rows.
            stats="{}" if part.rows is None else f'{{"numRecords": {part.rows}}}',
        )
        for path, part in parts.items()
    ]


def _changes(
    table: DeltaTable, columns: Schema, parts: Mapping[str, Part], base: Artifact
) -> tuple[list[AddAction | RemoveAction], Literal["append", "overwrite"]]:
    """Return the actions that lead from the newest version to a base, and the commit mode.

    An entry may not both add and remove a file, so files that the base reuses are left alone. If
    the columns differ, no file is reused, and only an overwrite replaces the columns.
    """
    from deltalake.transaction import RemoveAction

    if table.schema() != columns:
        return [*_adds(parts, base)], "overwrite"
    present = set(pa.table(table.get_add_actions()).column("path").to_pylist())
    removed_at = round(parse_time(base.created_at).timestamp() * 1000)
    removals = [RemoveAction(path, True, removed_at) for path in sorted(present - set(parts))]
    fresh = {path: part for path, part in parts.items() if path not in present}
    return [*_adds(fresh, base), *removals], "append"


def _allow_local_times(table: DeltaTable, schema: pa.Schema, epoch: int) -> None:
    """Add the table feature for timestamps without a zone, if the table does not have it yet.

    This takes an entry of its own, which has the previous version's files and shows `epoch`.
    """
    from deltalake import CommitProperties, TableFeatures

    needed = any(_has_local_time(kind) for kind in schema.types)
    if needed and "timestampNtz" not in (table.protocol().reader_features or []):
        table.alter.add_feature(
            TableFeatures.TimestampWithoutTimezone,
            allow_protocol_versions_increase=True,
            commit_properties=CommitProperties(custom_metadata={EPOCH_KEY: str(epoch)}),
        )


def _has_local_time(kind: pa.DataType) -> bool:
    if pa.types.is_timestamp(kind):
        return kind.tz is None
    if pa.types.is_map(kind):
        return _has_local_time(kind.item_type)
    return any(_has_local_time(kind.field(n).type) for n in range(kind.num_fields))


def _version(name: str) -> int:
    return int(name.removeprefix(LOG).partition(".")[0])


def _entry_key(version: int) -> str:
    return f"{LOG}{version:020d}.json"


def _checkpoint_key(version: int) -> str:
    return f"{LOG}{version:020d}.checkpoint.parquet"
