"""Locks between the processes that open one folder.

The kernel releases a lock when its process ends, however it ends. A lock file also names the process
that holds it, for messages; what it says decides nothing.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from streamfold.errors import StorageError, StoreInUseError, WriterFencedError

logger = logging.getLogger(__name__)

_WRITER = "writer.lock"
#: Seconds between attempts to get a lock, and after which the log says who has it.
_PAUSE, _REPORT_AFTER = 0.02, 1.0
#: Bytes of a holder's name that are read.
_HOLDER_MAX = 200


@contextmanager
def writer_lock(folder: Path, *, take_over: bool) -> Iterator[LockClaim]:
    """Be the only writer of the database in `folder` while the context lasts.

    StoreInUseError if it has one, unless this one is to take over.
    """
    path = folder / _WRITER
    handle = _lock_or_replace(path, take_over=take_over)
    try:
        yield LockClaim(handle, path)
    finally:
        os.close(handle)


@dataclass(frozen=True, slots=True)
class LockClaim:
    """A lock file as a `WriterClaim`: whoever takes over puts another one in its place."""

    handle: int
    path: Path
    decides: ClassVar[bool] = True

    async def take(self) -> None:
        """Do nothing: whoever has the lock has the claim."""

    async def check(self) -> None:
        if not _is_at(self.handle, self.path):
            raise WriterFencedError


def _lock_or_replace(path: Path, *, take_over: bool) -> int:
    """The open lock file at `path`, locked.

    To take over means to put a new lock file in place of the one that another process has locked: who
    comes next finds the new one. The other process learns of it when its next commit fails.
    """
    while (handle := _try_lock(path)) is not None:
        if _is_at(handle, path):
            _name_holder(handle)
            return handle
        os.close(handle)  # it was replaced after it was opened
    holder, store = _holder(path), path.parent.parent
    if not take_over:
        raise StoreInUseError(
            f"{store} is in use by {holder}: stop that process first; or take the store over, with "
            "`serve --take-over` or `open_store(…, take_over=True)`, after which its appends fail"
        )
    logger.warning("taking %s over from %s, whose appends fail from now on", store, holder)
    draft = path.with_name(f"{_WRITER}.{os.getpid()}.{time.monotonic_ns()}")
    handle = _try_lock(draft)
    if handle is None:
        raise StorageError(f"cannot lock {draft}, although this process has just created it")
    _name_holder(handle)
    draft.replace(path)
    return handle


@asynccontextmanager
async def exclusive(path: Path, limit: float) -> AsyncIterator[None]:
    """Exclude other processes while the context lasts; StoreInUseError after `limit` seconds."""
    began, reported = time.monotonic(), False
    while (handle := _try_lock(path)) is None:
        waited = time.monotonic() - began
        if waited > limit:
            raise StoreInUseError(
                f"{path} has been locked for {limit:g} s by {_holder(path)}, which must be stopped, "
                "suspended or waiting for its disk: continue it (kill -CONT) or end it (kill -KILL), "
                "then start again"
            )
        if waited > _REPORT_AFTER and not reported:
            reported = True
            logger.warning(
                "waiting up to %g s for %s, which has locked %s", limit, _holder(path), path
            )
        await asyncio.sleep(_PAUSE)
    try:
        _name_holder(handle)
        yield
    finally:
        os.close(handle)


def _try_lock(path: Path) -> int | None:
    """An open file that is locked; None if another one is."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except OSError as error:
        os.close(handle)
        raise StorageError(
            f"cannot lock {path} ({error.strerror}): a store needs a local file system with locks"
        ) from error
    return handle


def _is_at(handle: int, path: Path) -> bool:
    """Whether the open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _name_holder(handle: int) -> None:
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)


def _holder(path: Path) -> str:
    """Who has the lock, as its file says."""
    with path.open("rb") as file:
        name = file.read(_HOLDER_MAX).decode(errors="replace")
    return name if name.isprintable() and name else "another process"
