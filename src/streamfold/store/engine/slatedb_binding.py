"""Makes SlateDB's generated Python binding copy bytes in bulk, and changes nothing else in it.

The binding (uniffi, slatedb 0.17) copies every byte string into Rust one Python-level byte at a time:
6 MiB/s, with the event loop blocked, and 60 us for a small put. `write_batch` makes the
same C calls with one `memmove` each: 6 to 12 us for a small put, and a third of that once compiled
code makes the calls (`write_kernel`). `read_rows` reads a scan's result without building an object per
field; `slatedb_reads` calls it. `read_manifest` builds a large manifest in a thread: that takes 60 us
per table, and a store of 100 GiB has 1600 tables.

This module checks what it replaces. If the binding has changed, it warns, and the store uses the
binding's own, slower methods. It can be removed once the binding is regenerated with bulk copies
(upstream defect 5).
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import struct
import warnings
from collections.abc import Callable
from typing import Any, Final

from slatedb.uniffi._slatedb_uniffi import slatedb as binding

from streamfold.extras import needing_extra
from streamfold.store.engine.engine import Op, Row

_log = logging.getLogger(__name__)

#: What a call of the binding raises when SlateDB fails: its errors, and panics (upstream defect 22),
#: which are none of them.
FAILURES: Final = (binding.Error, binding.InternalError)

#: The version that this module was written for; others are checked by their shape.
_NEEDED = (
    "_UniffiRustBuffer",
    "_UniffiRustBufferBuilder",
    "_UniffiForeignBytes",
    "_UniffiRustCallStatus",
    "_uniffi_check_call_status",
    "_UniffiFfiConverterTypeError",
    "_UNIFFI_RUST_FUTURE_CONTINUATION_CALLBACK",
    "_UniffiFfiConverterTypeReadOptions",
    "_UniffiFfiConverterTypeScanOptions",
    "_UniffiFfiConverterSequenceTypeKeyValue",
    "_UniffiFfiConverterOptionalTypeVersionedManifest",
    "_UniffiFfiConverterOptionalUInt64",
)
_CALLS = (
    "ffi_slatedb_uniffi_rustbuffer_from_bytes",
    "uniffi_slatedb_uniffi_fn_clone_writebatch",
    "uniffi_slatedb_uniffi_fn_method_writebatch_put",
    "uniffi_slatedb_uniffi_fn_method_writebatch_delete",
    "ffi_slatedb_uniffi_rustbuffer_free",
    "uniffi_slatedb_uniffi_fn_clone_db",
    "uniffi_slatedb_uniffi_fn_clone_dbiterator",
    "uniffi_slatedb_uniffi_fn_method_db_get_with_options",
    "uniffi_slatedb_uniffi_fn_method_db_scan_with_options",
    "uniffi_slatedb_uniffi_fn_method_dbiterator_next_batch",
    *(
        f"ffi_slatedb_uniffi_rust_future_{step}_{kind}"
        for step in ("poll", "complete", "free")
        for kind in ("rust_buffer", "u64")
    ),
)
#: Bytes of a manifest from which it is built in a thread: about 2 ms.
_THREAD_FROM = 8 << 10

FRAME = struct.Struct(">i")


def _missing() -> list[str]:
    """Names that the fast paths need and that this version of the binding does not have."""
    lib = getattr(binding, "_UniffiLib", None)
    fields = getattr(getattr(binding, "_UniffiRustBuffer", None), "_fields_", ())
    lost = [name for name in _NEEDED if not hasattr(binding, name)]
    lost += [name for name in _CALLS if not hasattr(lib, name)]
    if [name for name, _ in fields] != ["capacity", "len", "data"]:
        lost.append("_UniffiRustBuffer(capacity, len, data)")
    return lost


MISSING = _missing()
if MISSING:
    warnings.warn(
        f"slatedb's binding has changed ({', '.join(MISSING)} not found): "
        "writes fall back to its own byte-by-byte copies and will be slow",
        RuntimeWarning,
        stacklevel=2,
    )


#: Bytes of a value from which a call releases the interpreter's lock; for less, releasing costs more.
_UNLOCK_FROM = 16 << 10
#: Rows from which compiled code fills a batch; for fewer, to prepare the call takes longer.
_COMPILED_FROM = 8


class View(ctypes.Structure):
    """The binding's ForeignBytes, with a pointer that takes a byte string without a copy."""

    _fields_ = (("len", ctypes.c_int32), ("data", ctypes.c_char_p))


def _library(load: Callable[[str], Any]) -> Any:
    """A second handle on SlateDB's library, whose calls take `View`."""
    library = load(binding._UniffiLib._name)
    for name in _CALLS:
        call = getattr(binding._UniffiLib, name)
        getattr(library, name).argtypes = call.argtypes
        getattr(library, name).restype = call.restype
    status = ctypes.POINTER(binding._UniffiRustCallStatus)
    library.ffi_slatedb_uniffi_rustbuffer_from_bytes.argtypes = (View, status)
    return library


