"""Lets SlateDB's library read a system clock that is ahead, for the length of one call.

SlateDB's Python binding (0.17) does not accept a clock. Its library reads the time through
`clock_gettime` of the C library, like all code in Rust, and calls that function through one pointer of
its import table. `clock_ahead` points it to a function that adds the shift, and back again: nothing
else in the process sees a different time, nor does SlateDB afterwards.

This module checks what it changes. Where the import table does not look as expected (another
operating system, another way of linking) it raises ClockShiftError and has changed nothing. It is
needed only when the system clock went back, and can be removed once the binding accepts a clock.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
import time
from collections.abc import Awaitable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar

from slatedb.uniffi._slatedb_uniffi import slatedb as binding

T = TypeVar("T")

#: The function that the library imports.
_FUNCTION = b"clock_gettime"
#: The beginning of a 64-bit little-endian ELF file.
_ELF = b"\x7fELF\x02\x01"
#: Program headers: where the dynamic section is, and what is read-only after loading.
_PT_DYNAMIC, _PT_GNU_RELRO = 2, 0x6474E552
#: Entries of the dynamic section: tables of symbols, their names, and relocations with their sizes.
_DT_STRTAB, _DT_SYMTAB = 5, 6
_RELOCATIONS = ((7, 8), (23, 2))
#: Bytes of one symbol; the first four say where its name is.
_SYMBOL_BYTES = 24
_PROT_READ, _PROT_WRITE = 1, 2
_NANOSECONDS = 1_000_000_000


class ClockShiftError(RuntimeError):
    """The library's clock cannot be shifted here."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _LibraryInfo(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


_ClockFunction = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(_Timespec))


class _Clock:
    """The C library's clock, shifted. Never freed: threads may still be calling it."""

    def __init__(self) -> None:
        self._read = _ClockFunction(_address(getattr(ctypes.CDLL(None), _FUNCTION.decode())))
        #: Nanoseconds.
        self.shift = 0
        self.readings = 0
        self.function = _ClockFunction(self._answer)

    def _answer(self, clock: int, answer: Any) -> int:
        status: int = self._read(clock, answer)
        if clock == time.CLOCK_REALTIME and not status:
            now = answer[0]
            shifted = now.seconds * _NANOSECONDS + now.nanoseconds + self.shift
            now.seconds, now.nanoseconds = divmod(shifted, _NANOSECONDS)
            self.readings += 1
        return status


@dataclass(frozen=True, slots=True)
class ImportSlot:
    """The pointer through which the library calls an imported function."""

    address: int
    read_only: bool

    def set(self, function: int) -> None:
        if self.read_only:
            self._protect(_PROT_READ | _PROT_WRITE)
        ctypes.c_void_p.from_address(self.address).value = function
        if self.read_only:
            self._protect(_PROT_READ)

    def _protect(self, access: int) -> None:
        page = self.address // mmap.PAGESIZE * mmap.PAGESIZE
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        if protect(page, mmap.PAGESIZE, access):
            raise ClockShiftError(f"mprotect failed with errno {ctypes.get_errno()}")


@contextmanager
def clock_ahead(milliseconds: int) -> Iterator[None]:
    """Let SlateDB read a system clock that is `milliseconds` ahead while the context lasts.

    Raises ClockShiftError if that cannot be done, and if SlateDB did not read the clock at all.
    """
    clock, slot = _clock(), _slot()
    before, clock.shift = clock.readings, milliseconds * 1_000_000
    original = ctypes.c_void_p.from_address(slot.address).value
    if original != _address(getattr(ctypes.CDLL(None), _FUNCTION.decode())):
        raise ClockShiftError("slatedb's clock is not the C library's")
    slot.set(_address(clock.function))
    try:
        yield
    finally:
        slot.set(original)
    if clock.readings == before:
        raise ClockShiftError("slatedb did not read the system clock where it was expected to")


class StartedAhead(Generic[T]):
    """Awaits `work`; its first step, up to its first wait, sees a clock that is ahead.

    Only the first step: later ones sign requests to storage, and those need the real time.
    """

    def __init__(self, work: Awaitable[T], milliseconds: int) -> None:
        self._work = work
        self._milliseconds = milliseconds

    def __await__(self) -> Generator[Any, Any, T]:
        steps = self._work.__await__()
        try:
            with clock_ahead(self._milliseconds):
                pending = next(steps)
            while True:
                try:
                    yield pending
                except BaseException as error:
                    pending = steps.throw(error)
                else:
                    pending = next(steps)
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            steps.close()


@cache
def _clock() -> _Clock:
    return _Clock()


@cache
def _slot() -> ImportSlot:
    slots = import_slots(_FUNCTION)
    if len(slots) != 1:
        raise ClockShiftError(f"slatedb's library imports its clock {len(slots)} times, not once")
    return slots[0]


def import_slots(function: bytes) -> list[ImportSlot]:
    """Where the library keeps the address of a function of the C library; [] if it uses none."""
    try:
        base = _base_of(binding._UniffiLib.uniffi_slatedb_uniffi_fn_constructor_dbbuilder_new)
    except AttributeError as error:
        raise ClockShiftError(f"this system does not say where libraries are: {error}") from error
    if ctypes.string_at(base, len(_ELF)) != _ELF:
        raise ClockShiftError("slatedb's library is not a 64-bit little-endian ELF file")
    headers = _program_headers(base)
    start, size = headers.get(_PT_GNU_RELRO, (0, 0))
    return [
        ImportSlot(address, start <= address - base < start + size)
        for address in sorted(set(_import_slots(base, headers[_PT_DYNAMIC], function)))
    ]


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _base_of(function: Any) -> int:
    """Address at which the library with `function` was loaded."""
    info = _LibraryInfo()
    locate = ctypes.CDLL(None).dladdr
    locate.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    if not locate(_address(function), ctypes.byref(info)) or not info.base:
        raise ClockShiftError("the system does not say where slatedb's library was loaded")
    return int(info.base)


def _program_headers(base: int) -> dict[int, tuple[int, int]]:
    """Type of segment to its offset in memory and size."""
    (offset,) = struct.unpack_from("<Q", ctypes.string_at(base, 64), 32)
    size, count = struct.unpack_from("<HH", ctypes.string_at(base, 64), 54)
    found = {}
    for number in range(count):
        header = struct.unpack("<IIQQQQQQ", ctypes.string_at(base + offset + number * size, 56))
        found[header[0]] = (header[3], header[6])
    return found


def _import_slots(base: int, dynamic: tuple[int, int], function: bytes) -> Iterator[int]:
    """Addresses of the pointers that the loader filled in for the function."""
    offset, size = dynamic
    entries = dict(struct.iter_unpack("<qQ", ctypes.string_at(base + offset, size // 16 * 16)))

    def table(tag: int) -> int:
        # Some loaders turn these offsets into addresses in place, others leave them.
        value: int = entries[tag]
        return value if value >= base else base + value

    @cache
    def is_wanted(symbol: int) -> bool:
        (name,) = struct.unpack(
            "<I", ctypes.string_at(table(_DT_SYMTAB) + symbol * _SYMBOL_BYTES, 4)
        )
        return ctypes.string_at(table(_DT_STRTAB) + name) == function

    for tag, size_tag in _RELOCATIONS:
        if tag in entries:
            relocations = ctypes.string_at(table(tag), entries[size_tag])
            for offset, info, _ in struct.iter_unpack("<QQq", relocations):
                if info >> 32 and is_wanted(info >> 32):
                    yield base + offset
