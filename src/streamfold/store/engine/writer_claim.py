"""Decides which process owns a store: the last one that was started on it.

Opening SlateDB takes the database away from any other process. A process that reopens its storage after
a failure must not do that to its replacement, but SlateDB cannot open a database on the condition that
it is still ours, and the replacement may start between a check and the opening. So a start *claims* the
store before it opens it, and claims decide:

- After opening or reopening the store, a process checks the claim. If a later process has claimed the
  store, it closes the store and stops.
- A process that is fenced while the claim is still its own was fenced by a process that it had replaced
  and that is about to stop. So it reopens the store, but only once: a version without claims that takes
  the store over thus gets it at its second start at the latest.

On local disk the lock file is the claim (`process_locks.py`), on object storage an object beside
SlateDB's. An in-memory store has only one process.

Servers on object storage also have a lease (`streamfold.cluster`). Between two such processes the lease
decides, whatever the claim says: a process that was suspended after it got the lease may claim the
store when another one has the lease, and must not stop that process.
"""

from __future__ import annotations

import os
import secrets
import socket
from typing import Protocol

from streamfold.blob import BlobStore
from streamfold.errors import (
    BlobNotFoundError,
    BlobUnavailableError,
    StorageError,
    WriterFencedError,
)
from streamfold.store.engine.location import Location

_CLAIM = "writer.claim"
#: The prefix of claims by processes with leases.
_LEASED = b"leased "


class WriterLease(Protocol):
    """The part of a server's lease that a store needs."""

    async def confirm(self) -> None:
        """Raise WriterFencedError if storage shows that another server has the lease."""
        ...


class WriterClaim(Protocol):
    """One process's right to write to a store."""

    @property
    def decides(self) -> bool:
        """Whether `check` detects later processes."""
        ...

    async def take(self) -> None:
        """Claim the store. Called when a process starts, before it opens the store."""
        ...

    async def check(self) -> None:
        """Raise WriterFencedError if a later process has claimed the store."""
        ...


class NoClaim:
    """The claim to a store that no other process can reach."""

    decides = False

    async def take(self) -> None:
        pass

    async def check(self) -> None:
        pass


class BucketClaim:
    """An object that names the last process that was started on the store."""

    decides = True

    def __init__(
        self, location: Location, files: BlobStore, lease: WriterLease | None = None
    ) -> None:
        self._location, self._files, self._lease = location, files, lease
        who = f"process {os.getpid()} on {socket.gethostname()}"
        prefix = b"" if lease is None else _LEASED
        self._content = prefix + f"{secrets.token_hex(16)} {who}".encode()

    async def take(self) -> None:
        # First of all, because no object may be written to a location of another program.
        await self._location.check_access()
        if self._lease is not None:
            await self._lease.confirm()
        await self._location.reach(lambda: self._files.put(_CLAIM, self._content))

    async def check(self) -> None:
        if self._lease is not None:
            await self._lease.confirm()
        try:
            content = await self._files.get(_CLAIM)
        except BlobNotFoundError:
            return  # removed by hand: SlateDB's epochs alone decide
        except BlobUnavailableError as error:
            raise StorageError(
                f"cannot read whose store {self._location.url} is: {error}"
            ) from error
        decided = self._lease is not None and content.startswith(_LEASED)
        if content != self._content and not decided:
            raise WriterFencedError
