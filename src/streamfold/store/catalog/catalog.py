"""Basins and streams: which exist, and their configuration.

Every result depends on durable rows only: a change holds the name's lock until its commit is
durable, even if its caller is cancelled.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from streamfold.errors import (
    AlreadyExistsError,
    BasinDeletingError,
    BasinNotFoundError,
    StreamDeletingError,
    StreamNotFoundError,
)
from streamfold.model.configs import (
    BasinConfig,
    BasinReconfiguration,
    StreamConfig,
    StreamConfigLayer,
    StreamReconfiguration,
    reconfigure_basin,
    reconfigure_stream,
    resolve,
)
from streamfold.model.names import BasinName, StreamName, StreamRef
from streamfold.model.resources import BasinInfo, Provision, StreamInfo
from streamfold.store import keys, rows
from streamfold.store.engine.engine import Op, first_row
from streamfold.store.log.log_leases import LogLease
from streamfold.store.log.shares import Share
from streamfold.store.log.stream_log import StreamLog
from streamfold.store.mount import FirstAppend, Mount
from streamfold.store.rows import BasinRow, CleanupRow, StreamRow

P = ParamSpec("P")
R = TypeVar("R")


class _NamedLock(asyncio.Lock):
    """A lock that counts its holders and waiters."""

    users = 0


class NamedLocks:
    """One lock per name, kept only while held or awaited."""

    def __init__(self) -> None:
        self._locks: dict[tuple[str, ...], _NamedLock] = {}

    def hold(self, *name: str) -> _Hold:
        """Return a context manager that holds the lock of `name` exclusively."""
        return _Hold(self._locks, name)


class _Hold:
    """One use of a lock.

    A class, because a generator-based context manager takes three times as long.
    """

    __slots__ = ("_locks", "_name")

    def __init__(self, locks: dict[tuple[str, ...], _NamedLock], name: tuple[str, ...]) -> None:
        self._locks = locks
        self._name = name

    async def __aenter__(self) -> None:
        lock = self._locks.get(self._name)
        if lock is None:
            lock = self._locks[self._name] = _NamedLock()
        lock.users += 1
        try:
            await lock.acquire()
        except BaseException:
            self._leave(lock)
            raise

    async def __aexit__(self, *_: object) -> None:
        lock = self._locks[self._name]
        lock.release()
        self._leave(lock)

    def _leave(self, lock: _NamedLock) -> None:
        lock.users -= 1
        if not lock.users:
            del self._locks[self._name]


Change = Callable[Concatenate["Catalog", P], Coroutine[Any, Any, R]]


def _finished(change: Change[P, R]) -> Change[P, R]:
    """Finish `change` even if its caller is cancelled.

    If it released the lock before its commit is durable, the next change would read rows that are
    about to change, and could replace a stream that already has records.
    """

    @functools.wraps(change)
    async def finish(self: Catalog, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self.finish(change(self, *args, **kwargs))

    return finish


@dataclass(frozen=True, slots=True)
class Catalog:
    """The basins and streams of one mount."""

    mount: Mount
    locks: NamedLocks
    now: Callable[[], int]
    under_way: set[asyncio.Task[Any]] = field(default_factory=set)

    async def finish(self, change: Coroutine[Any, Any, R]) -> R:
        """Finish `change` even if its caller is cancelled."""
        task = asyncio.create_task(change)
        self.under_way.add(task)
        task.add_done_callback(self._leave)
        return await asyncio.shield(task)

    def _leave(self, task: asyncio.Task[Any]) -> None:
        self.under_way.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved: the caller may have gone

    @_finished
    async def create_basin(
        self, name: BasinName, config: BasinConfig, token: str | None, location: str
    ) -> tuple[BasinInfo, Provision]:
        creation = _creation_hash(token, config)
        async with self.locks.hold(name):
            row = await self.mount.basin(name)
            if row is None:
                row = BasinRow(self.now(), config, creation, location=location)
                await self.mount.put_basin(name, row)
                return basin_info(name, row), Provision.CREATED
            _check_basin_active(name, row)
            if creation is None or creation != row.creation:
                raise AlreadyExistsError("basin", name)
            return basin_info(name, row), Provision.NOOP

    @_finished
    async def open_basin(self, name: BasinName, config: BasinConfig) -> None:
        """Create the basin unless another call has just created it."""
        async with self.locks.hold(name):
            if await self.mount.basin(name) is None:
                row = BasinRow(created_at=self.now(), config=config)
                await self.mount.put_basin(name, row)

    @_finished
    async def ensure_basin(
        self, name: BasinName, config: BasinConfig, location: str
    ) -> tuple[BasinInfo, Provision]:
        """Create the basin, or replace its configuration. Its location does not change."""
        async with self.locks.hold(name):
            row = await self.mount.basin(name)
            if row is None:
                row = BasinRow(self.now(), config, location=location)
                result = Provision.CREATED
            else:
                _check_basin_active(name, row)
                if row.config == config:
                    return basin_info(name, row), Provision.NOOP
                row, result = msgspec.structs.replace(row, config=config), Provision.UPDATED
            await self.mount.put_basin(name, row)
            return basin_info(name, row), result

    @_finished
    async def reconfigure_basin(self, name: BasinName, change: BasinReconfiguration) -> BasinConfig:
        async with self.locks.hold(name):
            row = await self._basin_row(name)
            _check_basin_active(name, row)
            row = msgspec.structs.replace(row, config=reconfigure_basin(row.config, change))
            await self.mount.put_basin(name, row)
            return row.config

    async def basin_config(self, name: BasinName) -> BasinConfig:
        return (await self._basin_row(name)).config

    @_finished
    async def delete_basin(self, name: BasinName) -> None:
        """Mark the basin as deleted. Upkeep removes its streams, then the basin."""
        async with self.locks.hold(name):
            row = await self._basin_row(name)
            if row.deleted_at is None:
                row = msgspec.structs.replace(row, deleted_at=self.now())
                await self.mount.put_basin(name, row)

    @_finished
    async def create_stream(
        self, ref: StreamRef, config: StreamConfigLayer, token: str | None
    ) -> tuple[StreamInfo, Provision]:
        creation = _creation_hash(token, config)
        async with self.locks.hold(*ref):
            row = await self._row_in_use(ref)
            if row is None:
                row = await self._insert_stream(ref, config, creation)
                return stream_info(ref.stream, row), Provision.CREATED
            if creation is None or creation != row.creation:
                raise AlreadyExistsError("stream", ref.stream)
            return stream_info(ref.stream, row), Provision.NOOP

    @_finished
    async def ensure_stream(
        self, ref: StreamRef, config: StreamConfigLayer
    ) -> tuple[StreamInfo, Provision]:
        """Create the stream, or replace its configuration, resolved over the basin's defaults."""
        async with self.locks.hold(*ref):
            row = await self._row_in_use(ref)
            if row is None:
                row = await self._insert_stream(ref, config, None)
                return stream_info(ref.stream, row), Provision.CREATED
            defaults = (await self._basin_row(ref.basin)).config.default_stream_config
            resolved = resolve(config, defaults)
            if resolved == row.config:
                return stream_info(ref.stream, row), Provision.NOOP
            await self.replace_stream(ref, msgspec.structs.replace(row, config=resolved))
            return stream_info(ref.stream, row), Provision.UPDATED

    async def _open_stream(
        self, ref: StreamRef, config: StreamConfigLayer, first: FirstAppend
    ) -> LogLease:
        """Lease the log. Creates a missing stream together with what `first` appends."""
        async with self.locks.hold(*ref):
            if not self.mount.is_missing(ref):
                with suppress(StreamNotFoundError):
                    lease = await self.mount.lease(ref)
                    if lease.log.row.deleted_at is None:
                        return lease
                    lease.release()
                    await self._row_in_use(ref)  # raises if forks need the deleted stream
            # Not inside the handler, whose error would stay in memory until the commit is durable.
            row = await self._new_row(ref, config, None)
            return await self._create(ref, row, first)

    async def _finish_lease(self, change: Coroutine[Any, Any, LogLease]) -> LogLease:
        """Like `finish`, but release the resulting lease if the caller is cancelled.

        Takes fewer steps than `asyncio.shield`, because many streams may be created at once.
        """
        task = asyncio.create_task(change)
        self.under_way.add(task)
        waiter: asyncio.Future[LogLease] = asyncio.get_running_loop().create_future()
        task.add_done_callback(functools.partial(self._pass_on, waiter))
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                waiter.result().release()  # granted just as the caller was cancelled
            raise
        finally:
            del waiter  # its error refers to this call

    def _pass_on(self, waiter: asyncio.Future[LogLease], task: asyncio.Task[LogLease]) -> None:
        self.under_way.discard(task)
        if task.cancelled():
            waiter.cancel()
        elif (error := task.exception()) is not None:
            if not waiter.done():
                waiter.set_exception(error)
        elif waiter.done():
            task.result().release()  # the caller has gone
        else:
            waiter.set_result(task.result())

    async def lease(
        self,
        ref: StreamRef,
        create_with: StreamConfigLayer | None = None,
        *,
        on_append: bool = False,
    ) -> LogLease:
        """Lease the stream's log. Raises BasinNotFoundError or StreamNotFoundError if missing.

        With `create_with`, a missing or deleted stream is created if its basin is configured to.
        """
        if create_with is not None and await self._is_to_create(ref, on_append=on_append):
            opening = self._open_stream(ref, create_with, lambda log: None)
            return await self._finish_lease(opening)
        return await self._lease_existing(ref)

    async def lease_to_append(
        self, ref: StreamRef, create_with: StreamConfigLayer | None, first: FirstAppend
    ) -> LogLease:
        """Like `lease`, but a stream that this creates is in one commit with what `first` appends.

        The caller must not be cancelled: that would release the name's lock too early.
        """
        if create_with is not None and await self._is_to_create(ref, on_append=True):
            return await self._open_stream(ref, create_with, first)
        return await self._lease_existing(ref)

    async def _is_to_create(self, ref: StreamRef, *, on_append: bool) -> bool:
        """Return whether the stream is missing or deleted and its basin is configured to create it."""
        log = self.mount.log_in_memory(ref)
        if log is not None and not log.deleting:
            return False
        basin = await self.mount.basin(ref.basin)
        if basin is None or not _may_create(basin.config, on_append=on_append):
            return False
        if not self.mount.is_missing(ref):
            with suppress(StreamNotFoundError), await self.mount.lease(ref) as log:
                # Nearly all streams exist, and need no task or lock.
                return log.deleting
        return True

    async def _lease_existing(self, ref: StreamRef) -> LogLease:
        try:
            return await self.mount.lease(ref)
        except StreamNotFoundError:
            if await self.mount.basin(ref.basin) is None:
                raise BasinNotFoundError(ref.basin) from None
            raise

    async def stream_config(self, ref: StreamRef) -> StreamConfig:
        return (await self._active_stream(ref)).config

    @_finished
    async def reconfigure_stream(
        self, ref: StreamRef, change: StreamReconfiguration
    ) -> StreamConfig:
        async with self.locks.hold(*ref):
            defaults = (await self._basin_row(ref.basin)).config.default_stream_config
            row = await self._active_stream(ref)
            config = reconfigure_stream(row.config, change, defaults)
            await self.replace_stream(ref, msgspec.structs.replace(row, config=config))
            return config

    @_finished
    async def delete_stream(
        self, ref: StreamRef, *, when: Callable[[StreamLog], bool] = lambda log: True
    ) -> bool:
        """Mark the stream as deleted, and stop it now.

        Upkeep removes its records, then frees the name.

        `when` is checked in the same step, because by then the name may belong to another stream,
        or the stream may have records. Returns whether this call deleted the stream.
        """
        async with self.locks.hold(*ref):
            with await self.mount.lease(ref) as log:
                if log.row.deleted_at is not None or not when(log):
                    return False
                self.mount.committer.check_open()
                row = msgspec.structs.replace(log.row, deleted_at=self.now())
                log.deleting = True  # from here on the log rejects appends
                await log.settled()  # acknowledge everything accepted before
                purge = CleanupRow(*ref, purge=True, ancestors=row.ancestors)
                await self.mount.put_stream(ref, row, (keys.cleanup(row.id), rows.encode(purge)))
                log.dismiss(StreamDeletingError(*ref))
                return True

    async def deletion(self, ref: StreamRef) -> None:
        """Wait until a deletion of the stream or its basin, if one is running, is durable.

        Raises if the deletion failed, as `deletion_of_basin` does.
        """
        await self.deletion_of_basin(ref.basin)
        async with self.locks.hold(*ref):
            self.mount.committer.check_running()

    async def deletion_of_basin(self, name: str) -> None:
        """Wait until a running deletion of the basin is durable: a rejection may depend on it.

        If the deletion failed, raises the error of a recovering store: the basin may still exist.
        """
        async with self.locks.hold(name):
            self.mount.committer.check_running()

    async def _row_in_use(self, ref: StreamRef) -> StreamRow | None:
        """Return the row of the stream with this name, or None if the name is free.

        The name of a deleted stream is free at once, unless forks still need the stream.
        """
        row = await self.mount.stream(ref)
        if row is None or row.deleted_at is None:
            return row
        if await first_row(self.mount.engine, *keys.forks_span(row.id)) is not None:
            raise StreamDeletingError(*ref)
        return None

    async def _insert_stream(
        self, ref: StreamRef, config: StreamConfigLayer, creation: bytes | None
    ) -> StreamRow:
        row = await self._new_row(ref, config, creation)
        (await self._create(ref, row)).release()
        return row

    async def _new_row(
        self, ref: StreamRef, config: StreamConfigLayer, creation: bytes | None
    ) -> StreamRow:
        parent = await self._basin_row(ref.basin)
        _check_basin_active(ref.basin, parent)
        return StreamRow(
            id=self.mount.new_stream_id(),
            created_at=self.now(),
            config=resolve(config, parent.config.default_stream_config),
            cipher=parent.config.stream_cipher,
            creation=creation,
        )

    async def _create(
        self, ref: StreamRef, row: StreamRow, first: FirstAppend = lambda log: None
    ) -> LogLease:
        try:
            return await self.mount.create_stream(ref, row, first=first)
        except BasinDeletingError:
            await self.deletion_of_basin(ref.basin)
            raise

    async def insert(
        self, ref: StreamRef, row: StreamRow, *ops: Op, content: Share | None = None
    ) -> None:
        """Commit a stream with a new id, its initial content and `ops`.

        The caller holds its lock.
        """
        try:
            self.mount.check_basin(ref.basin)
        except BasinDeletingError:
            await self.deletion_of_basin(ref.basin)
            raise
        ids = self.mount.id_rows(row.id)
        await self.mount.put_stream(ref, row, *ids, *ops, content=content)

    async def replace_stream(self, ref: StreamRef, row: StreamRow) -> None:
        """Commit a changed row. The caller holds the stream's lock."""
        await self.mount.put_stream(ref, row)

    async def _basin_row(self, name: str) -> BasinRow:
        row = await self.mount.basin(name)
        if row is None:
            raise BasinNotFoundError(name)
        return row

    async def _active_stream(self, ref: StreamRef) -> StreamRow:
        row = await self.mount.stream(ref)
        if row is None:
            await self._basin_row(ref.basin)  # raises if the basin is missing
            raise StreamNotFoundError(*ref)
        _check_stream_active(ref, row)
        return row


