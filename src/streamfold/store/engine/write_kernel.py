"""Fills write batches of SlateDB by compiled code; importing this module needs numba.

`slatedb_binding` makes four calls through ctypes for every row, which takes 6 us. A compiled loop makes
the same calls in 1.5 us. It calls Rust as C code for x86-64 does by the System V ABI: structures of
more than 16 bytes are passed on the stack, and returned where the first argument points to. On other
systems `slatedb_binding` fills all batches.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from slatedb.uniffi._slatedb_uniffi import slatedb as binding

from streamfold.store.engine.engine import Op
from streamfold.store.engine.slatedb_binding import FRAME

Numbers: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.int8]

#: Bytes of a RustBuffer, of a ForeignBytes, and of the words that they are made of.
_BUFFER, _VIEW, _WORD = 24, 16, 8
_NUMBER = ir.IntType(64)
_CALLS = (
    "uniffi_slatedb_uniffi_fn_clone_writebatch",
    "ffi_slatedb_uniffi_rustbuffer_from_bytes",
    "uniffi_slatedb_uniffi_fn_method_writebatch_put",
    "uniffi_slatedb_uniffi_fn_method_writebatch_delete",
)


def is_supported() -> bool:
    """Whether calls and structures are here as the kernel makes them."""
    system = sys.platform in ("linux", "darwin") and platform.machine() == "x86_64"
    sizes = ctypes.sizeof(binding._UniffiRustBuffer), ctypes.sizeof(binding._UniffiForeignBytes)
    return system and sizes == (_BUFFER, _VIEW) and binding._UniffiRustCallStatus.code.offset == 0


def _caller(count: int) -> Callable[[int, tuple[int, ...]], int]:
    """A function for kernels that calls what is at an address with `count` numbers."""

    def call(typing_context: Any, address: Any, numbers: Any) -> Any:
        signature = types.int64(types.int64, types.UniTuple(types.int64, count))

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            function = ir.FunctionType(_NUMBER, [_NUMBER] * count).as_pointer()
            arguments = [builder.extract_value(values[1], at) for at in range(count)]
            return builder.call(builder.inttoptr(values[0], function), arguments)

        return signature, generate

    compiled: Callable[[int, tuple[int, ...]], int] = intrinsic(call)
    return compiled


#: `clone(batch, status)`.
_call_clone = _caller(2)
#: `from_bytes(result, length, data, status)`: a view of 16 bytes fills two registers.
_call_copy = _caller(4)
#: `delete(batch, status)` and `put(batch, status)` with four unused registers, and then the stack: one
#: RustBuffer of three words, or two.
_call_delete = _caller(6 + 3)
_call_put = _caller(6 + 6)


def _fill(
    calls: Numbers,
    batch: int,
    status: int,
    flags: Flags,
    data: int,
    ends: Numbers,
    buffers: Numbers,
    result: int,
) -> bool:
    """Put or delete each row of `data`; False as soon as a call fails.

    `ends` has where each key and each value ends, a value that ends with its key is a deletion.
    `buffers` has two RustBuffers, at the address `result`; `flags` is the memory at `status`.
    """
    start = 0
    for at in range(0, len(ends), 2):
        middle, end = ends[at], ends[at + 1]
        # Every call consumes one reference to the batch: hence the clone, as the binding does it.
        handle = _call_clone(calls[0], (batch, status))
        _call_copy(calls[1], (result, middle - start, data + start, status))
        if end == middle:
            key = (buffers[0], buffers[1], buffers[2])
            _call_delete(calls[3], (handle, status, 0, 0, 0, 0, *key))
        else:
            _call_copy(calls[1], (result + _BUFFER, end - middle, data + middle, status))
            row = (buffers[0], buffers[1], buffers[2], buffers[3], buffers[4], buffers[5])
            _call_put(calls[2], (handle, status, 0, 0, 0, 0, *row))
        if flags[0] != 0:
            return False
        start = end
    return True


def _compile(function: Callable[..., bool]) -> Callable[..., bool]:
    """Compile at the first call; without a folder for the cache, at the first in each process."""
    compiled: Callable[..., bool]
    try:
        compiled = numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:
        compiled = numba.njit(nogil=True)(function)
    return compiled


_fill_compiled = _compile(_fill)
_ADDRESSES = np.array(
    [ctypes.cast(getattr(binding._UniffiLib, name), ctypes.c_void_p).value for name in _CALLS],
    np.int64,
)


def fill(batch: Any, ops: Sequence[Op]) -> None:
    """Put and delete rows in a WriteBatch; raises what SlateDB refuses."""
    frame = FRAME.pack
    parts: list[bytes] = []
    sizes: list[int] = []
    for key, value in ops:
        if value is None:
            parts += (frame(len(key)), key)
            sizes += (len(key) + FRAME.size, 0)
        else:
            parts += (frame(len(key)), key, frame(len(value)), value)
            sizes += (len(key) + FRAME.size, len(value) + FRAME.size)
    data = b"".join(parts)
    status = binding._UniffiRustCallStatus.default()
    buffers = np.zeros(2 * _BUFFER // _WORD, np.int64)
    done = _fill_compiled(
        _ADDRESSES,
        batch._handle,
        ctypes.addressof(status),
        np.frombuffer(status, np.int8),
        ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value,
        np.cumsum(np.array(sizes, np.int64)),
        buffers,
        buffers.ctypes.data,
    )
    if not done:
        binding._uniffi_check_call_status(binding._UniffiFfiConverterTypeError, status)
