"""SlateDB, which runs in the native module: calls of it from any event loop, and what they return.

A call starts on threads of the native module, and the event loop is woken once for all that have ended
since. A call that is cancelled is given up. The threads start with the first call of a process; in a
fork of that process there are none, and every call is refused.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from streamfold import _native
from streamfold._native import EngineError, Storage
from streamfold.store.engine.engine import Op

T = TypeVar("T")

#: What a call raises: a code, a message, and the system's error number or None. The codes: `fenced`,
#: `closed`, `unavailable` (storage failed), `device` (it cannot sync), `data` (damage), `invalid`,
#: `internal` and `panic`.
__all__ = ["EngineError"]

#: Results that were there at once after which other tasks get the event loop.
_RESULTS_AT_ONCE: Final = 16


def code_of(error: BaseException) -> str:
    """The code of an EngineError; empty for other errors."""
    return str(error.args[0]) if isinstance(error, EngineError) else ""


def message_of(error: BaseException) -> str:
    return str(error.args[1]) if isinstance(error, EngineError) else str(error)


def number_of(error: BaseException) -> int | None:
    """The system's error number, if there is one."""
    if isinstance(error, OSError):
        return error.errno
    number: int | None = error.args[2] if isinstance(error, EngineError) else None
    return number


class _LoopCalls:
    """The calls of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._native = _native.Calls()
        self._futures: dict[int, asyncio.Future[Any]] = {}
        self._results_at_once = 0
        loop.add_reader(self._native.fileno(), self._drain)

    async def call(
        self, start: Callable[..., tuple[int, Any]], *arguments: Any, **options: Any
    ) -> Any:
        number, value = start(self._native, *arguments, **options)
        if not number:
            self._results_at_once += 1
            if not self._results_at_once % _RESULTS_AT_ONCE:
                await asyncio.sleep(0)
            return value
        future = self._futures[number] = asyncio.get_running_loop().create_future()
        try:
            return await future
        finally:
            if self._futures.pop(number, None) is not None:
                self._native.cancel(number)

    def _drain(self) -> None:
        for number, value, error in self._native.drain():
            future = self._futures.pop(number, None)
            if future is None or future.done():
                continue  # it was cancelled
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)


_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopCalls] = WeakKeyDictionary()


async def call(start: Callable[..., tuple[int, Any]], *arguments: Any, **options: Any) -> Any:
    """What a call of the native module returns."""
    loop = asyncio.get_running_loop()
    calls = _loops.get(loop)
    if calls is None:
        calls = _loops[loop] = _LoopCalls(loop)
    return await calls.call(start, *arguments, **options)


class TableView(NamedTuple):
    """A table, as a manifest names it."""

    id: str
    #: The name of its file, without the suffix.
    table: str
    size: int
    first_key: bytes | None
    last_key: bytes | None
    index_offset: int
    index_length: int
    filter_offset: int
    filter_length: int

    @property
    def file(self) -> str:
        return f"{self.table}.sst"


class SortedRun(NamedTuple):
    """Tables with disjoint ranges of keys."""

    id: int
    size: int
    views: list[TableView]


class Checkpoint(NamedTuple):
    """What keeps a manifest and its tables."""

    id: str
    manifest_id: int
    #: Seconds since the Unix epoch; None = never.
    expires: int | None
    name: str | None


class SlateManifest(NamedTuple):
    """A state of the database."""

    id: int
    writer_epoch: int
    #: Of the last row in a table: its sequence number, and when it was written (ms).
    last_table_seq: int
    last_table_time: int
    #: The last log file whose rows are all in tables.
    replay_after: int
    last_merged_view: str | None
    #: Tables that were not merged with others yet, from the newest to the oldest.
    young: list[TableView]
    #: From the newest to the oldest.
    runs: list[SortedRun]
    checkpoints: list[Checkpoint]

    @property
    def views(self) -> list[TableView]:
        """All tables."""
        return [*self.young, *(view for run in self.runs for view in run.views)]

    @property
    def files(self) -> set[str]:
        """The names of the files of all tables."""
        return {view.file for view in self.views}


class Compaction(NamedTuple):
    """A merge of tables."""

    id: str
    ended: bool
    completed: bool
    #: The names of the tables that it has written, without the suffix.
    tables: list[str]


class LogRow(NamedTuple):
    """A row in a log file; a deleted one has no value."""

    key: bytes
    value: bytes | None
    #: When it was written, ms since the Unix epoch.
    time: int | None


class Admin:
    """Looks at a database, open or not, and changes what its manifest says of it."""

    def __init__(self, storage: Storage, path: str, clock: _native.Clock | None = None) -> None:
        self._native = _native.Admin(storage, path, clock)

    async def read_manifest(self, number: int | None = None) -> SlateManifest | None:
        """The manifest of that number, or the newest; None if there is none."""
        parts = await call(self._native.manifest, number)
        if parts is None:
            return None
        *numbers, young, runs, checkpoints = parts
        views = [TableView._make(view) for view in young]
        merged = [SortedRun(run, size, [*map(TableView._make, views)]) for run, size, views in runs]
        return SlateManifest._make((*numbers, views, merged, [*map(Checkpoint._make, checkpoints)]))

    async def create_checkpoint(self, name: str, lifetime: int | None = None) -> tuple[str, int]:
        """Pin the newest manifest, for `lifetime` ms or for good; its id and the manifest's number."""
        checkpoint: tuple[str, int] = await call(self._native.create_checkpoint, name, lifetime)
        return checkpoint

    async def refresh_checkpoint(self, checkpoint: str, lifetime: int) -> None:
        await call(self._native.refresh_checkpoint, checkpoint, lifetime)

    async def delete_checkpoint(self, checkpoint: str) -> None:
        await call(self._native.delete_checkpoint, checkpoint)

    async def read_compactions(self) -> list[Compaction]:
        """Merges that are under way or have ended lately."""
        return list(map(Compaction._make, await call(self._native.compactions)))

    async def read_compaction(self, compaction: str) -> Compaction | None:
        """None if it has ended, and others after it."""
        recent = await self.read_compactions()
        return next((each for each in recent if each.id == compaction), None)

    async def submit_compaction(
        self, young: Sequence[str], runs: Sequence[int], destination: int
    ) -> Compaction:
        """Ask the writer to merge views of young tables, and runs, into one run."""
        parts = await call(self._native.submit_compaction, list(young), list(runs), destination)
        return Compaction._make(parts)

    async def collect(self, options: Mapping[str, Any]) -> None:
        """Delete files that are not needed, as SlateDB's options say."""
        await call(self._native.collect, json.dumps(options))


