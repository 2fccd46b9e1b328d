"""Kernels that take messages and lines of COPY from libpq, many at once.

Importing this module needs numba.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import llvmlite.binding
import numpy as np
from numba import types

from streamfold.ingest.postgres.encoding.row_kernel import PADDING
from streamfold.ingest.postgres.libpq import LIBRARY, CopyConnection
from streamfold.records.compiling import kernel
from streamfold.records.record_kernel import Bytes, Offsets

#: Messages, and their bytes, that are taken at once.
MESSAGES: Final = 8192
BYTES: Final = 1 << 20
#: Microseconds that PostgreSQL gets to fill the socket before `fill` waits for more.
PAUSE: Final = 200
#: How `pull` ends: everything was taken; `ends` is full; the message that is held is too long for the
#: room that is left; the connection or COPY has ended.
DRAINED, FULL, TOO_LONG, ENDED = range(4)
#: Entries of `held`: the address of a message, and its length.
ADDRESS, LENGTH, HELD_FIELDS = range(3)


def _external(name: str, signature: Any) -> Any:
    """Return a function for kernels. It is linked by name: an address would not be the same again."""
    linked = f"streamfold_{name}"
    address = ctypes.cast(getattr(LIBRARY, name), ctypes.c_void_p).value
    llvmlite.binding.add_symbol(linked, address)
    return types.ExternalFunction(linked, signature)


_get = _external("PQgetCopyData", types.int32(types.intp, types.intp, types.int32))
_consume = _external("PQconsumeInput", types.int32(types.intp))
_free = _external("PQfreemem", types.void(types.intp))
_usleep = types.ExternalFunction("usleep", types.int32(types.intp))
_memcpy = types.ExternalFunction("memcpy", types.intp(types.intp, types.intp, types.intp))


@kernel
def pull(connection: int, out: Bytes, ends: Offsets, count: int, held: Offsets) -> tuple[int, int]:
    """Copy messages that have been received to `out`, after `count` that it has.

    Returns how many it has then, and how it ended.
    """
    at, consumed = ends[count - 1] if count else np.int64(0), False
    while count < len(ends):
        length = np.int64(_get(connection, held.ctypes.data, 1))
        if length < 0:
            return count, ENDED
        if length == 0:
            if consumed:
                return count, DRAINED
            if _consume(connection) == 0:
                return count, ENDED
            consumed = True
            continue
        consumed = False
        if at + length > len(out):
            held[LENGTH] = length
            return count, TOO_LONG
        _memcpy(out.ctypes.data + at, held[ADDRESS], length)
        _free(held[ADDRESS])
        at += length
        ends[count] = at
        count += 1
    return count, FULL


@kernel
def fill(connection: int, out: Bytes, held: Offsets) -> tuple[int, int]:
    """Copy lines of COPY to `out`, and wait for them; returns their size, and how it ended.

    A wait begins with a pause: PostgreSQL sends 8 KiB at once, and to wake up for each of them costs
    as much as to read it.
    """
    at, consumed = np.int64(0), False
    while True:
        length = np.int64(_get(connection, held.ctypes.data, 1))
        if length == 0 and not consumed:
            if _consume(connection) == 0:
                return int(at), ENDED
            consumed = True
            continue
        if length == 0:
            _usleep(PAUSE)
            length = np.int64(_get(connection, held.ctypes.data, 0))
        consumed = False
        if length < 0:
            return int(at), ENDED
        if at + length > len(out):
            held[LENGTH] = length
            return int(at), TOO_LONG
        _memcpy(out.ctypes.data + at, held[ADDRESS], length)
        _free(held[ADDRESS])
        at += length


class LineFiller:
    """Takes lines of COPY, many at once."""

    def __init__(self) -> None:
        self._room = np.empty(BYTES, np.uint8)
        self._held = np.zeros(HELD_FIELDS, np.int64)

    def pull_lines(self, connection: CopyConnection) -> bytes:
        """Do as `CopyConnection.pull_lines`, for about BYTES."""
        size, outcome = fill(connection.pointer, self._room, self._held)
        lines = self._room[:size].tobytes()
        if outcome == TOO_LONG:
            address, length = self._held.tolist()
            lines += connection.take(address, length)
        elif not lines:
            connection.check_end()
        return lines


class Puller:
    """Gathers messages of one connection."""

    def __init__(self) -> None:
        self._room = np.zeros(BYTES + len(PADDING), np.uint8)
        self._ends = np.empty(MESSAGES, np.int64)
        self._held = np.zeros(HELD_FIELDS, np.int64)
        self._count, self._outcome = 0, DRAINED

    @property
    def size(self) -> int:
        """Bytes of the messages that were gathered."""
        return int(self._ends[self._count - 1]) if self._count else 0

    def __len__(self) -> int:
        return self._count

    def pull(self, connection: CopyConnection) -> bool:
        """Gather what has been received; returns whether that was all for now.

        Otherwise `take` it. Raises as `CopyConnection.pull` does.
        """
        room = self._room[:BYTES]
        self._count, self._outcome = pull(
            connection.pointer, room, self._ends, self._count, self._held
        )
        if self._outcome == ENDED and not self._count:
            raise connection.failure()
        return self._outcome == DRAINED

    def take(self) -> tuple[Bytes, Offsets]:
        """Return messages with zeros after the last, and their ends; valid until the next `pull`."""
        raw, ends, size = self._room, self._ends[: self._count], self.size
        if self._outcome == TOO_LONG:
            address, length = self._held.tolist()
            message = CopyConnection.take(address, length) + PADDING
            raw = np.concatenate((raw[:size], np.frombuffer(message, np.uint8)), dtype=np.uint8)
            size += length
            ends = np.append(ends, size)
        raw[size : size + len(PADDING)] = 0
        self._count, self._outcome = 0, DRAINED
        return raw, ends


def compile_fill() -> None:
    """Do as `compile_pull` for lines of COPY."""
    if fill(0, np.empty(1, np.uint8), np.zeros(HELD_FIELDS, np.int64)) != (0, ENDED):
        raise RuntimeError("libpq finds a line where there is no connection")


def compile_pull() -> None:
    """Have the kernel compiled, or loaded from the disk cache; libpq knows that 0 is no connection."""
    nothing, held = np.zeros(1, np.int64), np.zeros(HELD_FIELDS, np.int64)
    if pull(0, np.zeros(1, np.uint8), nothing, 0, held) != (0, ENDED):
        raise RuntimeError("libpq finds a message where there is no connection")
