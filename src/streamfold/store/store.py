"""The store: what the faces, the command line and embedding applications call.

async with open_store("file:///var/lib/streamfold") as store:
    await store.create_basin("my-basin")
    ...
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import replace

from streamfold.errors import (
    BasinDeletingError,
    BasinNotFoundError,
    InvalidError,
    StreamDeletingError,
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
from streamfold.store.appends import Appends, settle_refusal
from streamfold.store.catalog import listing
from streamfold.store.catalog.account import Account
from streamfold.store.catalog.documents import Documents
from streamfold.store.damage import DamageReport
from streamfold.store.durable_streams import DurableStreams
from streamfold.store.engine.disk_space import DiskSpace, UsageReader, memory_space, read_usage
from streamfold.store.engine.engine import EngineOpener
from streamfold.store.engine.local_disk import LocalDisk
from streamfold.store.engine.location import Location, choose_location, open_location
from streamfold.store.engine.process_locks import writer_lock
from streamfold.store.engine.slatedb import SlateEngine
from streamfold.store.engine.writer_claim import BucketClaim, NoClaim, WriterClaim
from streamfold.store.log.admission import Admission, AppendRequest
from streamfold.store.log.committer import CommitReport
from streamfold.store.log.sealing import SealingKey
from streamfold.store.log.shares import AppendAck
from streamfold.store.loss_report import LossReport
from streamfold.store.read.reader import OpenStream, Reader
from streamfold.store.read.requests import ReadBatch, ReadRequest
from streamfold.store.settings import StoreSettings
from streamfold.store.supervisor import Supervisor
from streamfold.store.upkeep.reclaim import StorageUse

_NO_LAYER = StreamConfigLayer()
#: Seconds for which a start tries to open a bucket that fails now and then.
_BUCKET_PATIENCE = 30.0
_NOTHING_TO_DELETE = "there is nothing to delete; check the name"


def wall_clock() -> int:
    """Milliseconds since the Unix epoch."""
    return time.time_ns() // 1_000_000


class StreamStore:
    """Basins of append-only streams on durable storage. Safe for any number of concurrent calls.

    An acknowledged append is on storage, in order, once. Reads and tail checks see only what is
    durable, and after an ack they see it. Get one from `open_store`.
    """

    def __init__(self, supervisor: Supervisor, now: Callable[[], int], location: Location) -> None:
        #: The name of the only location that basins can have.
        self.location = location.name
        #: Where the store is.
        self.url = location.url
        self._supervisor = supervisor
        self._admission = supervisor.admission
        #: Free space for records, where storage is a disk.
        self.space = supervisor.space
        self._now = now
        self.account = Account(supervisor, now)
        #: Where the faces submit appends.
        self.appends = Appends(supervisor, now)
        self.durable = DurableStreams(supervisor, self.appends, now)
        self.documents = Documents(supervisor)
        #: Counts the use of the store; the caller records each operation here.
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
        """Create a basin; a repetition with the same token and configuration succeeds as NOOP."""
        name, token = names.parse_bucket_name(basin), _request_token(request_token)
        where = choose_location(location, self.location)
        mounted = await self._supervisor.mounted()
        made = await mounted.catalog.create_basin(name, config or BasinConfig(), token, where)
        return self._located(made[0]), made[1]

    async def ensure_basin(
        self, basin: str, config: BasinConfig | None = None, *, location: str | None = None
    ) -> tuple[BasinInfo, Provision]:
        """Create the basin, or replace its configuration; members not given get their default."""
        name, where = names.parse_bucket_name(basin), choose_location(location, self.location)
        mounted = await self._supervisor.mounted()
        made = await mounted.catalog.ensure_basin(name, config or BasinConfig(), where)
        return self._located(made[0]), made[1]

    async def basin_config(self, basin: str) -> BasinConfig:
        name = names.parse_bucket_name(basin)
        return await (await self._supervisor.mounted()).catalog.basin_config(name)

    async def reconfigure_basin(self, basin: str, change: BasinReconfiguration) -> BasinConfig:
        name = names.parse_bucket_name(basin)
        return await (await self._supervisor.mounted()).catalog.reconfigure_basin(name, change)

    async def delete_basin(self, basin: str) -> None:
        """Start deleting the basin and all its streams; safe to repeat."""
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
        """Basins in byte order of their names; a limit of 0 or more than 1000 means 1000."""
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
        config: StreamConfigLayer = _NO_LAYER,
        *,
        request_token: str | None = None,
    ) -> tuple[StreamInfo, Provision]:
        """Create a stream; a repetition with the same token and configuration succeeds as NOOP."""
        ref, token = StreamRef.parse(basin, stream), _request_token(request_token)
        mounted = await self._supervisor.mounted()
        return await mounted.catalog.create_stream(ref, config, token)

    async def ensure_stream(
        self, basin: str, stream: str, config: StreamConfigLayer = _NO_LAYER
    ) -> tuple[StreamInfo, Provision]:
        """Create the stream, or replace its configuration; members not given get their default."""
        ref = StreamRef.parse(basin, stream)
        return await (await self._supervisor.mounted()).catalog.ensure_stream(ref, config)

    async def stream_config(self, basin: str, stream: str) -> StreamConfig:
        ref = StreamRef.parse(basin, stream)
        return await (await self._supervisor.mounted()).catalog.stream_config(ref)

    async def reconfigure_stream(
        self, basin: str, stream: str, change: StreamReconfiguration
    ) -> StreamConfig:
        """Change a stream's configuration; it applies to appends that follow this call."""
        ref = StreamRef.parse(basin, stream)
        return await (await self._supervisor.mounted()).catalog.reconfigure_stream(ref, change)

    async def delete_stream(self, basin: str, stream: str) -> None:
        """Stop the stream at once and start deleting it; safe to repeat."""
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
        """Streams in byte order of their names; a limit of 0 or more than 1000 means 1000."""
        name = names.parse_bucket_name(basin)
        prefix = names.parse_stream_prefix(prefix)
        start_after = names.parse_stream_prefix(start_after)
        mount = (await self._supervisor.mounted()).mount
        if await mount.basin(name) is None:
            raise BasinNotFoundError(name)
        return await listing.list_streams(mount.engine, name, prefix, start_after, limit)

    # Records

    async def append(
        self,
        basin: str,
        stream: str,
        records: RecordBatch | Sequence[Record],
        *,
        match_seq_num: int | None = None,
        fencing_token: str | None = None,
        create_with: StreamConfigLayer = _NO_LAYER,
        key: SealingKey | None = None,
    ) -> AppendAck:
        """Append a batch, all of it or nothing; durable when this returns."""
        ticket = await self.submit(
            basin,
            stream,
            records,
            match_seq_num=match_seq_num,
            fencing_token=fencing_token,
            create_with=create_with,
            key=key,
        )
        return await ticket

    async def submit(
        self,
        basin: str,
        stream: str,
        records: RecordBatch | Sequence[Record],
        *,
        match_seq_num: int | None = None,
        fencing_token: str | None = None,
        create_with: StreamConfigLayer = _NO_LAYER,
        key: SealingKey | None = None,
    ) -> asyncio.Future[AppendAck]:
        """Give a batch its slot in the stream, and return a future for its ack.

        Batches that one caller submits one after the other are appended in that order. This waits
        for room if too much is unacknowledged, and raises if the batch is refused. `create_with` is
        the configuration of the stream if this call creates it; `key` seals the records of a stream
        that has a cipher.
        """
        batch = records if isinstance(records, RecordBatch) else RecordBatch.of(records)
        if fencing_token is not None:
            names.parse_token(fencing_token, "fencing token")
        request = AppendRequest(
            StreamRef.parse(basin, stream),
            (batch,),
            match_seq_num,
            fencing_token,
            key=key,
            create_with=create_with,
        )
        return self.appends.try_submit(request) or await self.appends.submit(request)

    @asynccontextmanager
    async def opened(
        self,
        basin: str,
        stream: str,
        *,
        create_with: StreamConfigLayer = _NO_LAYER,
        on_append: bool = False,
    ) -> AsyncIterator[OpenStream]:
        """The stream, open while the context lasts; creates it if its basin is configured so."""
        mounted = self._supervisor.current or await self._supervisor.mounted()
        ref = StreamRef.parse(basin, stream)
        with await mounted.catalog.lease(ref, create_with, on_append=on_append) as log:
            try:
                log.check_alive()
            except (BasinDeletingError, StreamDeletingError) as error:
                await settle_refusal(error, mounted, log)
                raise
            yield OpenStream(mounted.mount, log, self.usage)

    async def check_tail(
        self, basin: str, stream: str, *, create_with: StreamConfigLayer = _NO_LAYER
    ) -> StreamPosition:
        """The position after the last durable record."""
        async with self.opened(basin, stream, create_with=create_with) as found:
            return found.tail

    async def read(
        self,
        basin: str,
        stream: str,
        request: ReadRequest,
        *,
        create_with: StreamConfigLayer = _NO_LAYER,
        key: SealingKey | None = None,
    ) -> ReadBatch:
        """One batch of at most 1000 records and 1 MiB; PositionUnwrittenError at the tail."""
        async with self.opened(basin, stream, create_with=create_with) as found:
            return await found.read(request, key)

    @asynccontextmanager
    async def follow(
        self,
        basin: str,
        stream: str,
        request: ReadRequest,
        *,
        create_with: StreamConfigLayer = _NO_LAYER,
        key: SealingKey | None = None,
    ) -> AsyncIterator[Reader]:
        """A reader of the stored records and then of new ones, within the limits of `request`."""
        async with (
            self.opened(basin, stream, create_with=create_with) as found,
            found.follow(request, key) as reader,
        ):
            yield reader

    def on_append(self, listener: Callable[[str, str, int, int], None]) -> None:
        """Call `listener(basin, stream, first, next)` whenever records have become durable.

        The call is part of the commit, so it must be quick and must not raise.
        """
        self._supervisor.listeners.append(listener)

    def on_commit(self, listener: Callable[[CommitReport], None]) -> None:
        """Call `listener` for each durable commit; the rules of `on_append` apply."""
        self._supervisor.commit_listeners.append(listener)

    @property
    def queue(self) -> Admission:
        """What is accepted but not yet acknowledged, and what waits for room."""
        return self._admission

    async def stopped(self) -> StreamfoldError:
        """Wait until the store stops for good in this process; return why.

        Only a takeover by another process or a failed device stops it: it recovers from other failures.
        """
        return await self._supervisor.stopped()

    @property
    def storage_open(self) -> bool:
        """Whether storage is open; False while it is reopened after a failure, and once closed."""
        return self._supervisor.current is not None

    @property
    def storage_failures(self) -> int:
        """How often storage failed and was closed since the process started."""
        return self._supervisor.failures

    @property
    def damage(self) -> DamageReport:
        """What reads and background work found unreadable since storage was opened."""
        mounted = self._supervisor.current
        if mounted is None:
            return DamageReport()
        return mounted.mount.damage.report(mounted.mount.engine.damaged_files)

    @property
    def storage_use(self) -> StorageUse | None:
        """The space that the store takes, as of some seconds ago; None before the first measurement."""
        mounted = self._supervisor.current
        return mounted.reclaimer.use if mounted else None

    async def upkeep(self) -> None:
        """Run one pass of the background work now."""
        await (await self._supervisor.mounted()).upkeep.run_once()


