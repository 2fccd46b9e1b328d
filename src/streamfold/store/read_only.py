"""Read-only access to a store that another process writes, straight from storage.

SlateDB opens the newest durable state and pins its files with a checkpoint, which it renews while
the store is open and deletes on close. The writer's compaction therefore deletes nothing that is
still read here. Each renewal pins the then-current state instead, and chunk files are never pinned.
So records trimmed during a read may be gone: a read that finds none looks up the current trim point
on storage and continues there.

Records appended after a stream was opened are not visible. Streams answer as they would after a
server restart: trims and retention take effect at once.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import NoReturn
from urllib.parse import unquote, urlsplit

from streamfold.errors import (
    BasinNotFoundError,
    DataCorruptError,
    InvalidError,
    NotFoundError,
    StorageError,
    StreamNotFoundError,
)
from streamfold.model import names
from streamfold.model.names import StreamRef
from streamfold.model.positions import StreamPosition
from streamfold.store import keys, rows
from streamfold.store.catalog import listing
from streamfold.store.catalog.catalog import Catalog, NamedLocks
from streamfold.store.damage import KnownDamage
from streamfold.store.engine.engine import Op, WriteBatch, first_row
from streamfold.store.engine.location import DATABASE, MANIFESTS, Location, open_location
from streamfold.store.engine.native import EngineError, SlateDatabase, SlateManifest
from streamfold.store.engine.slatedb import SlateEngine, open_admin, table_check
from streamfold.store.engine.slatedb_rows import SlateRows, translated
from streamfold.store.engine.table_check import TableCheck
from streamfold.store.log.admission import Admission
from streamfold.store.log.chunk_files import ChunkFiles
from streamfold.store.log.sealing import SealingKey
from streamfold.store.log.stream_log import StreamLog
from streamfold.store.mount import Mount
from streamfold.store.opening_rows import DeletingBasins
from streamfold.store.read.reader import Reader
from streamfold.store.read.requests import ReadBatch, ReadRequest, from_seq_num
from streamfold.store.read.seek import apply_retention, seek_timestamp
from streamfold.store.rows import StateRow, StreamRow
from streamfold.store.settings import StoreSettings
from streamfold.store.store import wall_clock
from streamfold.store.upkeep.live_bytes import LiveBytes

#: Milliseconds between two checkpoint renewals. A checkpoint outlives a killed reader by ten times
#: as long. The second value is a month, longer than anybody reads a fixed state.
_RENEWAL, _NEVER = 60_000, 30 * 86_400_000
#: Maximum bytes of WAL-only rows that a reader holds in memory, the same as the writer's.
_WAL_BYTES = 256 << 20
#: Retries of a request that failed with a storage error.
_RETRIES = 4
#: Seconds within which storage must answer.
_ANSWER_TIMEOUT = 15.0


class ReaderEngine(SlateEngine):
    """SlateDB's reader as an engine that rejects writes."""

    def __init__(self, reader: SlateDatabase, check: TableCheck) -> None:
        SlateRows.__init__(self, reader, check)
        self._reader = reader

    @property
    def epoch(self) -> int:
        """Lower than the epoch of every writer."""
        return 0

    @classmethod
    async def open_reader(
        cls, location: Location, *, fixed: SlateManifest | None = None, replay_log: bool = True
    ) -> ReaderEngine:
        """Open the newest durable state. Raises NotFoundError if there is no store at the location.

        With `fixed`, the manifest pinned by a freeze of the caller, the reader stays at the state
        it opens and pins no files. Without `replay_log`, it sees only rows in tables.
        """
        renewal = _RENEWAL if fixed is None else _NEVER
        try:
            await location.check_access()
            async with asyncio.timeout(_ANSWER_TIMEOUT):
                admin = open_admin(location)
                manifest = await admin.read_manifest()
            if manifest is None:
                raise NotFoundError(f"there is no store at {location.url}: check the location")
            check = table_check(location, admin, fixed)
            reader = await SlateDatabase.open_reader(
                location.store,
                location.path,
                poll=renewal,
                lifetime=10 * renewal,
                memory=_WAL_BYTES,
                retries=_RETRIES,
                replay_log=replay_log,
                follow=fixed is not None,
            )
            return cls(reader, check)
        except TimeoutError:
            raise StorageError(
                f"storage at {location.url} did not answer within {_ANSWER_TIMEOUT:g} s: check that it "
                "exists, its endpoint and the credentials"
            ) from None
        except (EngineError, OSError) as error:
            raise translated(error) from error

    def prepare(self, ops: Sequence[Op]) -> NoReturn:
        raise InvalidError("a store that is opened to be read takes no changes: use its server")

    async def commit(self, batch: WriteBatch) -> NoReturn:
        self.prepare(batch.ops)

    async def close(self, *, flush: bool = True) -> None:
        try:
            await self._reader.close(flush=False)
        except EngineError as error:
            raise translated(error) from error


