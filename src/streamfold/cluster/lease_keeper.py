"""Gets the lease of a store for one server, renews it while the server is active, and gives it up."""

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

#: What a conditional write says if another server came first, or somebody deleted the object.
_CONFLICTS = (BlobChangedError, BlobExistsError, BlobNotFoundError)
#: What storage says if it cannot be reached, or the outcome of a write is not known.
_FAILURES = (BlobUnavailableError, BlobOutcomeUnknownError)
#: Attempts of one renewal: the object may have been deleted, or an earlier attempt may have worked.
_ATTEMPTS = 3
#: Seconds to which S3 rounds the time of a change.
_RESOLUTION = 1.0


@dataclass(frozen=True, slots=True)
class LeaseVersion:
    """The object as it was read: no etag if there is none, no lease if its bytes are none."""

    etag: str | None
    lease: StoreLease | None


class LeaseKeeper:
    """The lease of one store, as one server sees it.

    `blobs` is the folder of the store's database. The methods for an active server may be called once
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
        #: Until when no other server can have the lease.
        self._trusted_until = float("-inf")
        self._renewing: asyncio.Task[LeaseLostError] | None = None

    @property
    def owner(self) -> LeaseOwner:
        """Return this server, as the lease names it."""
        return self._owner

    @property
    def expiry(self) -> float:
        """Return the seconds without a heartbeat after which another server may claim the lease."""
        return self._expiry

    # A server that starts

    async def acquire(
        self, *, take_over: bool, on_standby: Callable[[LeaseOwner | None], None]
    ) -> None:
        """Return when this server has the lease; with `take_over`, take it from whoever has it.

        Calls `on_standby` with the active server, as far as it is known, while it must wait.
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
        """Whether this server may claim this version now."""
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
        """Whether the store is empty: a lease that is missing elsewhere may just have been deleted."""
        async for meta in self._blobs.list():
            if meta.key not in (KEY, CLOCK_KEY):
                return False
        return True

    async def _age(self, etag: str) -> float:
        """Return how many seconds ago this version was written at least, by storage's own clock."""
        await self._blobs.put(CLOCK_KEY, self._owner.id.encode())
        now, written = await self._blobs.head(CLOCK_KEY), await self._blobs.head(KEY)
        if written.etag != etag:
            return 0.0
        seconds = (now.last_modified - written.last_modified).total_seconds()
        return max(0.0, seconds - _RESOLUTION)

    async def _claim(self, current: LeaseVersion) -> None:
        self._etag = current.etag
        await self._write()

    # A server that is active

    @asynccontextmanager
    async def renewing(self) -> AsyncIterator[None]:
        """Renew the lease while the context lasts, then give it up, unless it was lost."""
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
        """Wait until another server has the lease; return what happened."""
        if self._renewing is None:
            raise AssertionError("a lease is lost only while it is renewed")
        return await asyncio.shield(self._renewing)

    def check(self) -> None:
        """Raise NotActiveError unless no other server can have the lease now; sends no request."""
        if self._clock() >= self._trusted_until:
            raise NotActiveError(
                f"this server could not renew its lease of the store for {self._expiry * TRUST:g} s, "
                "so another one may be active: try again later"
            )

    async def confirm(self) -> None:
        """Raise LeaseLostError if storage says that another server has the lease."""
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
        """Write the lease on the condition that nobody else has; LeaseLostError if one has."""
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
        """Return the version that is there now; LeaseLostError if it is another server's."""
        try:
            current = await self._read()
        except FormatUnsupportedError:
            raise LeaseLostError("a server of a newer version") from None
        if current.lease is not None and current.lease.owner.id != self._owner.id:
            raise LeaseLostError(str(current.lease.owner))
        return current

    async def _release(self) -> None:
        """Let another server claim the lease at once; without that, it waits for the expiry."""
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
        """Write the next version over the one that was seen last."""
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
