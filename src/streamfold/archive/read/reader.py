"""The archive reader: plans, rebuilds, verifies and follows one table, wherever its files are.

    archive = await streamfold.archive.open("s3://bucket/users")
    print(archive.plan())
    table = await archive.table(columns=["id", "name"])

Files are verified before use. If a plan's files were garbage-collected, the reader plans again.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from datetime import datetime, timedelta
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa

from streamfold.archive.destinations.destination import Destination, StoredManifest, existing_folder
from streamfold.archive.errors import ArtifactCorruptError, ManifestNotFoundError
from streamfold.archive.maintenance.verification import Checked, Verification, Verifier
from streamfold.archive.manifest.encoding import read_manifest
from streamfold.archive.manifest.model import MANIFEST_KEY, Manifest, order_of
from streamfold.archive.manifest.positions import PositionOrder
from streamfold.archive.read.change_feed import ArchiveFollower, ChangeFeed, Changes, Followed, Wake
from streamfold.archive.read.decoding import DecodedLimit, Decoding
from streamfold.archive.read.part_files import Cache, PartFiles, PartGoneError
from streamfold.archive.read.plan import (
    ChangesPlan,
    TablePlan,
    artifact_table,
    missing_changes,
    plan_changes,
    plan_table,
)
from streamfold.archive.read.rebuild import Rebuild, batches_of
from streamfold.archive.schema import TableSchema
from streamfold.blob import BlobStore, CredentialProvider, open_blob_store
from streamfold.errors import BlobNotFoundError, InvalidError, StreamfoldError

if TYPE_CHECKING:
    import duckdb
    import pandas as pd
    import polars as pl

T = TypeVar("T")

#: Consecutive plans made because the last one's files were gone. Garbage collection keeps files for
#: a day after they leave the manifest, so even a second plan is rare.
PLANS = 5
#: Pause between a follower's reads of the manifest. Writers commit every few seconds at most.
POLL = timedelta(seconds=5)


async def open_archive(
    uri: str | PathLike[str],
    *,
    cache: Cache | str | PathLike[str] | None = None,
    formats: Sequence[str] | None = None,
    order: PositionOrder | None = None,
    schema: TableSchema | None = None,
    key_fields: Sequence[str] | None = None,
    options: Mapping[str, str] | None = None,
    credential_provider: CredentialProvider | None = None,
    decoded_limit: DecodedLimit | None = None,
) -> Archive:
    """Return the archive at `uri`: the URL or local path of its folder or its manifest.

    `cache` stores files of remote archives on this machine. `formats` lists preferred formats, best
    first. None prefers the fastest to read. `order` is needed for positions whose order is not
    built in. `schema` and `key_fields` are for archives by other writers, whose manifests may lack
    both. `options` and `credential_provider` configure the storage as in `open_blob_store`.
    `decoded_limit` bounds what all reads of the archive together may decode.
    """
    url = existing_folder(fspath(uri))
    file_cache = cache if cache is None or isinstance(cache, Cache) else Cache(Path(cache))

    def open_folder(folder: str) -> BlobStore:
        return open_blob_store(folder, credential_provider=credential_provider, **(options or {}))

    files = PartFiles(Destination(open_folder(url), url + "/"), file_cache, open_folder)
    keys = None if key_fields is None else tuple(key_fields)
    preferred = None if formats is None else tuple(formats)
    return await Archive.load(files, Decoding(preferred, schema, keys, decoded_limit), order)


class Archive:
    """One table as of the manifest that was last read. `refresh` reads it again.

    Everything is read from that one manifest, so a plan, the table and the changes are consistent.
    The manifest is reread automatically only if its files were garbage-collected.
    """

    def __init__(
        self,
        files: PartFiles,
        decoding: Decoding,
        stored: StoredManifest,
        order: PositionOrder | None,
    ) -> None:
        #: Locates and fetches the files.
        self.files = files
        self._decoding = decoding
        self._stored = stored
        self._order = order

    @classmethod
    async def load(
        cls, files: PartFiles, decoding: Decoding, order: PositionOrder | None = None
    ) -> Archive:
        """Return the archive in the folder of `files`."""
        return cls(files, decoding, await _read(files.destination, order), order)

    def __repr__(self) -> str:
        return f"<Archive {self._title}>"

    def _repr_html_(self) -> str:
        return artifact_table(self._title, self.manifest.artifacts)

    @property
    def _title(self) -> str:
        manifest = self.manifest
        missing = missing_changes(manifest.incomplete_before)
        head = f"{manifest.table} at {manifest.head_position}, epoch {manifest.epoch}"
        return f"{head}{missing}, {self.uri}"

    @property
    def uri(self) -> str:
        """The folder's URI, with a trailing slash."""
        return self.files.destination.uri

    @property
    def manifest(self) -> Manifest:
        return self._stored.manifest

    @property
    def order(self) -> PositionOrder:
        """The order of positions."""
        return order_of(self.manifest, self._order)

    @property
    def head(self) -> str:
        """The last position that can be rebuilt."""
        return self.manifest.head_position

    @property
    def incomplete_before(self) -> str | None:
        """The position before which changes, and so perhaps rows, are missing, or None.

        The stream had lost these records before the archive began. `plan` reports the position for
        earlier tables.
        """
        return self.manifest.incomplete_before

    @property
    def schema(self) -> TableSchema | None:
        """The table's schema at the head, or None if it is unknown."""
        return self._decoding.schema_of(self.manifest, self.manifest.artifacts[-1])

    @property
    def key_fields(self) -> tuple[str, ...]:
        return self._decoding.keys(self.manifest)

    async def refresh(self) -> Manifest:
        """Read the manifest again and return it."""
        self._stored = await _read(self.files.destination, self._order)
        return self.manifest

    def plan(
        self,
        *,
        position: str | None = None,
        time: datetime | None = None,
        at_source: str | None = None,
    ) -> TablePlan:
        """Return a plan for reading the table at the head, or at one earlier point.

        `position`: the table with exactly the changes up to this position of the stream.
        `time`: the newest table that was committed by then.
        `at_source`: the newest table without a change that the source committed after this position
        (a PostgreSQL LSN).
        """
        return plan_table(
            self.manifest, self.order, position=position, time=time, at_source=at_source
        )

    def plan_changes(self, since: str, *, until: str | None = None) -> ChangesPlan:
        """Return the diffs that lead from position `since` to position `until`, or to the head."""
        return plan_changes(self.manifest, self.order, since, until=until)

    def read(
        self, plan: TablePlan, *, columns: Sequence[str] | None = None
    ) -> AsyncGenerator[pa.Table]:
        """Yield the table of `plan` in pieces: at least one, possibly empty.

        `columns` names the columns to read, in their order; None reads all.
        Memory holds the net changes of the plan, or of one key bucket, and a piece of the base.
        Raises `PartGoneError` if files were collected since the plan was made.
        """
        names = None if columns is None else tuple(columns)
        return Rebuild(plan, self.files, self._decoding, names).pieces()

    def read_changes(self, plan: ChangesPlan) -> AsyncGenerator[Changes]:
        """Yield the changes of a plan. Raises `PartGoneError` if files were collected since."""
        return ChangeFeed(plan, self.files, self._decoding).read()

    async def table(
        self,
        *,
        position: str | None = None,
        time: datetime | None = None,
        at_source: str | None = None,
        columns: Sequence[str] | None = None,
    ) -> pa.Table:
        """Return the table at the head, or at one earlier point.

        `position`, `time` and `at_source` choose the point as in `plan`, and `columns` the columns as
        in `read`.
        """

        async def rebuild() -> pa.Table:
            plan = self.plan(position=position, time=time, at_source=at_source)
            return pa.concat_tables([piece async for piece in self.read(plan, columns=columns)])

        return await self.with_plans(rebuild)

    async def batches(
        self,
        *,
        position: str | None = None,
        time: datetime | None = None,
        at_source: str | None = None,
        columns: Sequence[str] | None = None,
    ) -> AsyncGenerator[pa.RecordBatch]:
        """Yield the table's rows in batches, which need not fit into memory together.

        `position`, `time`, `at_source` and `columns` are those of `table`.
        Yields at least one batch, which may be empty but has the columns. Raises `PartGoneError` if
        files were garbage-collected after the first rows were yielded. In that case, start again.
        """
        rows = -1
        for _ in range(PLANS):
            plan = self.plan(position=position, time=time, at_source=at_source)
            try:
                async with aclosing(self.read(plan, columns=columns)) as pieces:
                    async for piece in pieces:
                        for batch in batches_of(piece, needed=rows < 0):
                            rows = max(rows, 0) + len(batch)
                            yield batch
                return
            except PartGoneError as error:
                if rows > 0:
                    raise
                await self.plan_anew(error)
        raise _replan_until_stable(self.uri)

    async def pandas(
        self,
        *,
        position: str | None = None,
        time: datetime | None = None,
        at_source: str | None = None,
        columns: Sequence[str] | None = None,
    ) -> pd.DataFrame:
        """Return the table for pandas with Arrow types, in which integers with nulls stay exact.

        `position`, `time`, `at_source` and `columns` are those of `table`.
        """
        import pandas as pd

        table = await self.table(position=position, time=time, at_source=at_source, columns=columns)
        return table.to_pandas(types_mapper=pd.ArrowDtype)

    async def polars(
        self,
        *,
        position: str | None = None,
        time: datetime | None = None,
        at_source: str | None = None,
        columns: Sequence[str] | None = None,
    ) -> pl.DataFrame:
        """Return the table for polars.

        `position`, `time`, `at_source` and `columns` are those of `table`.
        """
        import polars as pl

        table = await self.table(position=position, time=time, at_source=at_source, columns=columns)
        return pl.DataFrame(table)

    async def duckdb(
        self,
        connection: duckdb.DuckDBPyConnection | None = None,
        *,
        position: str | None = None,
        time: datetime | None = None,
        at_source: str | None = None,
        columns: Sequence[str] | None = None,
    ) -> duckdb.DuckDBPyRelation:
        """Return the table as a relation of `connection`, or of DuckDB's default connection.

        `position`, `time`, `at_source` and `columns` are those of `table`.
        """
        import duckdb

        table = await self.table(position=position, time=time, at_source=at_source, columns=columns)
        return (connection or duckdb.default_connection()).from_arrow(table)

    async def changes(self, since: str, *, until: str | None = None) -> AsyncGenerator[Changes]:
        """Yield the changes after `since`, diff by diff, up to `until` or the head.

        A diff starts over if its files were garbage-collected in the meantime.
        """
        for _ in range(PLANS):
            plan = self.plan_changes(since, until=until)
            try:
                async with aclosing(self.read_changes(plan)) as changes:
                    async for item in changes:
                        yield item
                        since = item.to_position if item.last else since
                return
            except PartGoneError as error:
                await self.plan_anew(error)
        raise _replan_until_stable(self.uri)

    def follow(
        self, since: str | None = None, *, poll: timedelta = POLL, wake: Wake | None = None
    ) -> AsyncGenerator[Followed]:
        """Yield the table's rows, unless `since` is given, and then its changes indefinitely.

        Reads the manifest every `poll`, and whenever `wake` returns.
        """
        if poll <= timedelta(0):
            raise InvalidError(
                f"poll is {poll}: it must be above 0, so that storage is not polled without pause"
            )
        return ArchiveFollower(self, since).run(poll, wake)

    async def verify(
        self, on_file: Callable[[Checked], None] | None = None, *, deep: bool = False
    ) -> Verification:
        """Check every live file in every format and return all problems.

        Calls `on_file` after each file. `deep` also rebuilds the table at each re-base and compares
        it with the new base.
        """
        manifest = self.manifest
        verification = await Verifier(manifest, self.files, self._decoding, deep).run(on_file)
        if not any(isinstance(file.problem, PartGoneError) for file in verification.problems):
            return verification
        # A file collected during the check is not missing.
        live = (await self.refresh()).paths()
        return replace(
            verification, problems=tuple(p for p in verification.problems if p.path in live)
        )

    async def plan_anew(self, gone: PartGoneError) -> None:
        """Read the manifest again after a file was gone. Raises if it still names the file."""
        await self.refresh()
        if gone.path in self.manifest.paths():
            raise ArtifactCorruptError(
                f"file {gone.path!r} is not in {self.uri}, but the manifest still names it: restore "
                "it, or read another format of it"
            ) from gone

    async def with_plans(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work`, which reads the manifest's files. Retries if they were garbage-collected."""
        for _ in range(PLANS):
            try:
                return await work()
            except PartGoneError as error:
                await self.plan_anew(error)
        raise _replan_until_stable(self.uri)


async def _read(destination: Destination, order: PositionOrder | None) -> StoredManifest:
    stored = await destination.read(order)
    if stored is None:
        raise ManifestNotFoundError(
            f"{destination.uri} has no {MANIFEST_KEY}: name the folder of a table"
        )
    return stored


def _replan_until_stable(uri: str) -> ArtifactCorruptError:
    return ArtifactCorruptError(
        f"files of {uri} were gone for {PLANS} manifests in a row: something other than collection "
        "deletes them, or its grace period is shorter than a read"
    )


async def list_archives(
    folder: Destination,
) -> AsyncIterator[tuple[str, Manifest | StreamfoldError]]:
    """Yield the folder and the manifest of each archive, in name order.

    Yields the error instead of an unusable manifest, and still lists the others.
    """
    async for meta in folder.blobs.list():
        if meta.key != MANIFEST_KEY and not meta.key.endswith("/" + MANIFEST_KEY):
            continue
        manifest: Manifest | StreamfoldError
        try:
            manifest = read_manifest(await folder.blobs.get(meta.key))
        except BlobNotFoundError:
            continue  # deleted after it was listed
        except StreamfoldError as error:
            manifest = error
        yield folder.uri + meta.key.removesuffix(MANIFEST_KEY), manifest
