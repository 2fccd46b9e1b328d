"""Reads of SlateDB through its generated Python binding, at a tenth of the binding's own cost.

The binding copies keys and options one Python-level byte at a time and waits for the event loop even if
the answer is there: 120 us for a row in memory. The same C calls, with one `memmove` per argument and
without a wait for an answer that is there, take 15 us. `Call` starts a call; several that were started
together wait together.

If the binding has changed, the store uses the binding's own methods (`slatedb_binding.MISSING`).
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, Generic, TypeVar

from slatedb.uniffi._slatedb_uniffi import slatedb as binding

from streamfold.store.engine.engine import Row
from streamfold.store.engine.slatedb_binding import (
    FRAME,
    LOCKED_CALLS,
    MISSING,
    UNLOCKED_CALLS,
    View,
    read_rows,
)

T = TypeVar("T")

#: Calls that are started before other tasks get the event loop: about a millisecond.
_STARTED_AT_ONCE: Final = 32
#: Answers without a wait after which one waits, so that a task that reads much gives way to others.
_ANSWERS_AT_ONCE: Final = 16


class _Returns:
    """The C calls for results of one C type.

    A poll releases the interpreter's lock: it runs SlateDB's code, which may wait for a thread that
    calls back into Python.
    """

    def __init__(self, kind: str) -> None:
        prefix = "ffi_slatedb_uniffi_rust_future_"
        self.poll = getattr(UNLOCKED_CALLS, f"{prefix}poll_{kind}")
        self.free = getattr(UNLOCKED_CALLS, f"{prefix}free_{kind}")
        self.complete = getattr(UNLOCKED_CALLS, f"{prefix}complete_{kind}")


_BUFFER: Any = None if MISSING else _Returns("rust_buffer")
_HANDLE: Any = None if MISSING else _Returns("u64")

_numbers = itertools.count(1)
_answers = itertools.count(1)
#: Calls that SlateDB has not answered yet, by the number that it was given for them.
_waiting: dict[int, Call[Any]] = {}


def _on_answer(number: int, code: int) -> None:
    """SlateDB calls this in any thread, also before a poll returns."""
    if call := _waiting.pop(number, None):
        call.answer(code)


_ON_ANSWER: Any = None if MISSING else binding._UNIFFI_RUST_FUTURE_CONTINUATION_CALLBACK(_on_answer)
_READY: Final = 0
#: Runs the reads of large pages. There are seldom more of them at once (`OpenScans.room_for_eager`).
_page_reads = ThreadPoolExecutor(3, "page-reads")
#: Seconds after which a thread that waits for a page finds out that the reader has gone.
_GIVEN_UP_INTERVAL: Final = 0.5


class Call(Generic[T]):
    """A call of SlateDB that has been started; await `result` once, or `cancel` it."""

    __slots__ = ("_code", "_future", "_lift", "_returns", "_waiter")

    def __init__(self, future: int, returns: _Returns, lift: Callable[[Any], T]) -> None:
        self._future = future
        self._returns = returns
        self._lift = lift
        self._code: int | None = None
        #: Called in any thread when SlateDB has answered.
        self._waiter: Callable[[], object] | None = None
        self._poll()

    def _poll(self) -> None:
        number = next(_numbers)
        self._code = None
        self._waiter = None
        _waiting[number] = self
        self._returns.poll(self._future, _ON_ANSWER, number)

    def answer(self, code: int) -> None:
        # The other order than in `result`: one of the two sees what the other has set.
        self._code = code
        if (waiter := self._waiter) is not None:
            waiter()

    async def result(self) -> T:
        """The call's result; rarely suspends if SlateDB has answered."""
        try:
            if self._code == _READY and not next(_answers) % _ANSWERS_AT_ONCE:
                await asyncio.sleep(0)
            while self._code != _READY:
                if self._code is None:
                    loop = asyncio.get_running_loop()
                    ready = loop.create_future()
                    self._waiter = partial(loop.call_soon_threadsafe, _wake, ready)
                    if self._code is None:
                        await ready
                if self._code != _READY:
                    self._poll()
            return self._complete()
        finally:
            self.cancel()

    def wait(self, given_up: threading.Event) -> T:
        """The call's result, in a thread that may wait for it; TimeoutError once it is given up."""
        try:
            while self._code != _READY:
                answered = threading.Event()
                self._waiter = answered.set
                while self._code is None and not answered.wait(_GIVEN_UP_INTERVAL):
                    if given_up.is_set():
                        raise TimeoutError
                if self._code != _READY:
                    self._poll()
            return self._complete()
        finally:
            self.cancel()

    def _complete(self) -> T:
        status = binding._UniffiRustCallStatus.default()
        found = self._returns.complete(self._future, ctypes.byref(status))
        if status.code:
            binding._uniffi_check_call_status(binding._UniffiFfiConverterTypeError, status)
        return self._lift(found)

    def cancel(self) -> None:
        """Free the call, whether or not it was answered; safe to call again."""
        if self._future:
            future, self._future = self._future, 0
            self._returns.free(future)


