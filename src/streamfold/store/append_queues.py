"""Queues appends per stream, so that each stream accepts them in call order.

append ─▶ stream queue ─▶ load or create stream ─▶ content ─▶ room ─▶ accepted ─▶ durable

An append that needs to wait for nothing and is first in its queue is accepted synchronously.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from itertools import count
from time import perf_counter
from typing import Any, Final, TypeAlias

import msgspec

from streamfold.errors import (
    BasinDeletingError,
    ConditionFailedError,
    StreamDeletingError,
    StreamfoldError,
    StreamForkedError,
    StreamNotFoundError,
    TermsError,
    TooLargeError,
)
from streamfold.model.names import StreamRef
from streamfold.store import keys
from streamfold.store.engine.engine import first_row
from streamfold.store.log.admission import AppendRequest
from streamfold.store.log.log_leases import LogLease
from streamfold.store.log.shares import AppendAck
from streamfold.store.log.stream_log import StreamLog
from streamfold.store.log.tail_waiters import reject
from streamfold.store.rows import ProducerRow
from streamfold.store.supervisor import MountedStore, Supervisor

#: Computes the ack or error of an append once a commit is durable.
_Outcome: TypeAlias = Callable[[], Awaitable[AppendAck | Exception]]
#: Appends that one queue handles before it yields to the event loop: about a millisecond.
_YIELD_AFTER: Final = 64
#: The queue of a stream whose only waiting append is already being handled.
_NO_QUEUE: Final[OrderedDict[Submission, None]] = OrderedDict()
#: Maximum metered bytes of one append; below the default `inflight_bytes`.
APPEND_BYTES_MAX: Final = 32 << 20


class AppendOutcome(msgspec.Struct, frozen=True):
    """A durable append."""

    #: Whether it repeats an earlier append, so that it wrote nothing.
    repeated: bool
    tail: int
    closed: bool
    #: The producer's progress.
    producer: ProducerRow | None


class Submission(msgspec.Struct, eq=False):
    """An append in flight: queued in its stream, then accepted, then durable; or rejected.

    Cancelling `ack` withdraws an append that is not accepted yet. An accepted append is stored
    whether or not anyone waits for its ack.
    """

    #: Resolves when the append is durable. Raises if it was rejected or its outcome is unknown.
    ack: asyncio.Future[AppendAck]
    #: The request, until it is accepted or rejected; a future while the request is being built.
    request: AppendRequest | asyncio.Future[AppendRequest] | None
    #: `time.perf_counter` at submission and at acceptance; None before acceptance.
    submitted_at: float
    accepted_at: float | None = None
    #: Metered bytes, set on acceptance.
    metered: int = 0
    #: Whether it repeats an earlier append, so that nothing is written.
    repeated: bool = False
    #: Whether it closes the stream.
    closed: bool = False
    #: The producer's progress after this append.
    producer: ProducerRow | None = None
    #: Wakes the caller of `decided`.
    decision: asyncio.Future[None] | None = None
    #: The future that the queue awaits on behalf of this append alone.
    step: asyncio.Future[Any] | None = None

    async def decided(self) -> bool:
        """Wait until the append is accepted or rejected. Returns whether it was accepted.

        Cancelling the caller withdraws the append.
        """
        if self.request is not None:
            self.decision = self.ack.get_loop().create_future()
            try:
                await self.decision
            except asyncio.CancelledError:
                if self.request is not None:
                    self.ack.cancel()
                raise
        return self.accepted_at is not None

    async def appended(self) -> AppendOutcome:
        """Wait until the append is durable."""
        try:
            ack = await self.ack
        except BaseException:
            del self  # the error refers to this call, and is in the ack
            raise
        return AppendOutcome(self.repeated, int(ack.end.seq_num), self.closed, self.producer)

    def withdraw(self, error: StreamfoldError) -> None:
        """Fail the ack with `error`, unless the append was already accepted or rejected."""
        if self.request is not None:
            reject(self.ack, error)

    def close(self) -> None:
        """Drop the request, once accepted, rejected or withdrawn, and cancel all work for it."""
        request, self.request = self.request, None
        if self.step is not None:
            self.step.cancel()
        if request is not None:
            work = request.content if isinstance(request, AppendRequest) else request
            if isinstance(work, asyncio.Future) and not work.cancel() and not work.cancelled():
                work.exception()  # marks it as retrieved
        if self.decision is not None and not self.decision.done():
            self.decision.set_result(None)


class AppendQueues:
    """Accepts appends to each stream in the order of the calls."""

    def __init__(self, supervisor: Supervisor, now: Callable[[], int]) -> None:
        self._supervisor = supervisor
        self._now = now
        self._loop = asyncio.get_running_loop()
        #: Appends that wait behind another append to their stream. `_NO_QUEUE` if none waits.
        self._queues: dict[StreamRef, OrderedDict[Submission, None]] = {}
        #: Referenced here, because the event loop keeps no reference to them.
        self._tasks: set[asyncio.Task[None]] = set()

    def append(
        self, ref: StreamRef, request: AppendRequest | asyncio.Future[AppendRequest]
    ) -> Submission:
        """Submit an append, which is accepted after all appends submitted before it."""
        submission = Submission(self._loop.create_future(), request, perf_counter())
        queue = self._queues.get(ref)
        if queue is None:
            mounted = self._supervisor.current
            if mounted is not None:
                log = mounted.mount.log_in_memory(ref)
                if log is not None and self._accept_at_once(mounted, submission, log):
                    return submission
            self._queues[ref] = _NO_QUEUE
            self._start(self._work(ref, submission))
        elif queue is _NO_QUEUE:
            self._queues[ref] = OrderedDict({submission: None})
        else:
            queue[submission] = None
        submission.ack.add_done_callback(partial(self._forget_withdrawn, ref, submission))
        return submission

    def _accept_at_once(
        self, mounted: MountedStore, submission: Submission, log: StreamLog
    ) -> bool:
        """Accept the append synchronously. Returns False if it has to wait or would be rejected."""
        request, supervisor = submission.request, self._supervisor
        if not isinstance(request, AppendRequest) or isinstance(request.content, asyncio.Future):
            return False
        if supervisor.space.full or mounted.mount.committer.read_only is not None:
            return False
        now = self._now()
        try:
            if log.check(request, now):
                return False
            if request.content is not None:
                request.batches, request.content = request.content(), None
            if request.check is not None and log.row.traits is not None:
                _check_content(request, log)
            metered = request.metered
            if metered > APPEND_BYTES_MAX or not supervisor.admission.acquire_at_once(metered):
                return False
            self._accept(mounted, submission, request, log, metered, now)
        except StreamfoldError:
            return False
        return True

    def _accept(
        self,
        mounted: MountedStore,
        submission: Submission,
        request: AppendRequest,
        log: StreamLog,
        metered: int,
        now: int,
    ) -> None:
        """Assign slots to the batches. Admission has reserved room; an error releases it."""
        try:
            log.accept(request, now, submission.ack)
        except BaseException:
            self._supervisor.admission.release(metered)
            raise
        submission.accepted_at, submission.metered = perf_counter(), metered
        submission.request = None
        if submission.decision is not None:
            submission.close()
        log.renew(now)
        mounted.mount.committer.touch(log)
        if (claim := request.claim) is not None:
            submission.closed = claim.close
            if claim.producer is not None:
                # Read now: appends accepted later may not be durable when this one is.
                submission.producer = log.terms.producer(claim.producer.id)
            if not request.batches:
                self._resolve(submission, partial(_stored_terms, mounted, submission, log))

    async def _work(self, ref: StreamRef, submission: Submission) -> None:
        """Accept or reject the stream's appends in order until the queue is empty."""
        for number in count(1):
            if not submission.ack.done():
                await self._decide(ref, submission)
            submission.close()
            if not number % _YIELD_AFTER:
                await asyncio.sleep(0)
            queue = self._queues[ref]
            if not queue:
                del self._queues[ref]
                return
            submission, _ = queue.popitem(last=False)

    async def _decide(self, ref: StreamRef, submission: Submission) -> None:
        """Accept an append, or fail its ack."""
        try:
            await self._take(ref, submission)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            submission.ack.cancel()  # if not the append, then its content was cancelled
        except Exception as error:
            reject(submission.ack, _without_frames(error))

    async def _take(self, ref: StreamRef, submission: Submission) -> None:
        """Accept a stream's first append. Raises if it is rejected, or fails its ack later."""
        if isinstance(submission.request, asyncio.Future):
            made = await submission.request
            if submission.ack.done():
                return  # it was withdrawn just as its request was built
            submission.request = made
        if not isinstance(request := submission.request, AppendRequest):
            return
        if request.content is None:
            self._check_room(request)
        create_with = request.create_with
        del request  # it may be withdrawn
        mounted = self._supervisor.current or await self._supervisor.mounted()
        # Accepts the append in the commit that creates the stream.
        first = partial(self._accept_at_once, mounted, submission)
        with await mounted.catalog.lease_to_append(ref, create_with, first) as log:
            if isinstance(request := submission.request, AppendRequest):
                try:
                    await self._accept_in_turn(mounted, submission, request, log)
                except StreamfoldError as error:
                    refusal = _without_frames(error)
                    self._resolve(submission, partial(_settled, mounted, log, refusal))

    async def _accept_in_turn(
        self,
        mounted: MountedStore,
        submission: Submission,
        request: AppendRequest,
        log: StreamLog,
    ) -> None:
        """Accept the append once its content is built and there is room for it."""
        if request.claim is not None:
            if log.failure is not None:
                raise log.failure
            if log.over:
                self._resolve(submission, partial(ended, mounted, log))
                return
            if self._repeats(mounted, submission, request, log):
                return
        if request.content is not None:
            content = request.content
            made = await content if isinstance(content, asyncio.Future) else content()
            request.batches, request.content = made, None
            self._check_room(request)
        metered, admission = request.metered, self._supervisor.admission
        if metered > APPEND_BYTES_MAX:
            raise TooLargeError(
                f"an append of {metered} bytes is too large: send at most {APPEND_BYTES_MAX}"
            )
        if read_only := mounted.mount.committer.read_only:
            raise read_only
        if not admission.acquire_at_once(metered):
            submission.step = asyncio.ensure_future(admission.acquire(metered))
            await submission.step
            submission.step = None
        if submission.ack.done():
            admission.release(metered)  # it was withdrawn
            return
        try:
            repeated = self._repeats(mounted, submission, request, log)
            # Checked here, because the stream may get a content type while this waits for room.
            _check_content(request, log)
        except BaseException:
            admission.release(metered)
            raise
        if repeated:
            admission.release(metered)
        else:
            self._accept(mounted, submission, request, log, metered, self._now())

    def _check_room(self, request: AppendRequest) -> None:
        """Raise StorageFullError if the disk has no room for more records."""
        if not request.only_trims:
            self._supervisor.space.check()

    def _repeats(
        self,
        mounted: MountedStore,
        submission: Submission,
        request: AppendRequest,
        log: StreamLog,
    ) -> bool:
        """Return whether the append repeats an earlier one, and if so resolve it.

        Raises if rejected.
        """
        now = self._now()
        if not log.check(request, now):
            return False
        submission.repeated = True
        if request.claim is not None and request.claim.producer is not None:
            submission.producer = log.terms.producer(request.claim.producer.id)
        log.renew(now)
        self._resolve(submission, partial(_stored_terms, mounted, submission, log))
        return True

    def _resolve(self, submission: Submission, outcome: _Outcome) -> None:
        """Resolve the ack with an outcome that waits for a commit, without blocking the queue."""
        task = self._start(_resolve(submission.ack, outcome))
        submission.ack.add_done_callback(lambda _: task.cancel())

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _forget_withdrawn(
        self, ref: StreamRef, submission: Submission, ack: asyncio.Future[AppendAck]
    ) -> None:
        """Drop an append whose ack was resolved before it was accepted or rejected."""
        if submission.request is not None:
            submission.close()
            self._queues[ref].pop(submission, None)