#: Keeps the interpreter's lock: for calls of a microsecond.
LOCKED_CALLS: Any = None if MISSING else _library(ctypes.PyDLL)
#: Releases it: for calls that copy much.
UNLOCKED_CALLS: Any = None if MISSING else _library(ctypes.CDLL)


def _fill_fast(batch: Any, ops: list[Op]) -> None:
    large = any(value is not None and len(value) >= _UNLOCK_FROM for _, value in ops)
    if _fill_compiled is not None and not large and len(ops) >= _COMPILED_FROM:
        _fill_compiled(batch, ops)
        return
    lib = UNLOCKED_CALLS if large else LOCKED_CALLS
    clone = lib.uniffi_slatedb_uniffi_fn_clone_writebatch
    put = lib.uniffi_slatedb_uniffi_fn_method_writebatch_put
    delete = lib.uniffi_slatedb_uniffi_fn_method_writebatch_delete
    copy, frame = lib.ffi_slatedb_uniffi_rustbuffer_from_bytes, FRAME.pack
    status = binding._UniffiRustCallStatus.default()
    ref = ctypes.byref(status)
    view = View()  # one for all values: making one takes as long as the copy

    def rust_bytes(data: bytes) -> Any:
        """`data` as the length-prefixed buffer in which the binding passes byte strings to Rust."""
        framed = frame(len(data)) + data
        view.len, view.data = len(framed), framed
        return copy(view, ref)

    for key, value in ops:
        # Every call consumes one reference to the batch: hence the clone, as the binding does it.
        handle = clone(batch._handle, ref)
        if value is None:
            delete(handle, rust_bytes(key), ref)
        else:
            put(handle, rust_bytes(key), rust_bytes(value), ref)
        if status.code:
            binding._uniffi_check_call_status(binding._UniffiFfiConverterTypeError, status)


def _fill_plain(batch: Any, ops: list[Op]) -> None:
    for key, value in ops:
        if value is None:
            batch.delete(key)
        else:
            batch.put(key, value)


#: `write_kernel.fill`, once it is loaded.
_fill_compiled: Callable[[Any, list[Op]], None] | None = None


def warm_up_writes() -> bool:
    """Load the compiled code that fills batches of many small rows, and use it from now on.

    Takes a second when it must be compiled. False without numba, and on systems whose calls it does
    not know: then every row is written through ctypes.
    """
    global _fill_compiled
    if _fill_compiled is not None or MISSING:
        return _fill_compiled is not None
    try:
        with needing_extra("fast"):
            from streamfold.store.engine import write_kernel
        if not write_kernel.is_supported():
            return False
        write_kernel.fill(binding.WriteBatch(), [(b"key", b"value"), (b"key", None)])
    except Exception as error:  # whatever a broken compiler raises, ctypes still works
        _log.warning("rows are written one by one: %s", error)
        return False
    _fill_compiled = write_kernel.fill
    return True


def write_batch(ops: list[Op]) -> Any:
    """A SlateDB WriteBatch of `ops`: (key, value) puts, (key, None) deletes."""
    batch = binding.WriteBatch()
    (_fill_plain if MISSING else _fill_fast)(batch, ops)
    return batch


def read_rows(address: int, size: int) -> list[Row]:
    """Read `Vec<KeyValue>` from `size` bytes of Rust's memory as rows."""
    string_at = ctypes.string_at
    unpack = FRAME.unpack
    (count,) = unpack(string_at(address, 4))
    at, end = address + 4, address + size
    rows = []
    for _ in range(count):
        (length,) = unpack(string_at(at, 4))
        key = string_at(at + 4, length)
        at += 4 + length
        (length,) = unpack(string_at(at, 4))
        value = string_at(at + 4, length)
        # seq (8 bytes), create_ts (8), then expire_ts as an option: a flag and, if set, 8 bytes.
        at += 4 + length + 16
        at += 9 if string_at(at, 1) == b"\x01" else 1
        rows.append((key, value))
    if at != end:
        raise RuntimeError(f"slatedb's row layout has changed: {end - at} bytes left over")
    return rows


async def read_manifest(admin: Any, number: int | None = None) -> Any:
    """The manifest of that number, or the newest; None if there is none. Never holds the event loop."""
    if MISSING:
        return await admin.read_manifest(number)
    lib = binding._UniffiLib
    buffer = await binding._uniffi_rust_call_async(
        lib.uniffi_slatedb_uniffi_fn_method_admin_read_manifest(
            admin._uniffi_clone_handle(), binding._UniffiFfiConverterOptionalUInt64.lower(number)
        ),
        lib.ffi_slatedb_uniffi_rust_future_poll_rust_buffer,
        lib.ffi_slatedb_uniffi_rust_future_complete_rust_buffer,
        lib.ffi_slatedb_uniffi_rust_future_free_rust_buffer,
        lambda raw: raw,
        binding._UniffiFfiConverterTypeError,
    )
    lift = binding._UniffiFfiConverterOptionalTypeVersionedManifest.lift
    if buffer.len < _THREAD_FROM:
        return lift(buffer)
    return await asyncio.to_thread(lift, buffer)