def _wake(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def lowered(converter: Any, value: Any) -> bytes:
    """`value` in the bytes in which the binding passes it to Rust."""
    buffer = converter.lower(value)
    try:
        return ctypes.string_at(buffer.data, buffer.len)
    finally:
        buffer.free()


def _rust_buffer(data: bytes, status: Any) -> Any:
    view = View()
    view.len, view.data = len(data), data
    return LOCKED_CALLS.ffi_slatedb_uniffi_rustbuffer_from_bytes(view, status)


def _lift_value(buffer: Any) -> bytes | None:
    """Read `Option<Vec<u8>>` from a Rust buffer, and free the buffer."""
    size = buffer.len
    data = ctypes.string_at(buffer.data, size)
    _free_buffer(buffer)
    if data == b"\x00":
        return None
    if data[:1] != b"\x01" or FRAME.unpack_from(data, 1)[0] != size - 5:
        raise RuntimeError(f"slatedb's optional byte strings have changed: {data[:5]!r}")
    return data[5:]


def _lift_rows(buffer: Any) -> list[Row]:
    """Read `Vec<KeyValue>` from a Rust buffer as rows, and free the buffer."""
    try:
        return read_rows(ctypes.cast(buffer.data, ctypes.c_void_p).value or 0, buffer.len)
    finally:
        _free_buffer(buffer)


def _free_buffer(buffer: Any) -> None:
    status = binding._UniffiRustCallStatus.default()
    LOCKED_CALLS.ffi_slatedb_uniffi_rustbuffer_free(buffer, ctypes.byref(status))


def _start_get(db: Any, key: bytes, options: bytes) -> Call[bytes | None]:
    status = ctypes.byref(binding._UniffiRustCallStatus.default())
    lib = LOCKED_CALLS
    future = lib.uniffi_slatedb_uniffi_fn_method_db_get_with_options(
        lib.uniffi_slatedb_uniffi_fn_clone_db(db._handle, status),
        _rust_buffer(FRAME.pack(len(key)) + key, status),
        _rust_buffer(options, status),
    )
    return Call(future, _BUFFER, _lift_value)


class Reads:
    """Point reads and scans of one database."""

    def __init__(self, db: Any, read_options: Any) -> None:
        self._db = db
        self._read_options = read_options
        self._lowered: bytes = b""
        if not MISSING:
            self._lowered = lowered(binding._UniffiFfiConverterTypeReadOptions, read_options)

    async def get(self, key: bytes) -> bytes | None:
        if MISSING:
            value: bytes | None = await self._db.get_with_options(key, self._read_options)
            return value
        return await _start_get(self._db, key, self._lowered).result()

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of `keys`, in order; the reads run at the same time."""
        if MISSING:
            return [await self.get(key) for key in keys]
        values: list[bytes | None] = []
        for first in range(0, len(keys), _STARTED_AT_ONCE):
            if first:
                await asyncio.sleep(0)
            calls: list[Call[bytes | None]] = []
            try:
                calls += [
                    _start_get(self._db, key, self._lowered)
                    for key in keys[first : first + _STARTED_AT_ONCE]
                ]
                values += [await call.result() for call in calls]
            finally:
                for call in calls:
                    call.cancel()
        return values

    async def scan(self, start: bytes, end: bytes, options: ScanOptions) -> Any:
        """SlateDB's iterator over the rows with `start` <= key < `end`."""
        if MISSING:
            span = binding.KeyRange(start=start, start_inclusive=True, end=end, end_inclusive=False)
            return await self._db.scan_with_options(span, options.value)
        status = ctypes.byref(binding._UniffiRustCallStatus.default())
        lib, frame = LOCKED_CALLS, FRAME.pack
        span = b"".join(
            (b"\x01", frame(len(start)), start, b"\x01\x01", frame(len(end)), end, b"\x00")
        )
        future = lib.uniffi_slatedb_uniffi_fn_method_db_scan_with_options(
            lib.uniffi_slatedb_uniffi_fn_clone_db(self._db._handle, status),
            _rust_buffer(span, status),
            _rust_buffer(options.lowered, status),
        )
        lift = binding.DbIterator._uniffi_make_instance
        return await Call(future, _HANDLE, lift).result()


class ScanOptions:
    """SlateDB's options of a scan, and the bytes in which they are passed."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.lowered: bytes = b""
        if not MISSING:
            self.lowered = lowered(binding._UniffiFfiConverterTypeScanOptions, value)


def _start_next(iterator: Any, most: int) -> Call[list[Row]]:
    status = ctypes.byref(binding._UniffiRustCallStatus.default())
    lib = LOCKED_CALLS
    future = lib.uniffi_slatedb_uniffi_fn_method_dbiterator_next_batch(
        lib.uniffi_slatedb_uniffi_fn_clone_dbiterator(iterator._handle, status), most
    )
    return Call(future, _BUFFER, _lift_rows)


async def next_rows(iterator: Any, most: int) -> list[Row]:
    """Up to `most` further rows of a SlateDB iterator; fewer means that it has ended."""
    if MISSING:
        return [(row.key, row.value) for row in await iterator.next_batch(most)]
    call = _start_next(iterator, most)
    try:
        await asyncio.sleep(0)  # a page may have 1 MiB: other tasks run before the next
        return await call.result()
    finally:
        call.cancel()


async def next_large_page(iterator: Any, most: int) -> list[Row]:
    """The same in a thread, while the event loop sends the page before.

    SlateDB writes its answer byte by byte in the thread that asks for it: 1.4 ms for a MiB.
    """
    if MISSING:
        return await next_rows(iterator, most)
    given_up = threading.Event()

    def read() -> list[Row]:
        return _start_next(iterator, most).wait(given_up)

    try:
        return await asyncio.get_running_loop().run_in_executor(_page_reads, read)
    finally:
        given_up.set()
