"""Keeps storage mounted: after a failure, drops the mount and opens a new one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import NoReturn

from streamfold.backoff import pause_after
from streamfold.blob import BlobStore
from streamfold.errors import (
    DataCorruptError,
    DeviceFailedError,
    FormatUnsupportedError,
    StorageError,
    StorageFullError,
    StoreClosingError,
    StoreRecoveringError,
    StreamfoldError,
    WriterFencedError,
)
from streamfold.model.names import StreamRef
from streamfold.store import keys, rows
from streamfold.store.catalog.access_tokens import AccessTokens
from streamfold.store.catalog.catalog import Catalog, NamedLocks
from streamfold.store.catalog.snapshots import SnapshotBlobs, StreamSnapshots
from streamfold.store.catalog.staged_parts import StagedParts
from streamfold.store.damage import KnownDamage
from streamfold.store.engine.disk_space import DiskSpace
from streamfold.store.engine.engine import Engine, EngineOpener, commit_rows
from streamfold.store.engine.location import FileLimits
from streamfold.store.engine.writer_claim import WriterClaim
from streamfold.store.leftovers import Leftovers
from streamfold.store.log.admission import Admission
from streamfold.store.log.chunk_files import ChunkFiles
from streamfold.store.log.committer import CommitReport
from streamfold.store.log.shares import Share
from streamfold.store.log.stream_log import StreamLog
from streamfold.store.mount import Mount, MountObserver
from streamfold.store.rows import FormatRow, StreamRow
from streamfold.store.settings import StoreSettings
from streamfold.store.upkeep.background import Upkeep
from streamfold.store.upkeep.memory_release import MemoryRelease
from streamfold.store.upkeep.reclaim import Reclaimer
from streamfold.store.usage.recorder import UsageKeeper, UsageRecorder

logger = logging.getLogger(__name__)

#: Failures after which reopening storage could only do harm.
FINAL = (WriterFencedError, DeviceFailedError)
#: The format that this version writes, and the newest that it reads. 2: chunks may be compressed;
#: 3: they may be in files; 4: every commit with records writes the stream's tail to its StateRow.
FORMAT_VERSION = 4
#: Seconds between attempts to reopen storage, doubling from the first to the last.
_REOPEN_FIRST, _REOPEN_LAST = 0.05, 5.0
#: Seconds allowed for closing a failed engine.
_CLOSE_TIMEOUT = 5.0
#: Seconds between checks for a takeover by another process: a replaced process would keep serving
#: stale reads. Each check costs one small storage read.
_TAKEOVER_CHECK_INTERVAL = 2.0


@dataclass(frozen=True, slots=True)
class MountedStore(MountObserver):
    """A mount and the components that run on it."""

    supervisor: Supervisor
    mount: Mount
    catalog: Catalog
    tokens: AccessTokens
    usage: UsageKeeper
    snapshots: StreamSnapshots
    upkeep: Upkeep
    reclaimer: Reclaimer
    memory_release: MemoryRelease

    def trimmed(self, log: StreamLog, deletable_at: int) -> None:
        self.upkeep.on_trimmed(log, deletable_at)

    def stream_written(self, ref: StreamRef, row: StreamRow) -> None:
        self.upkeep.on_stream_written(ref, row)

    def content_stored(self, share: Share) -> None:
        self.usage.held_bytes.appended(share)

    def appended(self, shares: Sequence[Share]) -> None:
        self.usage.appended(shares)
        for listener in self.supervisor.listeners:
            for share in shares:
                if chunks := share.chunks:
                    basin, stream = share.log.ref
                    listener(basin, stream, chunks[0].first_seq_num, chunks[-1].last_seq_num + 1)

    def committed(self, report: CommitReport) -> None:
        for listener in self.supervisor.commit_listeners:
            listener(report)


class Supervisor:
    """Hands out the current mount, and replaces it when it fails."""

    def __init__(
        self,
        opener: EngineOpener,
        settings: StoreSettings,
        now: Callable[[], int],
        snapshots: BlobStore,
        chunks: BlobStore,
        file_limits: FileLimits,
        space: DiskSpace,
        claim: WriterClaim,
        patience: float = 0,
    ) -> None:
        """With `patience`, a start retries failing storage for that many seconds."""
        self._opener = opener
        self._claim, self._patience = claim, patience
        #: Whether this process has taken the store back from a process that it had replaced.
        self._taken_back = False
        self._snapshots = SnapshotBlobs(snapshots)
        self._chunks, self._file_limits = chunks, file_limits
        self._settings = settings
        self._now = now
        self.admission = Admission(settings.inflight_bytes)
        self.usage = UsageRecorder(now)
        self.space = space
        self.parts = StagedParts(snapshots, space, now)
        #: Called when records become durable, with basin, stream, first seq_num and the seq_num
        #: after the last record.
        self.listeners: list[Callable[[str, str, int, int], None]] = []
        #: Called for each durable commit.
        self.commit_listeners: list[Callable[[CommitReport], None]] = []
        #: How often storage was closed because of a failure since the process started.
        self.failures = 0
        #: None while storage is being reopened. `mounted` waits for the next mount.
        self.current: MountedStore | None = None
        self._changed = asyncio.Event()
        #: Why `current` is None; final if `_final` is set. Raised without its traceback, which
        #: would keep the records of every rejected call in memory.
        self._refusal: StreamfoldError = StoreRecoveringError("it is being opened")
        self._final = False
        #: Event loop time until which calls wait for the next mount.
        self._wait_until = 0.0

    async def mounted(self) -> MountedStore:
        """Return the current mount.

        After a failure, waits up to `recovery_timeout` for the next one.

        If storage is not back by then, calls raise at once.
        """
        if self.current is not None:
            return self.current
        if self._wait_until <= asyncio.get_running_loop().time():
            raise self._refusal.with_traceback(None)
        try:
            async with asyncio.timeout_at(self._wait_until):
                while self.current is None and not self._final:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise self._refusal.with_traceback(None) from None
        if self.current is None:
            raise self._refusal.with_traceback(None)
        return self.current

    async def stopped(self) -> StreamfoldError:
        """Wait until the store stops for good, and return the reason."""
        while not self._final:
            self._changed.clear()
            await self._changed.wait()
        return self._refusal

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Open storage, keep it open while the context lasts, then drain and close it."""
        await self._claim.take()
        mounted = await self._open_patiently()
        self._let_calls_wait()
        # Not a task group: it would wrap the exceptions of the body.
        keeper = asyncio.create_task(self._keep(mounted))
        try:
            yield
        finally:
            try:
                await self._drain()
            finally:  # even if the caller is cancelled while draining
                keeper.cancel()
                with suppress(asyncio.CancelledError):
                    await keeper

    def _let_calls_wait(self) -> None:
        """Let calls wait up to `recovery_timeout` from now for the next mount."""
        now = asyncio.get_running_loop().time()
        self._wait_until = now + self._settings.recovery_timeout

    async def _keep(self, mounted: MountedStore) -> None:
        while True:
            failure = None
            try:
                failure = await self._run(mounted)
            except Exception as bug:
                self._refuse(StorageError(f"the store stopped, this is a bug: {bug!r}"))
                raise
            finally:
                self.current = None
                mounted.mount.abandon(self._refusal)
                silence = self._settings.commit_timeout if failure is None else _CLOSE_TIMEOUT
                await _close(mounted.mount.engine, silence, flush=failure is None)
            self.failures += 1
            logger.warning("storage failed and is closed: %s", failure)
            if self._final:
                return
            reopened = await self._reopen(mounted.mount.engine)
            if reopened is None:
                return
            mounted = reopened

    async def _run(self, mounted: MountedStore) -> StreamfoldError:
        """Run the mounted store until it fails, and return the failure."""
        self.current = mounted
        self._changed.set()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(mounted.mount.committer.run())
                if mounted.mount.damage.read_only is None:
                    group.create_task(mounted.upkeep.run())
                    group.create_task(mounted.upkeep.settle())
                    group.create_task(mounted.reclaimer.run())
                group.create_task(mounted.memory_release.run())
                group.create_task(_watch_for_takeover(mounted.mount.engine))
        except BaseExceptionGroup as errors:
            failure = _cause(errors)
            self._let_calls_wait()
            if isinstance(failure, FINAL) and not self._may_take_back(failure):
                self._refuse(failure)
            elif not self._final:
                self._refusal = _recovering(failure)
            mounted.mount.committer.fail(failure)
            return failure
        raise AssertionError("a mounted store runs until it is cancelled or fails")

    async def _reopen(self, former: Engine) -> MountedStore | None:
        """Reopen storage as soon as it responds.

        Returns None if another process has taken it over.
        """
        pause, failures = _REOPEN_FIRST, 1
        # An attempt that fails halfway fences `former`, too: after it, only the claim tells whether
        # another process has taken the store over.
        attempted = False
        while True:
            await asyncio.sleep(pause)
            failures += 1
            pause = pause_after(failures, _REOPEN_FIRST, _REOPEN_LAST)
            try:
                try:
                    if not attempted:
                        await former.check()
                    await self._claim.check()
                    attempted = True
                    return await self._open()
                except WriterFencedError as error:
                    await self._take_back(error)
                    attempted = True
            except WriterFencedError as error:
                self._refuse(error)
                return None
            except StreamfoldError as error:
                self._refusal = _recovering(error)
                logger.warning("storage cannot be opened, trying again in %.2f s: %s", pause, error)

    def _may_take_back(self, failure: StreamfoldError) -> bool:
        """Return whether `failure` may come from a process that does not know it was replaced."""
        fenced = isinstance(failure, WriterFencedError)
        return fenced and self._claim.decides and not self._taken_back

    async def _take_back(self, error: WriterFencedError) -> None:
        """Return if this process replaced the one that opened the store.

        Raises `error` otherwise.
        """
        if not self._may_take_back(error):
            raise error
        await self._claim.check()
        self._taken_back = True
        logger.warning(
            "a process that was started before this one has opened the store: taking it back"
        )

    async def _open_patiently(self) -> MountedStore:
        """Open storage, retrying a failing bucket until `patience` has elapsed."""
        clock = asyncio.get_running_loop().time
        deadline, failures = clock() + self._patience, 0
        while True:
            try:
                return await self._open()
            except WriterFencedError as error:
                await self._take_back(error)
                continue
            except StorageError as error:
                failures += 1
                pause = pause_after(failures, _REOPEN_FIRST * 4, _REOPEN_LAST)
                # Its subclasses describe faults that last longer.
                if type(error) is not StorageError or clock() + pause > deadline:
                    raise
                logger.warning("storage cannot be opened, trying again in %.2f s: %s", pause, error)
            await asyncio.sleep(pause)

    async def _open(self) -> MountedStore:
        engine = await self._opener()
        try:
            damage = await _check_format(engine)
            files = ChunkFiles(self._chunks, engine.epoch, self._file_limits)
            mount = await Mount.start(
                engine, self._settings, self.admission, self._now, files, damage, self._assemble
            )
            await self._claim.check()
        except BaseException:
            await _close(engine, _CLOSE_TIMEOUT, flush=False)
            raise
        if not isinstance(mount.observer, MountedStore):
            raise AssertionError("a mount has the observer that was made for it")
        return mount.observer

    def _assemble(self, mount: Mount) -> MountedStore:
        """Create the components that run on a mount and observe it."""
        engine, files = mount.engine, mount.files
        catalog = Catalog(mount, NamedLocks(), self._now)
        tokens = AccessTokens(mount, self._now)
        usage = UsageKeeper(mount, self.usage, self._now)
        leftover_snapshots, leftover_chunks = (
            Leftovers(kind, engine, mount.committer.write, self._settings.leftover_grace, self._now)
            for kind in ("snapshot", "chunk")
        )
        snapshots = StreamSnapshots(
            mount,
            catalog,
            self._snapshots,
            self._settings.trim_on_snapshot,
            self.space,
            leftover_snapshots,
        )
        interval = self._settings.upkeep_interval
        upkeep = Upkeep(
            mount,
            catalog,
            tokens,
            usage,
            snapshots,
            self.parts,
            leftover_chunks,
            self._now,
            interval,
        )
        reclaimer = Reclaimer(
            engine,
            mount.committer,
            mount.live,
            self._settings.reclaim_after,
            self._settings.reclaim_rate,
            by_basin=lambda: usage.held_bytes.by_basin,
            room=lambda: self.space.room,
            in_files=lambda: files.size,
            left_over=lambda: files.leftover_size,
            commits_max=self._file_limits.commits_max,
        )
        memory_release = MemoryRelease(mount.recent)
        return MountedStore(
            self, mount, catalog, tokens, usage, snapshots, upkeep, reclaimer, memory_release
        )

    def notify_listeners(self, basin: str, stream: str, first: int, end: int) -> None:
        for listener in self.listeners:
            listener(basin, stream, first, end)

    async def _drain(self) -> None:
        """Reject new calls, and wait until everything accepted has completed or failed."""
        mounted = self.current
        self._refuse(StoreClosingError())
        if mounted is not None:
            await mounted.mount.drain()
            if mounted.mount.damage.read_only is None:
                await mounted.upkeep.rest()

    def _refuse(self, error: StreamfoldError) -> None:
        self._refusal = error
        self._final = True
        self.current = None
        self._changed.set()


