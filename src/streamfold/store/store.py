"""The store: the interface for the faces, the command line and embedding applications.

async with open_store("file:///var/lib/streamfold") as store:
    await store.create_basin("my-basin")
    ...
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    nullcontext,
)
from dataclasses import replace
from pathlib import Path

from streamfold.blob import location_url
from streamfold.errors import (
    BasinNotFoundError,
    InvalidError,
    StreamfoldError,
    StreamNotFoundError,
)
from streamfold.model import names
from streamfold.model.configs import (
    BasinConfig,
    BasinReconfiguration,
    StreamConfig,
    StreamConfigLayer,
    StreamReconfiguration,
)
from streamfold.model.names import StreamRef
from streamfold.model.positions import StreamPosition
from streamfold.model.records import Record
from streamfold.model.resources import BasinInfo, Page, Provision, StreamInfo
from streamfold.records.batch import RecordBatch
from streamfold.store.append_queues import AppendQueues
from streamfold.store.catalog import listing
from streamfold.store.catalog.account import Account
from streamfold.store.catalog.documents import Documents
from streamfold.store.damage import DamageReport, LossReport
from streamfold.store.engine.disk_space import DiskSpace, UsageReader, memory_space, read_usage
from streamfold.store.engine.engine import EngineOpener
from streamfold.store.engine.local_disk import LocalDisk
from streamfold.store.engine.location import Location, choose_location, open_location
from streamfold.store.engine.process_locks import writer_lock
from streamfold.store.engine.slatedb import SlateEngine
from streamfold.store.engine.writer_claim import BucketClaim, NoClaim, WriterClaim, WriterLease
from streamfold.store.log.admission import Admission
from streamfold.store.log.committer import CommitReport
from streamfold.store.log.sealing import SealingKey
from streamfold.store.log.shares import AppendAck
from streamfold.store.read.reader import Reader
from streamfold.store.read.requests import ReadBatch, ReadRequest
from streamfold.store.settings import StoreSettings
from streamfold.store.stream_handle import BASIN_DEFAULTS, StreamHandle
from streamfold.store.supervisor import Supervisor
from streamfold.store.upkeep.reclaim import StorageUse

#: Seconds for which a start keeps trying to open a bucket that fails intermittently.
_BUCKET_PATIENCE = 30.0
_NOTHING_TO_DELETE = "there is nothing to delete; check the name"


def wall_clock() -> int:
    """Return the current time in milliseconds since the Unix epoch."""
    return time.time_ns() // 1_000_000


class StreamStore:
    """Basins of append-only streams on durable storage. Supports any number of concurrent calls.

    Every acknowledged append is durable, ordered and stored exactly once. Reads and tail checks see
    only durable records, and see every record that was acknowledged before the call. Create a store
    with `open_store`.
    """

    def __init__(self, supervisor: Supervisor, now: Callable[[], int], location: Location) -> None:
        #: The name of the only location available to basins.
        self.location = location.name
        #: The store's URL.
        self.url = location.url
        self._supervisor = supervisor
        self._admission = supervisor.admission
        #: Free space for records, if storage is a disk.
        self.space = supervisor.space
        self._now = now
        self.account = Account(supervisor, now)
        self._queues = AppendQueues(supervisor, now)
        self.documents = Documents(supervisor)
        #: Usage counters. Callers record each operation here.
        self.usage = supervisor.usage

    # Basins

    async def create_basin(
        self,
        basin: str,
        config: BasinConfig | None = None,
        *,
        location: str | None = None,
        request_token: str | None = None,
    ) -> tuple[BasinInfo, Provision]:
        """Create a basin with `config` at a `location`, by default the store's own.

        Repeating the call with the same `request_token` and configuration succeeds as NOOP.
        """
        name, token = names.parse_bucket_name(basin), _request_token(request_token)
        where = choose_location(location, self.location)
        mounted = await self._supervisor.mounted()
        made = await mounted.catalog.create_basin(name, config or BasinConfig(), token, where)
        return self._located(made[0]), made[1]

    async def ensure_basin(
        self, basin: str, config: BasinConfig | None = None, *, location: str | None = None
    ) -> tuple[BasinInfo, Provision]:
        """Create the basin, or replace its configuration. Omitted members get their defaults."""
        name, where = names.parse_bucket_name(basin), choose_location(location, self.location)
        mounted = await self._supervisor.mounted()
        made = await mounted.catalog.ensure_basin(name, config or BasinConfig(), where)
        return self._located(made[0]), made[1]

    async def open_basin(self, basin: str) -> None:
        """Create the basin unless it exists. An existing basin keeps its configuration."""
        name = names.parse_bucket_name(basin)
        mounted = await self._supervisor.mounted()
        if await mounted.mount.basin(name) is None:
            await mounted.catalog.open_basin(name, BasinConfig())

    async def has_basin(self, basin: str) -> bool:
        """Return whether there is a basin of this name."""
        mounted = await self._supervisor.mounted()
        return await mounted.mount.basin(names.parse_bucket_name(basin)) is not None

    async def basin_config(self, basin: str) -> BasinConfig:
        """Return the basin's configuration. Raises BasinNotFoundError if the basin does not exist."""
        name = names.parse_bucket_name(basin)
        return await (await self._supervisor.mounted()).catalog.basin_config(name)

    async def reconfigure_basin(self, basin: str, change: BasinReconfiguration) -> BasinConfig:
        """Apply `change` to the basin's configuration and return the result.

        Unset members stay as they are. The defaults for streams apply to streams created from then on.
        """
        name = names.parse_bucket_name(basin)
        return await (await self._supervisor.mounted()).catalog.reconfigure_basin(name, change)

    async def delete_basin(self, basin: str) -> None:
        """Start deleting the basin and all its streams. Safe to repeat."""
        name = names.parse_bucket_name(basin)
        mounted = await self._supervisor.mounted()
        try:
            await mounted.catalog.delete_basin(name)
        except BasinNotFoundError:
            raise BasinNotFoundError(name, _NOTHING_TO_DELETE) from None
        mounted.upkeep.request_pass()

    async def list_basins(
        self, *, prefix: str = "", start_after: str = "", limit: int = listing.LIST_MAX
    ) -> Page[BasinInfo]:
        """List basins in byte order of their names.

        Only names that begin with `prefix` and come after `start_after` are listed. A `limit` of 0 or
        above 1000 means 1000.
        """
        prefix = names.parse_basin_prefix(prefix)
        start_after = names.parse_basin_prefix(start_after)
        engine = (await self._supervisor.mounted()).mount.engine
        page = await listing.list_basins(engine, prefix, start_after, limit)
        return replace(page, items=tuple(map(self._located, page.items)))

    def _located(self, info: BasinInfo) -> BasinInfo:
        return info if info.location else replace(info, location=self.location)

    # Streams

    async def create_stream(
        self,
        basin: str,
        stream: str,
        config: StreamConfigLayer = BASIN_DEFAULTS,
        *,
        request_token: str | None = None,
    ) -> tuple[StreamInfo, Provision]:
        """Create a stream. Members that `config` leaves unset come from the basin.

        Repeating the call with the same `request_token` and configuration succeeds as NOOP.
        """
        ref, token = StreamRef.parse(basin, stream), _request_token(request_token)
        mounted = await self._supervisor.mounted()
        return await mounted.catalog.create_stream(ref, config, token)

    async def ensure_stream(
        self, basin: str, stream: str, config: StreamConfigLayer = BASIN_DEFAULTS
    ) -> tuple[StreamInfo, Provision]:
        """Create the stream, or replace its configuration. Omitted members get their defaults."""
        ref = StreamRef.parse(basin, stream)
        return await (await self._supervisor.mounted()).catalog.ensure_stream(ref, config)

    async def stream_config(self, basin: str, stream: str) -> StreamConfig:
        """Return the stream's configuration.

        Raises StreamNotFoundError if the stream does not exist.
        """
        ref = StreamRef.parse(basin, stream)
        return await (await self._supervisor.mounted()).catalog.stream_config(ref)

    async def reconfigure_stream(
        self, basin: str, stream: str, change: StreamReconfiguration
    ) -> StreamConfig:
        """Change a stream's configuration for all appends that follow this call."""
        ref = StreamRef.parse(basin, stream)
        return await (await self._supervisor.mounted()).catalog.reconfigure_stream(ref, change)

    async def delete_stream(self, basin: str, stream: str) -> None:
        """Stop the stream at once and start deleting it. Safe to repeat."""
        ref = StreamRef.parse(basin, stream)
        mounted = await self._supervisor.mounted()
        try:
            await mounted.catalog.delete_stream(ref)
        except BasinNotFoundError:
            raise BasinNotFoundError(ref.basin, _NOTHING_TO_DELETE) from None
        except StreamNotFoundError:
            raise StreamNotFoundError(*ref, _NOTHING_TO_DELETE) from None
        mounted.upkeep.request_pass()

    async def list_streams(
        self,
        basin: str,
        *,
        prefix: str = "",
        start_after: str = "",
        limit: int = listing.LIST_MAX,
    ) -> Page[StreamInfo]:
        """List streams in byte order of their names.

        Only names that begin with `prefix` and come after `start_after` are listed. A `limit` of 0 or
        above 1000 means 1000.
        """
        name = names.parse_bucket_name(basin)
        prefix = names.parse_stream_prefix(prefix)
        start_after = names.parse_stream_prefix(start_after)
        mount = (await self._supervisor.mounted()).mount
        if await mount.basin(name) is None:
            raise BasinNotFoundError(name)
        return await listing.list_streams(mount.engine, name, prefix, start_after, limit)

    # Records

    def stream(self, basin: str, stream: str) -> StreamHandle:
        """Return a handle to the stream of this name, whether or not the stream exists."""
        return StreamHandle(StreamRef.parse(basin, stream), self._supervisor, self._queues)

    async def append(
        self,
        basin: str,
        stream: str,
        records: RecordBatch | Sequence[Record],
        *,
        match_seq_num: int | None = None,
        fencing_token: str | None = None,
        create_with: StreamConfigLayer = BASIN_DEFAULTS,
        key: SealingKey | None = None,
    ) -> AppendAck:
        """Append `records` atomically. They are durable when this returns.

        With `match_seq_num`, the append succeeds only if the first record gets this seq_num; with
        `fencing_token`, only if it is the stream's token. `create_with` configures the stream if this
        call creates it. `key` seals the records of a stream that has a cipher.
        """
        submission = self.stream(basin, stream).append(
            records,
            match_seq_num=match_seq_num,
            fencing_token=fencing_token,
            create_with=create_with,
            key=key,
        )
        return await submission.ack

    async def check_tail(
        self, basin: str, stream: str, *, create_with: StreamConfigLayer = BASIN_DEFAULTS
    ) -> StreamPosition:
        """Return the position after the last durable record."""
        return await self.stream(basin, stream).tail(create_with=create_with)

    async def read(
        self,
        basin: str,
        stream: str,
        request: ReadRequest,
        *,
        create_with: StreamConfigLayer = BASIN_DEFAULTS,
        key: SealingKey | None = None,
    ) -> ReadBatch:
        """Read at most 1000 records and 1 MiB, from the start and within the limits of `request`.

        Raises PositionUnwrittenError at the tail. `create_with` configures the stream if this call
        creates it. `key` opens the records of a stream that has a cipher.
        """
        return await self.stream(basin, stream).read(request, key, create_with=create_with)

    def follow(
        self,
        basin: str,
        stream: str,
        request: ReadRequest,
        *,
        create_with: StreamConfigLayer = BASIN_DEFAULTS,
        key: SealingKey | None = None,
    ) -> AbstractAsyncContextManager[Reader]:
        """Open a reader of stored and then new records, within the limits of `request`.

        `create_with` and `key` are those of `read`.
        """
        return self.stream(basin, stream).follow(request, key, create_with=create_with)

    def on_append(self, listener: Callable[[str, str, int, int], None]) -> None:
        """Call `listener(basin, stream, first, next)` whenever records become durable.

        The call is part of the commit, so it must be quick and must not raise.
        """
        self._supervisor.listeners.append(listener)

    def on_commit(self, listener: Callable[[CommitReport], None]) -> None:
        """Call `listener` for each durable commit. The rules of `on_append` apply."""
        self._supervisor.commit_listeners.append(listener)

    @property
    def queue(self) -> Admission:
        """Appends accepted but not yet acknowledged, and appends waiting for room."""
        return self._admission

    async def stopped(self) -> StreamfoldError:
        """Wait until the store stops for good in this process, and return the reason.

        Only a takeover by another process or a failed device stops it. The store recovers from all
        other failures.
        """
        return await self._supervisor.stopped()

    @property
    def storage_open(self) -> bool:
        """Whether storage is open.

        False while it is reopened after a failure, and after closing.
        """
        return self._supervisor.current is not None

    @property
    def storage_failures(self) -> int:
        """The number of times that storage has failed and been closed since the process started."""
        return self._supervisor.failures

    @property
    def damage(self) -> DamageReport:
        """The damage that reads and background work found since storage was opened."""
        mounted = self._supervisor.current
        if mounted is None:
            return DamageReport()
        return mounted.mount.damage.report(mounted.mount.engine.damaged_files)

    @property
    def storage_use(self) -> StorageUse | None:
        """The store's space use, as of some seconds ago. None before the first measurement."""
        mounted = self._supervisor.current
        return mounted.reclaimer.use if mounted else None

    async def upkeep(self) -> None:
        """Run one upkeep pass now."""
        await (await self._supervisor.mounted()).upkeep.run_once()


