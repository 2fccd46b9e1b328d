"""Locks between processes that open the same folder.

The kernel releases a lock when its process ends for any reason. A lock file also names the process
that holds it, but only for messages.
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
#: Seconds between attempts to get a lock, and seconds after which the log names its holder.
_PAUSE, _REPORT_AFTER = 0.02, 1.0
#: Maximum bytes read of a holder's name.
_HOLDER_MAX = 200


@contextmanager
def writer_lock(folder: Path, *, take_over: bool) -> Iterator[LockClaim]:
    """Hold the lock of the only writer of the database in `folder` while the context lasts.

    Raises StoreInUseError if another process holds it, unless `take_over` is set.
    """
    path = folder / _WRITER
    handle = _lock_or_replace(path, take_over=take_over)
    try:
        yield LockClaim(handle, path)
    finally:
        os.close(handle)


@dataclass(frozen=True, slots=True)
class LockClaim:
    """A lock file as a `WriterClaim`. A process that takes over replaces the file."""

    handle: int
    path: Path
    decides: ClassVar[bool] = True

    async def take(self) -> None:
        """Do nothing, because holding the lock is the claim."""

    async def check(self) -> None:
        if not _is_at(self.handle, self.path):
            raise WriterFencedError


def _lock_or_replace(path: Path, *, take_over: bool) -> int:
    """Open and lock the file at `path`. Returns its file descriptor.

    To take over, replaces the lock file that another process has locked with a new one, so that
    later processes find the new one. The other process notices when its next commit fails.
    """
    while (handle := _try_lock(path)) is not None:
        if _is_at(handle, path):
            _name_holder(handle)
            return handle
        os.close(handle)  # it was replaced after this opened it
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
    """Exclude other processes while the context lasts.

    Raises StoreInUseError after `limit` seconds.
    """
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
    """Open and lock the file. Returns None if another process has locked it."""
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
    """Return whether the open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _name_holder(handle: int) -> None:
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)


def _holder(path: Path) -> str:
    """Return the holder's name from the lock file."""
    with path.open("rb") as file:
        name = file.read(_HOLDER_MAX).decode(errors="replace")
    return name if name.isprintable() and name else "another process"
