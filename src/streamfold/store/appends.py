"""Appends: one attempt that never waits, and a slower way for what the attempt cannot do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from streamfold.errors import (
    BasinDeletingError,
    ConditionFailedError,
    StreamDeletingError,
    StreamfoldError,
    TermsError,
)
from streamfold.model.names import StreamRef
from streamfold.store.log.admission import AppendRequest, Unrecorded
from streamfold.store.log.shares import AppendAck
from streamfold.store.log.stream_log import StreamLog
from streamfold.store.supervisor import MountedStore, Supervisor


class _Decision(asyncio.Event):
    """Set once an append is accepted or refused, or its caller has gone."""

    def __init__(self, earlier: _Decision | None) -> None:
        super().__init__()
        #: The append before, if it may be undecided: a caller may go before its turn has come.
        self.earlier = earlier

    @property
    def pending(self) -> _Decision | None:
        """The last undecided append up to this one."""
        last: _Decision | None = self
        while last is not None and last.is_set():
            last = last.earlier
        return last

    async def all_made(self) -> None:
        """Return once this append and all before it are decided."""
        while (last := self.pending) is not None:
            await last.wait()


@dataclass(frozen=True, slots=True)
class Appends:
    """Accepts appends to a stream in the order of the calls."""

    supervisor: Supervisor
    now: Callable[[], int]
    #: The last `submit` of each stream that is not decided yet. Opening a stream takes some steps,
    #: after which a later call could find it open.
    _undecided: dict[StreamRef, _Decision] = field(default_factory=dict)

    def try_submit(self, request: AppendRequest) -> asyncio.Future[AppendAck] | None:
        """`submit` for the usual case, without waiting.

        Returns None and does nothing if the stream must be opened or created or has a content type, if
        an earlier append waits for that, if memory or disk has no room, or if the append would be
        refused: call `submit` then.
        """
        supervisor = self.supervisor
        mounted = supervisor.current
        if mounted is None or supervisor.space.full or request.ref in self._undecided:
            return None
        log = mounted.mount.log_in_memory(request.ref)
        if log is None or log.row.traits is not None:
            return None
        return self._accept_at_once(mounted, log, request)

    def _accept_at_once(
        self, mounted: MountedStore, log: StreamLog, request: AppendRequest
    ) -> asyncio.Future[AppendAck] | None:
        """Accept the append if there is room and it is not refused; None otherwise."""
        metered, admission = request.metered, self.supervisor.admission
        if mounted.mount.committer.read_only is not None:
            return None
        if not admission.acquire_at_once(metered):
            return None
        try:
            ack = log.accept(request, self.now())
        except StreamfoldError:
            admission.release(metered)
            return None
        except BaseException:
            admission.release(metered)
            raise
        mounted.mount.committer.touch(log)
        return None if isinstance(ack, Unrecorded) else ack

    async def submit(self, request: AppendRequest) -> asyncio.Future[AppendAck]:
        """Give the batches their slots in the stream, and return a future for their ack.

        Batches are appended in the order of the calls. This waits for room if too much is
        unacknowledged, and raises if the append is refused.
        """
        if not request.only_trims:
            self.supervisor.space.check()
        earlier = self._undecided.get(request.ref)
        decided = self._undecided[request.ref] = _Decision(earlier)
        try:
            return await self._submit_after(earlier, decided, request)
        finally:
            self._decide(request.ref, decided)

    def _decide(self, ref: StreamRef, decided: _Decision) -> None:
        decided.set()
        decided.earlier = decided.pending
        if self._undecided.get(ref) is decided:
            if decided.earlier is None:
                del self._undecided[ref]
            else:
                self._undecided[ref] = decided.earlier

    async def _submit_after(
        self, earlier: _Decision | None, decided: _Decision, request: AppendRequest
    ) -> asyncio.Future[AppendAck]:
        mounted = self.supervisor.current or await self.supervisor.mounted()
        first = _FirstAppend(self, mounted, earlier, decided, request)
        lease = await mounted.catalog.lease(
            request.ref, request.create_with, on_append=True, first=first
        )
        with lease as log:
            if first.ack is not None:
                return first.ack
            if earlier is not None:
                await earlier.all_made()
            decide = partial(self._decide, request.ref, decided)
            ack = await self.accept(mounted, log, request, decide)
        if isinstance(ack, Unrecorded):
            raise AssertionError("an append without a claim has records")
        return ack

    async def accept(
        self,
        mounted: MountedStore,
        log: StreamLog,
        request: AppendRequest,
        on_decided: Callable[[], None] = lambda: None,
    ) -> asyncio.Future[AppendAck] | Unrecorded:
        """Wait for room, then accept the append; the caller has a lease of `log`.

        Calls `on_decided` once it is accepted or refused; it raises a refusal when that is durable.
        """
        if read_only := mounted.mount.committer.read_only:
            raise read_only
        admission, metered = self.supervisor.admission, request.metered
        await admission.acquire(metered)
        now = self.now()
        try:
            # Here, because a stream may get a content type while this waits for room.
            if request.check is not None and log.row.traits is not None:
                for batch in request.batches:
                    request.check(log.terms.content_type, batch)
            ack = log.accept(request, now)
        except BaseException as error:
            admission.release(metered)
            on_decided()
            await settle_refusal(error, mounted, log)
            raise
        if isinstance(ack, Unrecorded):
            admission.release(metered)
        log.renew(now)
        mounted.mount.committer.touch(log)
        on_decided()
        return ack


class _FirstAppend:
    """Accepts an append to a stream that is being created for it, unless an earlier one waits.

    A class, because a function with as many variables of its caller is nine objects: with many
    creations at once, the garbage collector would look at all of them.
    """

    __slots__ = ("_appends", "_decided", "_earlier", "_mounted", "_request", "ack")

    def __init__(
        self,
        appends: Appends,
        mounted: MountedStore,
        earlier: _Decision | None,
        decided: _Decision,
        request: AppendRequest,
    ) -> None:
        self._appends = appends
        self._mounted = mounted
        self._earlier = earlier
        self._decided = decided
        self._request = request
        self.ack: asyncio.Future[AppendAck] | None = None

    def __call__(self, log: StreamLog) -> None:
        if self._earlier is not None and self._earlier.pending is not None:
            return
        self.ack = self._appends._accept_at_once(self._mounted, log, self._request)
        if self.ack is not None:
            self._appends._decide(self._request.ref, self._decided)


async def settle_refusal(error: BaseException, mounted: MountedStore, log: StreamLog) -> None:
    """Wait until the state that a refusal depends on is durable: clients may rely on it then."""
    if isinstance(error, ConditionFailedError | TermsError):
        await mounted.mount.settle(log)
    elif isinstance(error, StreamDeletingError | BasinDeletingError):
        await mounted.catalog.deletion(log.ref)
