"""The store: what the faces, the command line and embedding applications call.

async with open_store("file:///var/lib/streamfold") as store:
    await store.create_basin("my-basin")
    ...
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from streamfold.errors import (
    BasinDeletingError,
    BasinNotFoundError,
    ConditionFailedError,
    InvalidError,
    StreamDeletingError,
    StreamfoldError,
    StreamNotFoundError,
    TermsError,
)
from streamfold.model import names
from streamfold.model.configs import (
    BasinConfig,
    BasinReconfiguration,
    Cipher,
    StreamConfig,
    StreamConfigLayer,
    StreamReconfiguration,
)
from streamfold.model.names import BasinName, StreamName
from streamfold.model.positions import StreamPosition
from streamfold.model.records import Record
from streamfold.model.resources import BasinInfo, Page, Provision, StreamInfo
from streamfold.records.batch import RecordBatch
from streamfold.store.catalog import listing
from streamfold.store.catalog.account import Account
from streamfold.store.catalog.documents import Documents
from streamfold.store.durable_streams import DurableStreams
from streamfold.store.engine.disk_space import DiskSpace, UsageReader, read_usage
from streamfold.store.engine.engine import EngineOpener
from streamfold.store.engine.local_disk import LocalDisk
from streamfold.store.engine.location import Location, choose_location, open_location
from streamfold.store.engine.slatedb import SlateEngine
from streamfold.store.log.admission import Admission
from streamfold.store.log.committer import CommitReport
from streamfold.store.log.sealing import SealingKey
from streamfold.store.log.shares import AppendAck
from streamfold.store.log.stream_log import StreamLog
from streamfold.store.mount import Mount
from streamfold.store.read import reader
from streamfold.store.read.requests import ReadBatch, ReadRequest
from streamfold.store.settings import StoreSettings
from streamfold.store.supervisor import MountedStore, Supervisor
from streamfold.store.upkeep.reclaim import StorageUse

_NO_LAYER = StreamConfigLayer()
_NOTHING_TO_DELETE = "there is nothing to delete; check the name"
#: Takes the content type of a stream and a batch for it; raises if they disagree.
ContentCheck: TypeAlias = Callable[[str, RecordBatch], None]


def wall_clock() -> int:
    """Milliseconds since the Unix epoch."""
    return time.time_ns() // 1_000_000


class StreamStore:
    """Basins of append-only streams on durable storage. Safe for any number of concurrent calls.

    An acknowledged append is on storage, in order, once. Reads and tail checks see only what is
    durable, and after an ack they see it. Get one from `open_store`.
    """

    def __init__(self, supervisor: Supervisor, now: Callable[[], int], location: str) -> None:
        #: The name of the only location that basins can have.
        self.location = location
        self._supervisor = supervisor
        self._admission = supervisor.admission
        #: Free space for records, where storage is a disk.
        self.space = supervisor.space
        self._now = now
        self.account = Account(supervisor, now)
        self.durable = DurableStreams(supervisor, now)
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
        ref, token = _parse_names(basin, stream), _request_token(request_token)
        mounted = await self._supervisor.mounted()
        return await mounted.catalog.create_stream(*ref, config, token)

    async def ensure_stream(
        self, basin: str, stream: str, config: StreamConfigLayer = _NO_LAYER
    ) -> tuple[StreamInfo, Provision]:
        """Create the stream, or replace its configuration; members not given get their default."""
        ref = _parse_names(basin, stream)
        return await (await self._supervisor.mounted()).catalog.ensure_stream(*ref, config)

    async def stream_config(self, basin: str, stream: str) -> StreamConfig:
        ref = _parse_names(basin, stream)
        return await (await self._supervisor.mounted()).catalog.stream_config(*ref)

    async def reconfigure_stream(
        self, basin: str, stream: str, change: StreamReconfiguration
    ) -> StreamConfig:
        """Change a stream's configuration; it applies to appends that follow this call."""
        ref = _parse_names(basin, stream)
        return await (await self._supervisor.mounted()).catalog.reconfigure_stream(*ref, change)

    async def delete_stream(self, basin: str, stream: str) -> None:
        """Stop the stream at once and start deleting it; safe to repeat."""
        ref = _parse_names(basin, stream)
        mounted = await self._supervisor.mounted()
        try:
            await mounted.catalog.delete_stream(*ref)
        except BasinNotFoundError:
            raise BasinNotFoundError(ref[0], _NOTHING_TO_DELETE) from None
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
        check: ContentCheck | None = None,
    ) -> asyncio.Future[AppendAck]:
        """Give a batch its slot in the stream, and return a future for its ack.

        Batches that one caller submits one after the other are appended in that order. This waits
        for room if too much is unacknowledged, and raises if the batch is refused. `create_with` is
        the configuration of the stream if this call creates it; `key` seals the records of a stream
        that has a cipher; `check` raises if the batch is not of the stream's content type.
        """
        batch = records if isinstance(records, RecordBatch) else RecordBatch.of(records)
        if fencing_token is not None:
            names.parse_token(fencing_token, "fencing token")
        if not batch.only_trims:
            self.space.check()
        mounted = self._supervisor.current or await self._supervisor.mounted()
        log = mounted.mount.cached_log(basin, stream) or await self._log_for(
            mounted.mount, _parse_names(basin, stream), create_with, on_append=True
        )
        if check is not None and log.row.traits is not None:
            check(log.terms.content_type, batch)
        if not self._admission.acquire_at_once(batch.metered):
            with log.in_use():
                await self._admission.acquire(batch.metered)
        now = self._now()
        try:
            ack = log.accept(batch, match_seq_num, fencing_token, key, now)
        except BaseException as error:
            self._admission.release(batch.metered)
            with log.in_use():
                await _settle_refusal(error, log, mounted)
            raise
        log.renew(now)
        mounted.mount.committer.touch(log)
        return ack

    def submit_at_once(
        self,
        basin: str,
        stream: str,
        batch: RecordBatch,
        *,
        match_seq_num: int | None = None,
        fencing_token: str | None = None,
        key: SealingKey | None = None,
    ) -> asyncio.Future[AppendAck] | None:
        """`submit` for the usual case, without waiting.

        Returns None and does nothing if the stream must be opened or created or has a content type, if
        memory or disk has no room, or if the batch would be refused: call `submit` then.
        """
        if fencing_token is not None:
            names.parse_token(fencing_token, "fencing token")
        mounted = self._supervisor.current
        if mounted is None or self.space.full:
            return None
        log = mounted.mount.cached_log(basin, stream)
        if log is None or log.row.traits is not None:
            return None
        if not self._admission.acquire_at_once(batch.metered):
            return None
        try:
            ack = log.accept(batch, match_seq_num, fencing_token, key, self._now())
        except StreamfoldError:
            self._admission.release(batch.metered)
            return None
        except BaseException:
            self._admission.release(batch.metered)
            raise
        mounted.mount.committer.touch(log)
        return ack

    async def open_stream(
        self,
        basin: str,
        stream: str,
        *,
        on_append: bool,
        create_with: StreamConfigLayer = _NO_LAYER,
    ) -> Cipher | None:
        """Return the stream's cipher; creates a missing stream if its basin is configured so.

        Append and read sessions call this first; `append`, `read` and `follow` need no such call.
        """
        mounted = self._supervisor.current or await self._supervisor.mounted()
        log = mounted.mount.cached_log(basin, stream) or await self._log_for(
            mounted.mount, _parse_names(basin, stream), create_with, on_append=on_append
        )
        try:
            log.check_alive()
        except StreamDeletingError as error:
            await _settle_refusal(error, log, mounted)
            raise
        return log.row.cipher

    async def check_tail(
        self, basin: str, stream: str, *, create_with: StreamConfigLayer = _NO_LAYER
    ) -> StreamPosition:
        """The position after the last durable record."""
        ref = _parse_names(basin, stream)
        mount = (await self._supervisor.mounted()).mount
        log = await self._log_for(mount, ref, create_with, on_append=False)
        log.check_alive()
        return log.durable

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
        ref = _parse_names(basin, stream)
        mount = (await self._supervisor.mounted()).mount
        log = await self._log_for(mount, ref, create_with, on_append=False)
        with log.in_use():
            batch = await reader.read_once(mount, log, request, key)
        self.usage.record_read(basin, batch.metered)
        return batch

    @asynccontextmanager
    async def follow(
        self,
        basin: str,
        stream: str,
        request: ReadRequest,
        *,
        create_with: StreamConfigLayer = _NO_LAYER,
        key: SealingKey | None = None,
    ) -> AsyncIterator[reader.ReadSession]:
        """A reader of the stored records and then of new ones, within the limits of `request`."""
        ref = _parse_names(basin, stream)
        mount = (await self._supervisor.mounted()).mount
        log = await self._log_for(mount, ref, create_with, on_append=False)
        with log.in_use():
            reading = await reader.ReadSession.open(mount, log, request, key)
            self.usage.record_read_session(basin)
            reading.on_delivered = partial(self.usage.record_delivery, basin)
            try:
                yield reading
            finally:
                await reading.close()

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
    def storage_use(self) -> StorageUse | None:
        """The space that the store takes, as of some seconds ago; None before the first measurement."""
        mounted = self._supervisor.current
        return mounted.reclaimer.use if mounted else None

    async def upkeep(self) -> None:
        """Run one pass of the background work now."""
        await (await self._supervisor.mounted()).upkeep.run_once()

    async def _log_for(
        self,
        mount: Mount,
        ref: tuple[BasinName, StreamName],
        create_with: StreamConfigLayer,
        *,
        on_append: bool,
    ) -> StreamLog:
        """The stream's log; creates a missing stream if its basin is configured so."""
        try:
            return await mount.open_log(*ref)
        except StreamNotFoundError:
            basin = await mount.basin(ref[0])
            if basin is None:
                raise BasinNotFoundError(ref[0]) from None
            config = basin.config
            if not (config.create_stream_on_append if on_append else config.create_stream_on_read):
                raise
            if basin.deleted_at is not None:
                raise BasinDeletingError(ref[0]) from None
        catalog = (await self._supervisor.mounted()).catalog
        await catalog.open_stream(*ref, create_with)
        return await mount.open_log(*ref)