def _check_content(request: AppendRequest, log: StreamLog) -> None:
    """Raise if the stream's content type does not allow the batches."""
    if request.check is not None and log.row.traits is not None:
        for batch in request.batches:
            request.check(log.terms.content_type, batch)


def _without_frames(error: Exception) -> Exception:
    """Strip a rejection's traceback, whose frames refer back to it. A bug keeps its traceback."""
    return error.with_traceback(None) if isinstance(error, StreamfoldError) else error


async def _resolve(ack: asyncio.Future[AppendAck], outcome: _Outcome) -> None:
    try:
        result = await outcome()
    except Exception as error:
        reject(ack, _without_frames(error))
        return
    if isinstance(result, Exception):
        reject(ack, result)
    elif not ack.done():
        ack.set_result(result)


async def _stored_terms(mounted: MountedStore, submission: Submission, log: StreamLog) -> AppendAck:
    """Return the ack of an append without records, once the state it depends on is durable."""
    with LogLease(log):
        await mounted.mount.committer.write_with(log)
        submission.closed, tail = log.durable_closed, log.durable
    return AppendAck(tail, tail, tail)


async def _settled(mounted: MountedStore, log: StreamLog, refusal: Exception) -> Exception:
    with LogLease(log):
        await settle_refusal(refusal, mounted, log)
    return refusal


async def settle_refusal(error: BaseException, mounted: MountedStore, log: StreamLog) -> None:
    """Wait until the state behind a rejection is durable, so that clients may rely on it."""
    if isinstance(error, ConditionFailedError | TermsError):
        await mounted.mount.settle(log)
    elif isinstance(error, StreamDeletingError | BasinDeletingError):
        await mounted.catalog.deletion(log.ref)


async def ended(mounted: MountedStore, log: StreamLog) -> StreamfoldError:
    """Return why a deleted or expired stream cannot be used, once the deletion is durable."""
    with LogLease(log):
        await mounted.catalog.deletion(log.ref)
    if log.basin_deleting:
        return BasinDeletingError(log.basin)
    if await first_row(mounted.mount.engine, *keys.forks_span(log.id)) is not None:
        return StreamForkedError(*log.ref)
    return StreamNotFoundError(*log.ref)