@asynccontextmanager
async def open_store(
    url: str | Path | Location,
    settings: StoreSettings | None = None,
    *,
    # For tests: the clock, an engine that fails on purpose, a disk that fills up.
    now: Callable[[], int] = wall_clock,
    opener: EngineOpener | None = None,
    disk_usage: UsageReader = read_usage,
    take_over: bool = False,
    accept_loss: int | None = None,
    lease: WriterLease | None = None,
) -> AsyncIterator[StreamStore]:
    """Open the store at `url` (memory:, a folder, s3://bucket/prefix) as its only writer.

    `settings` trade latency, cost and memory; the defaults suit a small server.
    On local disk, a store that is already open raises StoreInUseError unless `take_over` is set.
    With `take_over`, and always on object storage, opening fences the other writer, whose appends
    then fail. Leaving the context waits until all accepted appends are acknowledged. `accept_loss`
    is the number of a damaged log file on local disk, taken from its error: that file and all later
    ones are dropped. A server on object storage passes the `lease` that it holds on the store.
    """
    settings = settings or StoreSettings()
    if isinstance(url, Location):
        location = url
    else:
        location = await asyncio.to_thread(open_location, location_url(url))

    async def open_slate() -> SlateEngine:
        if location.folder is None or not settings.fsync:
            return await SlateEngine.open(location, None, now)
        loss = LossReport()
        disk = LocalDisk(
            location.folder,
            accept_loss=accept_loss,
            on_dropped=loss.add,
        )
        engine = await SlateEngine.open(location, disk, now)
        try:
            await loss.log(engine)
        except BaseException:
            await engine.close(flush=False)
            raise
        return engine

    root = location.folder.parent if location.folder is not None else None
    space = (
        memory_space(settings.disk_reserve)
        if location.in_memory
        else DiskSpace(root, settings.disk_reserve, disk_usage)
    )
    folder, limits, asked = location.folder, location.file_limits, settings.chunk_file_bytes
    try:
        claiming: AbstractContextManager[WriterClaim] = (
            writer_lock(folder, take_over=take_over)
            if folder is not None
            else nullcontext(
                NoClaim()
                if location.files is None
                else BucketClaim(location, location.files, lease)
            )
        )
        with claiming as claim:
            chunks = await asyncio.to_thread(location.open_chunks, fsync=settings.fsync)
            supervisor = Supervisor(
                opener or open_slate,
                settings,
                now,
                location.snapshots,
                chunks,
                limits if asked is None else limits._replace(write_from=asked),
                space,
                claim,
                _BUCKET_PATIENCE if location.files is not None else 0,
            )
            async with supervisor.running():
                yield StreamStore(supervisor, now, location)
    finally:
        if location is not url:
            await asyncio.to_thread(location.close)


def _request_token(token: str | None) -> str | None:
    if token == "":
        raise InvalidError("a request token must not be empty: leave it out, or give 1 to 36 bytes")
    return None if token is None else names.parse_token(token, "request token")