def basin_info(name: str, row: BasinRow) -> BasinInfo:
    return BasinInfo(BasinName(name), row.created_at, row.deleted_at, row.location)


def stream_info(name: str, row: StreamRow) -> StreamInfo:
    return StreamInfo(StreamName(name), row.created_at, row.deleted_at, row.cipher)


def _check_basin_active(name: str, row: BasinRow) -> None:
    if row.deleted_at is not None:
        raise BasinDeletingError(name)


def _check_stream_active(ref: StreamRef, row: StreamRow) -> None:
    if row.deleted_at is not None:
        raise StreamDeletingError(*ref)


def _may_create(config: BasinConfig, *, on_append: bool) -> bool:
    return config.create_stream_on_append if on_append else config.create_stream_on_read


def _mentioned(config: BasinConfig | StreamConfigLayer) -> dict[str, object]:
    """Return the members of a request.

    Members newer than stored hashes are included only if set.
    """
    members: dict[str, object] = msgspec.to_builtins(config)
    for layer in (members, members.get("default_stream_config")):
        if isinstance(layer, dict) and layer.get("trim_on_snapshot", ...) is None:
            del layer["trim_on_snapshot"]
    return members


def _creation_hash(token: str | None, config: BasinConfig | StreamConfigLayer) -> bytes | None:
    """Hash the token and requested configuration, which a repeated creation must match."""
    if token is None:
        return None
    request = token.encode() + b"\x00" + msgspec.msgpack.encode(_mentioned(config))
    return hashlib.blake2b(request, digest_size=16).digest()
