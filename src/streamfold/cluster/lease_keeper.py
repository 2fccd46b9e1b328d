"""Acquires a store's lease for a server, renews it while the server is active, and releases it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from streamfold.blob import BlobChangedError, BlobStore
from streamfold.cluster.lease import (
    CLOCK_KEY,
    EXPIRY_MAX,
    EXPIRY_MIN,
    HEARTBEATS,
    KEY,
    LOOK_MAX,
    TRUST,
    LeaseOwner,
    LeaseWatch,
    StoreLease,
    decode_lease,
    encode_lease,
)
from streamfold.cluster.process_identity import has_ended
from streamfold.errors import (
    BlobExistsError,
    BlobNotFoundError,
    BlobOutcomeUnknownError,
    BlobUnavailableError,
    DataCorruptError,
    FormatUnsupportedError,
    InvalidError,
    LeaseLostError,
    NotActiveError,
    StorageError,
)

logger = logging.getLogger(__name__)

#: Errors of a conditional write if another server was first, or the object was deleted.
_CONFLICTS = (BlobChangedError, BlobExistsError, BlobNotFoundError)
#: Errors if storage cannot be reached, or the outcome of a write is unknown.
_FAILURES = (BlobUnavailableError, BlobOutcomeUnknownError)
#: Attempts per renewal: the object may have been deleted, or an earlier attempt may have succeeded.
_ATTEMPTS = 3
#: Resolution in seconds of S3's modification times.
_RESOLUTION = 1.0


@dataclass(frozen=True, slots=True)
class LeaseVersion:
    """The lease object as read. `etag` is None if it is missing, `lease` if missing or corrupt."""

    etag: str | None
    lease: StoreLease | None


class LeaseKeeper:
    """Holds the lease of one store for one server.

    `blobs` is the folder of the store's database. Call the methods for an active server only after
    `acquire` has returned.
    """

    def __init__(
        self,
        blobs: BlobStore,
        owner: LeaseOwner,
        expiry: float,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        if not EXPIRY_MIN <= expiry <= EXPIRY_MAX:
            raise InvalidError(
                f"a lease that expires after {expiry:g} seconds is not possible: give "
                f"{EXPIRY_MIN:g} to {EXPIRY_MAX:g}"
            )
        self._blobs, self._owner, self._expiry = blobs, owner, expiry
        self._clock, self._sleep = clock, sleep
        self._etag: str | None = None
        self._sequence = 0
        #: Time until which no other server can have the lease.
        self._trusted_until = float("-inf")
        self._renewing: asyncio.Task[LeaseLostError] | None = None

    @property
    def owner(self) -> LeaseOwner:
        """Return this server as the lease names it."""
        return self._owner

    @property
    def expiry(self) -> float:
        """Return the seconds without a heartbeat after which another server may claim the lease."""
        return self._expiry

    # Starting

    async def acquire(
        self, *, take_over: bool, on_standby: Callable[[LeaseOwner | None], None]
    ) -> None:
        """Return once this server has the lease. With `take_over`, take it from any other server.

        While waiting, calls `on_standby` with the active server, or with None if it is unknown.
        """
        watch, waiting = LeaseWatch(), False
        while True:
            try:
                current = await self._read()
                if await self._is_free(current, watch, take_over=take_over):
                    await self._claim(current)
                    return
                waiting = True
                on_standby(current.lease.owner if current.lease is not None else None)
            except _CONFLICTS:
                logger.info("the lease of the store changed when it was claimed: looking again")
            except _FAILURES as error:
                refused = isinstance(error, BlobUnavailableError) and not error.transient
                if refused and not waiting:
                    raise StorageError(f"the lease of the store is refused: {error}") from error
                watch.lose_sight()
                logger.warning("the lease of the store cannot be checked, trying again: %s", error)
            await self._sleep(min(LOOK_MAX, self._expiry / HEARTBEATS))

    async def _is_free(self, current: LeaseVersion, watch: LeaseWatch, *, take_over: bool) -> bool:
        """Return whether this server may claim this version now."""
        lease, first = current.lease, not watch.has_looked
        if lease is not None and (lease.released or lease.owner.id == self._owner.id):
            return True
        if first and current.etag is None and await self._is_new():
            return True
        if take_over:
            owner = "an unknown server" if lease is None else lease.owner
            logger.warning("taking the store over from %s, which stops", owner)
            return True
        if first and lease is not None and has_ended(lease.owner.evidence):
            logger.info("%s has ended on this machine: its lease is free", lease.owner)
            return True
        age = await self._age(current.etag) if first and current.etag is not None else 0.0
        now = self._clock()
        watch.observe(current.etag, now, age)
        expiry = self._expiry if lease is None else lease.expiry
        if watch.unchanged(now) < expiry:
            return False
        owner = "an unknown server" if lease is None else lease.owner
        logger.warning("the lease of %s was not renewed for %g s: claiming it", owner, expiry)
        return True

    async def _is_new(self) -> bool:
        """Return whether the store is empty. Elsewhere, a missing lease may just have been deleted."""
        async for meta in self._blobs.list():
            if meta.key not in (KEY, CLOCK_KEY):
                return False
        return True

    async def _age(self, etag: str) -> float:
        """Return the minimum age in seconds of this version, by the storage service's own clock."""
        await self._blobs.put(CLOCK_KEY, self._owner.id.encode())
        now, written = await self._blobs.head(CLOCK_KEY), await self._blobs.head(KEY)
        if written.etag != etag:
            return 0.0
        seconds = (now.last_modified - written.last_modified).total_seconds()
        return max(0.0, seconds - _RESOLUTION)

    async def _claim(self, current: LeaseVersion) -> None:
        self._etag = current.etag
        await self._write()

    # Active

    @asynccontextmanager
    async def renewing(self) -> AsyncIterator[None]:
        """Renew the lease during the block, then release it unless it was lost."""
        renewing = self._renewing = asyncio.create_task(self._renew_until_lost())
        try:
            yield
        finally:
            renewing.cancel()
            with suppress(asyncio.CancelledError):
                await renewing
            if renewing.cancelled():
                await self._release()

    async def lost(self) -> LeaseLostError:
        """Wait until another server has the lease, and return the error that reports it."""
        if self._renewing is None:
            raise AssertionError("a lease is lost only while it is renewed")
        return await asyncio.shield(self._renewing)

    def check(self) -> None:
        """Raise NotActiveError if another server may have the lease by now. Sends no request."""
        if self._clock() >= self._trusted_until:
            raise NotActiveError(
                f"this server could not renew its lease of the store for {self._expiry * TRUST:g} s, "
                "so another one may be active: try again later"
            )

    async def confirm(self) -> None:
        """Raise LeaseLostError if storage shows that another server has the lease."""
        try:
            await self._read_again()
        except BlobUnavailableError as error:
            raise StorageError(f"cannot read the lease of the store: {error}") from error

    async def _renew_until_lost(self) -> LeaseLostError:
        while True:
            await self._sleep(self._expiry / HEARTBEATS)
            try:
                await self._renew()
            except LeaseLostError as error:
                self._trusted_until = float("-inf")
                return error
            except _FAILURES as error:
                logger.warning("the lease of the store cannot be renewed yet: %s", error)

    async def _renew(self, *, released: bool = False) -> None:
        """Write the lease if nobody else has. Raises LeaseLostError if another server has."""
        for _ in range(_ATTEMPTS):
            try:
                await self._write(released=released)
                return
            except _CONFLICTS:
                current = await self._read_again()
            if current.lease is None:
                what = "was deleted" if current.etag is None else "was overwritten"
                logger.warning("the lease of the store %s: writing it again", what)
            self._etag = current.etag

    async def _read_again(self) -> LeaseVersion:
        """Return the current version. Raises LeaseLostError if it belongs to another server."""
        try:
            current = await self._read()
        except FormatUnsupportedError:
            raise LeaseLostError("a server of a newer version") from None
        if current.lease is not None and current.lease.owner.id != self._owner.id:
            raise LeaseLostError(str(current.lease.owner))
        return current

    async def _release(self) -> None:
        """Release the lease, so that another server can claim it without waiting for the expiry."""
        self._trusted_until = float("-inf")
        try:
            await self._renew(released=True)
        except LeaseLostError as error:
            logger.info("the lease is not given up: %s", error)
        except _FAILURES as error:
            logger.warning("the lease is not given up, and expires: %s", error)

    # Storage

    async def _read(self) -> LeaseVersion:
        try:
            data, etag = await self._blobs.get_with_etag(KEY)
        except BlobNotFoundError:
            return LeaseVersion(None, None)
        try:
            return LeaseVersion(etag, decode_lease(data))
        except DataCorruptError as error:
            logger.warning("%s", error)
            return LeaseVersion(etag, None)

    async def _write(self, *, released: bool = False) -> None:
        """Write the next version over the one last seen."""
        self._sequence += 1
        data = encode_lease(
            StoreLease(
                owner=self._owner,
                sequence=self._sequence,
                expiry=self._expiry,
                released=released,
            )
        )
        sent = self._clock()
        if self._etag is None:
            self._etag = await self._blobs.put_if_absent(KEY, data)
        else:
            self._etag = await self._blobs.put_if_match(KEY, data, self._etag)
        if not released:
            self._trusted_until = sent + self._expiry * TRUST
