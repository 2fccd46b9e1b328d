"""Which process a store belongs to: the last one that was started on it.

Opening SlateDB takes the database from whoever has it. A process that reopens its storage after a
failure must not do that to its replacement, but SlateDB has no "open it if it is still mine": the
replacement may start between the check and the opening. So a start *claims* the store before it opens
it, and claims decide:

- A process that has opened the store, at its start or again, looks at the claim afterwards. If a later
  process has claimed the store, it closes the store and stops.
- A process that is fenced while the claim is still its own was fenced by one that it had replaced, and
  that is about to stop. It opens the store again. It does so once: a version without claims that takes
  the store over gets it at its second start at the latest.

On local disk the lock file is the claim (`process_locks.py`), on object storage an object beside
SlateDB's. A store in memory has one process.

Servers on object storage also have a lease (`streamfold.cluster`). Between two such processes the lease
decides, whatever the claim says: a process that was suspended after it got the lease may claim the
store when another one has the lease, and must not stop that one.
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
#: How the claims of processes with leases begin.
_LEASED = b"leased "


class WriterLease(Protocol):
    """The lease of a server, as far as a store needs it."""

    async def confirm(self) -> None:
        """Raise WriterFencedError if storage says that another server has the lease."""
        ...


class WriterClaim(Protocol):
    """The right of one process to write to a store."""

    @property
    def decides(self) -> bool:
        """Whether `check` finds out about later processes."""
        ...

    async def take(self) -> None:
        """Claim the store, at the start of a process and before it is opened."""
        ...

    async def check(self) -> None:
        """Raise WriterFencedError if a later process has claimed the store."""
        ...


class NoClaim:
    """For a store that no other process can reach."""

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
        # First of all: no object may appear in a place that belongs to another program.
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
            return  # removed by hand: SlateDB's epochs decide alone
        except BlobUnavailableError as error:
            raise StorageError(
                f"cannot read whose store {self._location.url} is: {error}"
            ) from error
        decided = self._lease is not None and content.startswith(_LEASED)
        if content != self._content and not decided:
            raise WriterFencedError