def _recovering(failure: StreamfoldError) -> StreamfoldError:
    """Return the error for calls made while storage is reopened after `failure`."""
    if isinstance(failure, StorageFullError):
        return failure
    return StoreRecoveringError(str(failure))


async def _watch_for_takeover(engine: Engine) -> NoReturn:
    """Raise WriterFencedError soon after a takeover by another process, even without writes."""
    while True:
        await asyncio.sleep(_TAKEOVER_CHECK_INTERVAL)
        try:
            await engine.check()
        except WriterFencedError:
            raise
        except StreamfoldError as error:
            # If storage is down, commits fail without this check, and reads need not stop.
            logger.warning("cannot check whether another process took over the store: %s", error)


async def _check_format(engine: Engine) -> KnownDamage:
    """Raise if this version cannot read the store. An unknown format makes the store read-only."""
    damage = KnownDamage()
    try:
        value = await engine.get(keys.FORMAT)
        version = 0 if value is None else rows.decode(value, FormatRow).version
    except DataCorruptError as error:
        effect = "the store takes no changes: its format is unknown"
        damage.read_only = damage.note_row(effect, error)
        return damage
    if version < FORMAT_VERSION:
        # From now on this version writes rows that older versions cannot read.
        await commit_rows(engine, [(keys.FORMAT, rows.encode(FormatRow(FORMAT_VERSION)))])
    if version > FORMAT_VERSION:
        raise FormatUnsupportedError(
            f"the store has format {version}, but this version reads up to {FORMAT_VERSION}: "
            "use the version that wrote it, or a newer one"
        )
    return damage


async def _close(engine: Engine, silence: float, *, flush: bool) -> None:
    """Close `engine`, or give up after `silence` seconds. All commits are already durable.

    The next engine fences this one anyway, and finds unflushed rows in the log.
    """
    try:
        async with asyncio.timeout(silence):
            await engine.close(flush=flush)
    except (StreamfoldError, TimeoutError) as error:
        logger.warning("storage did not close cleanly: %r", error)


def _cause(errors: BaseExceptionGroup[BaseException]) -> StreamfoldError:
    """Return the error that ended the mounted store. Re-raises `errors` if one of them is a bug."""
    leaves: list[BaseException] = []
    pending: list[BaseException] = [errors]
    while pending:
        error = pending.pop(0)
        if isinstance(error, BaseExceptionGroup):
            pending[:0] = error.exceptions
        else:
            leaves.append(error)
    bugs = [leaf for leaf in leaves if not isinstance(leaf, StreamfoldError | OSError)]
    if bugs:
        raise errors
    final = next((leaf for leaf in leaves if isinstance(leaf, FINAL)), None)
    first = final or leaves[0]
    return first if isinstance(first, StreamfoldError) else StorageError(str(first))