@asynccontextmanager
async def open_store(
    url: str | Location,
    settings: StoreSettings | None = None,
    *,
    now: Callable[[], int] = wall_clock,
    opener: EngineOpener | None = None,
    disk_usage: UsageReader = read_usage,
    take_over: bool = False,
    accept_loss: int | None = None,
) -> AsyncIterator[StreamStore]:
    """Open the store at `url` (memory:, file:///folder, s3://bucket/prefix) as its only writer.

    On local disk, a store that is open already raises StoreInUseError, unless `take_over` is set. Then,
    and always on object storage, opening fences the other writer: its appends fail. Leaving the context
    waits until everything accepted is acknowledged. `accept_loss` is the number of a damaged log file
    on local disk, from its error: that file and all after it are dropped. `now`, `opener` and
    `disk_usage` are for tests: time, an engine that fails on purpose, and a disk that fills.
    """
    settings = settings or StoreSettings()
    location = url if isinstance(url, Location) else await asyncio.to_thread(open_location, url)

    async def open_slate() -> SlateEngine:
        if location.folder is None or not settings.fsync:
            return await SlateEngine.open(location, None, now)
        loss = LossReport()
        disk = LocalDisk(
            location.folder,
            in_flight=settings.commits_in_flight + 1,  # one of the reclaimer
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
                NoClaim() if location.files is None else BucketClaim(location, location.files)
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