class WalReader:
    """Reads log files of a database, open or not."""

    def __init__(self, storage: Storage, path: str) -> None:
        self._native = _native.LogReader(storage, path)

    async def files(self, after: int) -> list[int]:
        """The numbers of the files after that number, in order."""
        numbers: list[int] = await call(self._native.files, after)
        return numbers

    async def rows(self, number: int) -> list[LogRow]:
        return list(map(LogRow._make, await call(self._native.rows, number)))

    async def check(self, number: int) -> None:
        """Read a file to its end; raises if it is damaged."""
        await call(self._native.check, number)


class SlateDatabase:
    """An open database."""

    def __init__(self, native: _native.Database) -> None:
        self._native = native

    @classmethod
    async def open(
        cls,
        storage: Storage,
        path: str,
        settings: Mapping[str, Any],
        clock: _native.Clock,
        cache: int,
    ) -> SlateDatabase:
        """Open it as its writer; the former writer is fenced.

        `settings` are those that differ from SlateDB's own, `cache` bytes of blocks are kept in memory.
        """
        merged = json.dumps(_merged(json.loads(_native.Database.default_settings()), settings))
        return cls(await call(_native.Database.open, storage, path, merged, clock, cache))

    @classmethod
    async def open_reader(cls, storage: Storage, path: str, **options: Any) -> SlateDatabase:
        return cls(await call(_native.Database.open_reader, storage, path, **options))

    async def commit(self, rows: _native.Rows, *, tables: bool = False) -> int:
        """Write rows after all of earlier calls; return the last sequence number once it is durable.

        With `tables`, also write all rows in memory as a table.
        """
        sequence: int = await call(self._native.commit, rows, tables)
        return sequence

    async def get(self, key: bytes) -> bytes | None:
        """The durable value of `key`."""
        return (await self.get_many([key]))[0]

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The durable values of `keys`, in order, read at the same time."""
        values: list[bytes | None] = await call(self._native.get_many, keys)
        return values

    async def scan(
        self, start: bytes, end: bytes, *, descending: bool, read_ahead: int, fetches: int
    ) -> Scan:
        """Begin a scan of the durable rows with `start` <= key < `end`."""
        options = {"descending": descending, "read_ahead": read_ahead, "fetches": fetches}
        return Scan(await call(self._native.scan, start, end, **options))

    async def close(self, *, flush: bool) -> None:
        await call(self._native.close, flush)


def _merged(settings: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` with `changes` in their place, object by object."""
    for name, change in changes.items():
        nested = settings.get(name)
        if isinstance(change, Mapping) and isinstance(nested, dict):
            _merged(nested, change)
        else:
            settings[name] = change
    return settings


class Scan:
    """A scan that is under way."""

    def __init__(self, native: _native.Scan) -> None:
        self._native = native

    async def page(self, rows: int, size: int) -> tuple[list[tuple[bytes, bytes]], bool]:
        """The next rows, up to `rows`, and none after `size` bytes; whether more may follow."""
        page: tuple[list[tuple[bytes, bytes]], bool] = await call(self._native.next, rows, size)
        return page


def prepare_rows(ops: list[Op]) -> _native.Rows:
    """Rows for a commit: puts, and deletes of keys without a value. Copies all bytes."""
    return _native.Rows(ops)