class StoredStreams:
    """The streams of a store as of its opening."""

    def __init__(self, mount: Mount, location: Location) -> None:
        self._mount = mount
        self._location = location
        self._catalog = Catalog(mount, NamedLocks(), mount.now)

    async def names(self, basin: str, prefix: str = "") -> list[str]:
        """Return the streams whose names start with `prefix`, in order.

        Omits those being deleted.
        """
        name, prefix = names.parse_bucket_name(basin), names.parse_stream_prefix(prefix)
        if await self._mount.basin(name) is None:
            raise BasinNotFoundError(name)
        streams: list[str] = []
        after, more = "", True
        while more:
            page = await listing.list_streams(self._mount.engine, name, prefix, after, 0)
            streams += [info.name for info in page.items if info.deleted_at is None]
            after, more = page.items[-1].name if page.items else "", page.has_more
        return streams

    async def tail(self, basin: str, stream: str) -> StreamPosition:
        """Return the position after the last record."""
        async with self._opened(basin, stream) as log:
            return log.durable

    async def first(self, basin: str, stream: str, at: int) -> int:
        """Return the first readable seq_num at or after `at`, or the tail if there is none."""
        async with self._opened(basin, stream) as log:
            return min(max(at, log.readable_from), int(log.durable.seq_num))

    async def first_since(
        self, basin: str, stream: str, timestamp: int, key: SealingKey | None
    ) -> int:
        """Return the first record not older than `timestamp`, or the tail if there is none."""
        async with self._opened(basin, stream) as log:
            log.check_key(key)
            return await seek_timestamp(self._mount, log, timestamp, key)

    async def newest_snapshot(self, basin: str, stream: str) -> int | None:
        """Return the first seq_num that the newest snapshot does not cover, or None without one."""
        async with self._opened(basin, stream) as log:
            span = keys.snapshots_span(log.id)
            row = await first_row(self._mount.engine, *span, descending=True)
            return keys.snapshot_seq_num(row[0]) if row else None

    async def batches(
        self, basin: str, stream: str, start: int, end: int, key: SealingKey | None
    ) -> AsyncGenerator[ReadBatch]:
        """Yield the readable records of `[start, end)`, in order and decrypted."""
        async with self._opened(basin, stream) as log:
            if start >= min(end, int(log.durable.seq_num)):
                return
            request = ReadRequest(from_seq_num(start), count=end - start)
            async with aclosing(await Reader.open(self._mount, log, request, key)) as reader:
                while (batch := await self._next(reader, log)) is not None:
                    yield batch

    async def _next(self, reader: Reader, log: StreamLog) -> ReadBatch | None:
        """Return the next batch, skipping records that were trimmed meanwhile."""
        while True:
            try:
                return await reader.read()
            except DataCorruptError:
                trim_point = await self._newest_trim_point(log)
                if trim_point <= reader.seq_num:
                    raise
                log.trims.accept(trim_point, at_once=True)
                log.trims.settle(trim_point, trim_point)

    async def _newest_trim_point(self, log: StreamLog) -> int:
        """Return the trim point now on storage.

        Raises StreamNotFoundError if the stream is gone.
        """
        engine = await ReaderEngine.open_reader(self._location)
        try:
            stored = await engine.get(keys.stream(*log.ref))
            row = rows.decode(stored, StreamRow) if stored else None
            if row is None or row.id != log.id or row.deleted_at is not None:
                raise StreamNotFoundError(*log.ref)
            state = await engine.get(keys.state(log.id))
            return rows.decode(state, StateRow).trim_point if state else 0
        finally:
            await engine.close()

    @asynccontextmanager
    async def _opened(self, basin: str, stream: str) -> AsyncIterator[StreamLog]:
        with await self._catalog.lease(StreamRef.parse(basin, stream)) as log:
            log.check_alive()
            await apply_retention(self._mount, log)
            yield log


@asynccontextmanager
async def open_read_only(
    url: str, environment: Mapping[str, str] = os.environ
) -> AsyncIterator[StoredStreams]:
    """Open the store at `url` (file:///folder, s3://bucket/prefix) to read its current contents.

    Does not disturb the writer. On object storage this needs permission to write manifests, which
    hold the checkpoint.
    """
    _check_exists(url)
    location = await asyncio.to_thread(open_location, url, environment)
    try:
        engine = await ReaderEngine.open_reader(location)
        try:
            chunks = await asyncio.to_thread(location.open_chunks, fsync=False)
            files = ChunkFiles(chunks, engine.epoch, location.file_limits)
            yield StoredStreams(_mount(engine, files), location)
        finally:
            await engine.close()
    finally:
        await asyncio.to_thread(location.close)


def _mount(engine: ReaderEngine, files: ChunkFiles) -> Mount:
    """Return a mount like that of `Mount.start`, without the parts that only a writer needs."""
    settings = StoreSettings()
    admission = Admission(settings.inflight_bytes)
    unknown, basins = LiveBytes(None), DeletingBasins()
    damage = KnownDamage()
    return Mount(engine, settings, admission, wall_clock, 1, unknown, files, damage, basins)


def _check_exists(url: str) -> None:
    """Raise if there is no store at `url`, because opening a local one would create its folders."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        if not (Path(unquote(parts.path)) / DATABASE / MANIFESTS).is_dir():
            raise NotFoundError(f"there is no store at {url}: check the folder")
    elif parts.scheme != "s3" or not parts.netloc:
        raise InvalidError(
            f"store {url!r} cannot be read from storage: give file:///folder or s3://bucket/prefix"
        )