@asynccontextmanager
async def open_store(
    url: str | Location,
    settings: StoreSettings | None = None,
    *,
    now: Callable[[], int] = wall_clock,
    opener: EngineOpener | None = None,
    disk_usage: UsageReader = read_usage,
) -> AsyncIterator[StreamStore]:
    """Open the store at `url` (memory:, file:///folder, s3://bucket/prefix) as its only writer.

    This fences any process that has it open. Leaving the context waits until everything accepted is
    acknowledged. `now`, `opener` and `disk_usage` are for tests: time, an engine that fails on purpose,
    and a disk that fills.
    """
    settings = settings or StoreSettings()
    location = url if isinstance(url, Location) else await asyncio.to_thread(open_location, url)

    async def open_slate() -> SlateEngine:
        disk = LocalDisk(location.folder) if location.folder and settings.fsync else None
        return await SlateEngine.open(location, disk, now)

    root = location.folder.parent if location.folder is not None else None
    space = DiskSpace(root, settings.disk_reserve, disk_usage)
    supervisor = Supervisor(opener or open_slate, settings, now, location.snapshots, space)
    try:
        async with supervisor.running():
            yield StreamStore(supervisor, now, location.name)
    finally:
        if location is not url:
            await asyncio.to_thread(location.close)


async def _settle_refusal(error: BaseException, log: StreamLog, mounted: MountedStore) -> None:
    """Wait until the state that a refusal depends on is durable: clients may rely on it then."""
    if isinstance(error, ConditionFailedError | TermsError):
        await mounted.mount.settle(log)
    elif isinstance(error, StreamDeletingError):
        await mounted.catalog.deletion(log.basin, log.name)


def _parse_names(basin: str, stream: str) -> tuple[BasinName, StreamName]:
    return names.parse_bucket_name(basin), names.parse_stream_name(stream)


def _request_token(token: str | None) -> str | None:
    if token == "":
        raise InvalidError("a request token must not be empty: leave it out, or give 1 to 36 bytes")
    return None if token is None else names.parse_token(token, "request token")
