"""A local disk that fails: the file system's calls of this process, Python's and SlateDB's, go wrong.

SlateDB calls the C library through pointers of its import table. While there is a fault, some of them
lead to functions in this module; otherwise nothing is in the way. So no mount is needed, and no rights.
What the disk holds stays as it is: `streamfold.testing.hostile_disk` loses it.
"""

from __future__ import annotations

import atexit
import ctypes
import enum
import errno
import io
import os
import random
import shutil
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from streamfold.store.engine.clock_shift import ImportSlot, import_slots

_TEXT, _INT, _SIZE, _POINTER = ctypes.c_char_p, ctypes.c_int, ctypes.c_ssize_t, ctypes.c_void_p
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
#: Seconds by which a call is late, at most.
_DELAY = 0.1
#: How often a call fails while the disk fails now and then.
_FAILURES = 0.2


class DiskFault(enum.StrEnum):
    """What becomes of the calls."""

    NONE = "works"
    READ_ONLY = "turns read-only"
    FULL = "is full"
    FAILING = "answers with I/O errors now and then"
    LATE = "answers late"
    SILENT = "hangs"
    SYNC_FAILS = "cannot sync"


class _Call(enum.Enum):
    """What a call does, as far as faults tell calls apart."""

    READ = "read"
    CREATE = "create"
    WRITE = "write"
    REMOVE = "remove"
    SYNC = "sync"


#: The calls that fail, and how.
_ERRORS: dict[DiskFault, tuple[int, frozenset[_Call]]] = {
    DiskFault.READ_ONLY: (errno.EROFS, frozenset({_Call.CREATE, _Call.WRITE, _Call.REMOVE})),
    DiskFault.FULL: (errno.ENOSPC, frozenset({_Call.CREATE, _Call.WRITE})),
    DiskFault.FAILING: (errno.EIO, frozenset({_Call.CREATE, _Call.WRITE, _Call.REMOVE})),
    DiskFault.SYNC_FAILS: (errno.EIO, frozenset({_Call.SYNC})),
}


class _Usage(NamedTuple):
    total: int
    used: int
    free: int


class FaultyDisk:
    """The disk below `root`, for this process."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._fault = DiskFault.NONE
        self._dice = random.Random()
        #: Set while calls do not hang.
        self._answers = threading.Event()
        self._answers.set()
        self._native: list[tuple[ImportSlot, Any, Any]] = []

    def turn(self, fault: DiskFault) -> None:
        """Have every call from now on go wrong in that way, or none."""
        self._fault = fault
        faulty = fault not in (DiskFault.NONE, DiskFault.SYNC_FAILS)
        for slot, original, replacement in self._native:
            function = replacement if faulty else original
            slot.set(ctypes.cast(function, ctypes.c_void_p).value or 0)
        if fault is DiskFault.SILENT:
            self._answers.clear()
        else:
            self._answers.set()

    def install(self) -> None:
        """Stand between this process and its disk."""
        self._replace_python()
        self._replace_native()
        # At the end of the interpreter, no thread of SlateDB may call Python.
        atexit.register(self.turn, DiskFault.NONE)

    def _answer(self, call: _Call) -> None:
        """Let a call pass, late or not, or raise an OSError."""
        fault = self._fault
        if fault is DiskFault.NONE:
            return
        if fault is DiskFault.SILENT:
            self._answers.wait()
        elif fault is DiskFault.LATE:
            time.sleep(self._dice.uniform(0, _DELAY))
        number, calls = _ERRORS.get(fault, (0, frozenset()))
        fails = fault is not DiskFault.FAILING or self._dice.random() < _FAILURES
        if call in calls and fails:
            raise OSError(number, os.strerror(number))

    def _is_ours(self, path: Any) -> bool:
        if isinstance(path, int):
            return False
        return os.fsdecode(path).startswith(self._root)

    def _replace_python(self) -> None:
        def guarded(function: Callable[..., Any], call: _Call) -> Callable[..., Any]:
            def call_it(path: Any, *arguments: Any, **more: Any) -> Any:
                if self._is_ours(path):
                    self._answer(call)
                return function(path, *arguments, **more)

            return call_it

        for name in ("rename", "replace", "link", "mkdir"):
            setattr(os, name, guarded(getattr(os, name), _Call.CREATE))
        for name in ("unlink", "remove", "rmdir", "truncate"):
            setattr(os, name, guarded(getattr(os, name), _Call.REMOVE))
        open_file, open_io, sync, usage = os.open, io.open, os.fsync, shutil.disk_usage

        def open_guarded(path: Any, flags: int, *arguments: Any, **more: Any) -> int:
            if self._is_ours(path):
                self._answer(_Call.CREATE if flags & _WRITING else _Call.READ)
            return open_file(path, flags, *arguments, **more)

        def open_io_guarded(path: Any, mode: str = "r", *arguments: Any, **more: Any) -> Any:
            if self._is_ours(path):
                self._answer(_Call.READ if mode in ("r", "rb") else _Call.CREATE)
            return open_io(path, mode, *arguments, **more)

        def sync_guarded(descriptor: int) -> None:
            self._answer(_Call.SYNC)
            sync(descriptor)

        def usage_guarded(path: Any) -> Any:
            known = usage(path)
            full = self._fault is DiskFault.FULL
            return _Usage(known.total, known.total, 0) if full else known

        for module, name, function in (
            (os, "open", open_guarded),
            (io, "open", open_io_guarded),
            (os, "fsync", sync_guarded),
            (shutil, "disk_usage", usage_guarded),
        ):
            setattr(module, name, function)

    def _replace_native(self) -> None:
        for name, kinds, check in self._native_calls():
            prototype = ctypes.CFUNCTYPE(*kinds, use_errno=True)
            original = prototype((name, ctypes.CDLL(None)))
            address = ctypes.cast(original, ctypes.c_void_p).value or 0
            replacement = prototype(_guarded(prototype(address), check))
            for slot in import_slots(name.encode()):
                self._native.append((slot, original, replacement))

    def _native_calls(self) -> list[tuple[str, tuple[Any, ...], Callable[..., None]]]:
        """Names, types of the result and the arguments, and what decides whether a call fails."""
        answer = self._answer

        def on_path(call: _Call) -> Callable[..., None]:
            return lambda path, *_: answer(call) if self._is_ours(path) else None

        def on_open(path: bytes, flags: int, _mode: int) -> None:
            if self._is_ours(path):
                answer(_Call.CREATE if flags & _WRITING else _Call.READ)

        def on_link(_from: int, path: bytes, *_: Any) -> None:
            if self._is_ours(path):
                answer(_Call.CREATE)

        def on_write(descriptor: int, *_: Any) -> None:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):  # not one of SlateDB's sockets
                answer(_Call.WRITE)

        return [
            ("open64", (_INT, _TEXT, _INT, _INT), on_open),
            ("mkdir", (_INT, _TEXT, _INT), on_path(_Call.CREATE)),
            ("rename", (_INT, _TEXT, _TEXT), on_path(_Call.CREATE)),
            ("linkat", (_INT, _INT, _TEXT, _INT, _TEXT, _INT), on_link),
            ("unlink", (_INT, _TEXT), on_path(_Call.REMOVE)),
            ("write", (_SIZE, _INT, _POINTER, _SIZE), on_write),
        ]


def _guarded(original: Callable[..., int], check: Callable[..., None]) -> Callable[..., int]:
    def call(*arguments: Any) -> int:
        try:
            check(*arguments)
        except OSError as error:
            ctypes.set_errno(error.errno or errno.EIO)
            return -1
        return original(*arguments)

    return call
