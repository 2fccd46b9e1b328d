"""A local disk that fails: this process's file system calls, from Python and SlateDB, go wrong.

The native module injects failures into SlateDB's file operations, and Python's functions are
replaced. So no mount and no privileges are needed. The disk's content stays intact:
`streamfold.testing.hostile_disk` loses data.
"""

from __future__ import annotations

import enum
import errno
import io
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from streamfold import _native

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
#: Maximum seconds by which a call is delayed.
_DELAY = 0.1
#: Probability that a call fails while the disk fails intermittently.
_FAILURES = 0.2


class DiskFault(enum.StrEnum):
    """The effect of a fault on calls."""

    NONE = "works"
    READ_ONLY = "turns read-only"
    FULL = "is full"
    FAILING = "answers with I/O errors now and then"
    LATE = "answers late"
    SILENT = "hangs"
    SYNC_FAILS = "cannot sync"


class _Call(enum.Enum):
    """The kinds of calls that faults distinguish."""

    READ = "read"
    CREATE = "create"
    WRITE = "write"
    REMOVE = "remove"
    SYNC = "sync"


#: The calls in the native module's terms, in which writing a file includes creating it.
_STEPS: Final = {_Call.READ: 1, _Call.CREATE: 2, _Call.WRITE: 2, _Call.REMOVE: 4, _Call.SYNC: 8}
#: The calls that each fault fails, with the error number.
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
    """A faulty disk below `root`, for this process."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._fault = DiskFault.NONE
        self._dice = random.Random()
        #: Cleared while calls hang.
        self._answers = threading.Event()
        self._answers.set()
        self.native = _native.FaultyDisk(root, self._dice.getrandbits(64))

    def turn(self, fault: DiskFault) -> None:
        """Apply this fault to every call from now on. `NONE` ends it."""
        self._fault = fault
        number, calls = _ERRORS.get(fault, (0, frozenset()))
        self.native.turn(
            sum({_STEPS[call] for call in calls}),
            number,
            rate=_FAILURES if fault is DiskFault.FAILING else 1.0,
            delay=_DELAY if fault is DiskFault.LATE else 0.0,
            hangs=fault is DiskFault.SILENT,
        )
        if fault is DiskFault.SILENT:
            self._answers.clear()
        else:
            self._answers.set()

    def install(self) -> None:
        """Intercept this process's calls to the disk."""
        self._replace_python()

    def _answer(self, call: _Call) -> None:
        """Let a call pass, possibly late, or raise an OSError."""
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
            disk = usage(path)
            full = self._fault is DiskFault.FULL
            return _Usage(disk.total, disk.total, 0) if full else disk

        for module, name, function in (
            (os, "open", open_guarded),
            (io, "open", open_io_guarded),
            (os, "fsync", sync_guarded),
            (shutil, "disk_usage", usage_guarded),
        ):
            setattr(module, name, function)
