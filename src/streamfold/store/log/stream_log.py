"""One active stream: sequences its appends, and knows which of them are durable.

Accepting is synchronous: one step checks an append against the newest accepted state and adds it to the
pending ones. So no lock is needed, and the order of the calls is the order of the records.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from streamfold.errors import (
    BasinDeletingError,
    FencingTokenMismatchError,
    InvalidError,
    KeyRequiredError,
    SeqNumMismatchError,
    StreamDeletingError,
    StreamfoldError,
    StreamNotFoundError,
)
from streamfold.model.configs import Cipher
from streamfold.model.names import StreamRef
from streamfold.model.positions import U64_MAX, StreamPosition
from streamfold.model.resources import Claim, StreamStatus, StreamTraits
from streamfold.records.batch import Fence, RecordBatch
from streamfold.records.rules import Slot
from streamfold.store import keys, rows
from streamfold.store.engine.engine import Op
from streamfold.store.log.admission import AppendRequest, Unrecorded
from streamfold.store.log.chunks import Chunk
from streamfold.store.log.retention import Expiry, Lifetime, TrimPoints, age_limit
from streamfold.store.log.sealing import GCM_SEQ_NUM_MAX, SealingKey
from streamfold.store.log.shares import Accepted, AppendAck, Attached, Share
from streamfold.store.log.tail_waiters import DurableWaiters, TailWaiters, Waiter, reject
from streamfold.store.log.terms import Terms
from streamfold.store.rows import CleanupRow, ProducerRow, StateRow, StreamRow, TailMark


class StreamLog:
    """The state of one stream; readers may see the records from `readable_from` to `durable`.

    Tens of thousands are in memory without being used, so this takes little: about 1 KiB.
    """

    __slots__ = (
        "_attached",
        "_cleaned_up",
        "_committing",
        "_expired",
        "_expiry",
        "_expiry_holds_until",
        "_fencing_token",
        "_last_arrival",
        "_last_timestamp",
        "_loop",
        "_next_seq_num",
        "_now",
        "_pending",
        "_seq_num_max",
        "_settlers",
        "_state_changed",
        "_tail_stored",
        "_tail_waiters",
        "_trim_changed",
        "_unsettled",
        "age_limit",
        "arrived_at",
        "basin",
        "basin_deleting",
        "deleting",
        "durable",
        "durable_closed",
        "failure",
        "id",
        "leases",
        "lifetime",
        "name",
        "ref",
        "row",
        "terms",
        "trims",
    )

    def __init__(
        self,
        ref: StreamRef,
        row: StreamRow,
        state: StateRow,
        tail: StreamPosition,
        arrived_at: int,
        now: Callable[[], int],
        producers: dict[str, ProducerRow] | None = None,
        trim_grace: int = 0,
    ) -> None:
        self.ref = ref
        self.basin, self.name = ref
        self.id = row.id
        self.row = row
        self._seq_num_max = GCM_SEQ_NUM_MAX if row.cipher is Cipher.AES_256_GCM else U64_MAX
        self.durable = tail
        #: `trim_grace` in ms.
        self.trims = TrimPoints.at(state.trim_point, trim_grace, now)
        #: Milliseconds after its arrival for which a record is kept; None = no limit.
        self.age_limit = age_limit(row.config)
        # Nothing that a stream wrote itself arrived before it was created.
        self._expiry = Expiry(self.age_limit or 0, 0, 0 if row.lineage else row.created_at)
        #: Every record below is too old; valid until `_expiry_holds_until`.
        self._expired = 0
        self._expiry_holds_until = self._expiry.holds_until(self.age_limit)
        #: When the last record arrived, or the stream was created; ms since the Unix epoch.
        self.arrived_at = arrived_at
        #: Whether the stream takes no more appends and reads, because it or its basin is deleted.
        self.deleting = row.deleted_at is not None
        self.basin_deleting = False
        #: Whether the close is durable, so that readers may learn of it.
        self.durable_closed = state.closed
        self.terms = Terms.of(self.name, row.traits, state, producers or {})
        self.lifetime = Lifetime.of(row.traits, state.lease_until)
        self._now = now
        #: Leases that keep this object in memory.
        self.leases = 0
        #: Set once this object no longer represents the stream.
        self.failure: StreamfoldError | None = None
        self._next_seq_num = int(tail.seq_num)
        self._last_timestamp = int(tail.timestamp)
        #: Of the last accepted record. A clock that goes back must not make records look old:
        #: retention would remove them, and all before them.
        self._last_arrival = arrived_at
        self._fencing_token = state.fencing_token
        #: Whether the stored state row has the tail; rows of format 3 and earlier do not.
        self._tail_stored = state.tail is not None
        self._state_changed = False
        self._trim_changed = False
        self._cleaned_up = False
        # Looked up once: each lookup is a system call in Python 3.11.
        self._loop = asyncio.get_running_loop()
        #: None while there is nothing pending, and nobody who waits: most logs are idle.
        self._pending: list[Accepted] | None = None
        self._unsettled = 0
        #: Shares of this log in commits that are not durable yet.
        self._committing = 0
        #: Rows that the next commit of this log carries for callers.
        self._attached: list[Attached] | None = None
        self._settlers: DurableWaiters | None = None
        #: None before the first follower.
        self._tail_waiters: TailWaiters | None = None

    @property
    def idle(self) -> bool:
        """Whether this object can be dropped and read from storage again without effect."""
        used = self.leases or self._tail_waiters or self.trims.due_at is not None
        pending = self._unsettled or self._state_changed or self._cleaned_up or self._attached
        return not used and not pending and not self.terms.changed and not self._committing

    @property
    def empty(self) -> bool:
        """Whether the stream has no readable record, and none is pending."""
        return self.readable_from >= self._next_seq_num

    @property
    def unused(self) -> bool:
        """Whether the stream never had a record, and none is pending."""
        return not self._next_seq_num

    @property
    def readable_from(self) -> int:
        """The first record that a reader may get: not trimmed, and not too old at the last check."""
        effective = self.trims.effective
        return effective if effective > self._expired else self._expired

    @property
    def retained_from(self) -> int:
        """The first record that is kept: readers may get some before it, but not for long."""
        return max(self.trims.durable, self._expired)

    def hide_expired(self) -> bool:
        """Hide what has become too old; False if only storage tells what (`apply_retention`)."""
        now = self._now()
        return now <= self._expiry_holds_until or self._move_expiry(now)

    def _move_expiry(self, now: int) -> bool:
        limit = self.age_limit
        if limit is None or limit != self._expiry.limit:
            return False
        moved = self._expiry.moved(now - limit)
        if moved is not None:
            self.expire(moved)
        return moved is not None

    def replace_row(self, row: StreamRow) -> None:
        """Apply a changed row, which is durable, or is committed next."""
        self.row = row
        self.deleting = self.basin_deleting or row.deleted_at is not None
        self.age_limit = age_limit(row.config)
        self._apply_expiry()

    @property
    def oldest_arrival(self) -> int:
        """No record from `readable_from` on arrived before this; ms since the Unix epoch."""
        return self._expiry.oldest

    def expire(self, expiry: Expiry) -> None:
        """Hide records that are too old; they stay in storage until they are trimmed."""
        if expiry.limit != self._expiry.limit or expiry.seq_num >= self._expiry.seq_num:
            self._expiry = expiry
            self._apply_expiry()

    def _apply_expiry(self) -> None:
        """Cache what every batch of every follower needs."""
        self._expiry_holds_until = self._expiry.holds_until(self.age_limit)
        self._expired = self._expiry.seq_num if self._expiry.limit == self.age_limit else 0

    def accept(self, request: AppendRequest, now: int) -> asyncio.Future[AppendAck] | Unrecorded:
        """Give the batches of `request` their slots in the stream, or raise and change nothing.

        The future resolves when they are durable. A refusal may depend on state that is not durable
        yet: wait for `settled` before passing it on.
        """
        if self.failure is not None or self.deleting or self.lifetime.deadline is not None:
            self.check_alive()
        if self.row.cipher is not None:
            self.check_key(request.key)
        if request.claim is not None:
            if self.terms.repeats(request.claim, now):
                return Unrecorded.REPEATED
        elif self.terms.closed:
            self.terms.check_open()
        token, expected = request.fencing_token, request.match_seq_num
        if token is not None and token != self._fencing_token:
            raise FencingTokenMismatchError(token, self._fencing_token)
        if expected is not None and expected != self._next_seq_num:
            raise SeqNumMismatchError(expected, self._next_seq_num)
        batches = request.batches
        if len(batches) == 1 and request.claim is None:
            # The same as `apply`, in fewer steps: nearly all appends are like this.
            batch = batches[0]
            if self._next_seq_num + batch.count <= self._seq_num_max:
                return self._sequence(batch, request.key, now)
        return self.apply(request, now)

    def repeats(self, claim: Claim, key: SealingKey | None, now: int) -> bool:
        """Whether an append with this `claim` was accepted before; raises if it would be refused."""
        self.check_alive()
        self.check_key(key)
        return self.terms.repeats(claim, now)

    def apply(self, request: AppendRequest, now: int) -> asyncio.Future[AppendAck] | Unrecorded:
        """What `accept` does when nothing speaks against it."""
        if self._next_seq_num + request.count > self._seq_num_max:
            raise InvalidError(
                f"stream {self.name!r} has no sequence numbers left: {self._seq_num_max} is its "
                "last; append to a new stream"
            )
        ack = None
        for batch in request.batches:
            ack = self._sequence(batch, request.key, now)
        if request.claim is not None:
            self._apply_claim(request.claim, now)
        return Unrecorded.TERMS if ack is None else ack

    def _apply_claim(self, claim: Claim, now: int) -> None:
        first_producer = claim.producer is not None and not self.terms.has_producers
        if claim.close or claim.stream_seq is not None or first_producer:
            self._state_changed = True
        self.terms.apply(claim, now)

    def write_state(self) -> None:
        """Have the next commit write the state row, whether or not it changed."""
        self._state_changed = True

    def renew(self, now: int) -> bool:
        """Extend the stream's lifetime because it is used; True when a commit must store that."""
        if self.lifetime.deadline is None or not self.lifetime.renew(now):
            return False
        self._state_changed = True
        return True

    def _sequence(
        self, batch: RecordBatch, key: SealingKey | None, now: int
    ) -> asyncio.Future[AppendAck]:
        first, count = self._next_seq_num, batch.count
        config = self.row.config
        slot = Slot(
            first, config.timestamp_mode, config.timestamp_uncapped, now, self._last_timestamp
        )
        sequenced = batch.sequence(slot)
        # Nothing below can fail.
        if batch.commands:
            self._apply_commands(batch, first)
        self._next_seq_num = first + count
        self._last_timestamp = last_timestamp = sequenced.last_timestamp
        if now > self._last_arrival:
            self._last_arrival = now
        chunk = Chunk(
            first,
            count,
            batch.metered,
            sequenced.first_timestamp,
            last_timestamp,
            self._last_arrival,
            sequenced.payload,
        )
        ack: asyncio.Future[AppendAck] = self._loop.create_future()
        accepted = Accepted(chunk, ack, key if self.row.cipher else None)
        if self._pending is None:
            self._pending = [accepted]
        else:
            self._pending.append(accepted)
        self._unsettled += 1
        return ack

    def check_key(self, key: SealingKey | None) -> None:
        """Raise if the stream is encrypted and there is no key."""
        if self.row.cipher is not None and key is None:
            raise KeyRequiredError(self.row.cipher)

    def _apply_commands(self, batch: RecordBatch, first: int) -> None:
        for command in batch.commands:
            if isinstance(command, Fence):
                self._fencing_token = command.token
                self._state_changed = True
            else:
                self._trim(min(command.seq_num, first + command.index + 1), at_once=False)

    def trim(self, seq_num: int) -> None:
        """Trim everything below `seq_num`; it takes effect for readers with the next commit."""
        self._trim(seq_num, at_once=True)

    def _trim(self, seq_num: int, *, at_once: bool) -> None:
        if self.trims.accept(seq_num, at_once=at_once):
            self._state_changed = self._trim_changed = True

    def store_tail(self) -> None:
        """Have the next commit store the tail if only chunks have it: they may be deleted then."""
        if not self._tail_stored:
            self._state_changed = True

    def attach(self, rows: Sequence[Op]) -> asyncio.Future[None]:
        """Commit `rows` together with everything pending, all of it or nothing; done when durable."""
        attached = Attached(rows, self._loop.create_future())
        self._attached = [*(self._attached or ()), attached]
        return attached.done

    def delete_with_basin(self) -> None:
        """Refuse all appends and reads from now on: the stream's basin is being deleted."""
        self.deleting = self.basin_deleting = True
        self.dismiss(BasinDeletingError(self.basin))

    def clean_up_done(self) -> None:
        """Have the next commit remove the clean-up row, unless it carries another trim."""
        self._cleaned_up = True

    @property
    def status(self) -> StreamStatus:
        """What is durable of the stream."""
        traits, tail = self.row.traits or StreamTraits(), int(self.durable.seq_num)
        return StreamStatus(self.id, traits, self.retained_from, tail, self.durable_closed)

    @property
    def over(self) -> bool:
        """Whether the stream is deleted or has expired."""
        deadline = self.lifetime.deadline
        return self.deleting or (deadline is not None and deadline <= self._now())

    def check_alive(self) -> None:
        """Raise unless this object represents a stream that takes appends and reads."""
        if self.failure is not None:
            raise self.failure.with_traceback(None)
        if self.basin_deleting:
            raise BasinDeletingError(self.basin)
        if self.deleting:
            raise StreamDeletingError(self.basin, self.name)
        if self.lifetime.deadline is not None and self.over:
            raise StreamNotFoundError(self.basin, self.name)

    async def settled(self) -> None:
        """Return once everything accepted so far is durable; raise if that failed."""
        if self._unsettled:
            if self._settlers is None:
                self._settlers = DurableWaiters(self._loop)
            # Not until nothing is pending: on a busy stream, something always is.
            await self._settlers.wait_for(self._next_seq_num)

    def waiter(self) -> Waiter:
        """A waiter for a caller of `advanced`; close it afterwards."""
        if self._tail_waiters is None:
            self._tail_waiters = TailWaiters(self._loop)
        return Waiter(self._tail_waiters, self._loop)

    async def advanced(self, seq_num: int, waiter: Waiter, max_wait: float | None) -> bool:
        """Wait for a durable record at or after `seq_num`; False when time ran out.

        Returns True, too, when the stream is closed: nothing more can come.
        """
        self.check_alive()
        while self.durable.seq_num <= seq_num and not self.durable_closed:
            try:
                if not await waiter.wait(max_wait):
                    return False
            finally:
                waiter.stop_waiting()
        return True

    # Called by the committer

    def take(self) -> Share:
        """Hand over everything pending as this stream's share of a commit."""
        taken, self._pending = self._pending or [], None
        ops: list[Op] = []
        if taken or self._state_changed:
            ops.append((keys.state(self.id), rows.encode(self._state_row())))
            self._tail_stored = True
        if self.terms.changed:
            ops += self.terms.take_changes(self.id)
        if self._trim_changed:
            ops.append((keys.cleanup(self.id), rows.encode(CleanupRow(self.basin, self.name))))
        elif self._cleaned_up:
            ops.append((keys.cleanup(self.id), None))
        attached, self._attached = self._attached or [], None
        for rows_of_caller in attached:
            ops += rows_of_caller.rows
        share = Share(
            self,
            taken,
            self.trims.accepted,
            self.trims.accepted_at_once,
            self._trim_changed,
            self.terms.closed,
            ops,
            taken[0].chunk.metered
            if len(taken) == 1
            else sum([accepted.chunk.metered for accepted in taken]),
            attached,
        )
        self._state_changed = self._trim_changed = self._cleaned_up = False
        self._committing += 1
        return share

    def _state_row(self) -> StateRow:
        """The accepted state: `take` commits it together with the records that lead to it."""
        return StateRow(
            fencing_token=self._fencing_token,
            trim_point=self.trims.accepted,
            tail=TailMark(self._next_seq_num, self._last_timestamp, self._last_arrival),
            closed=self.terms.closed,
            closed_by=self.terms.closed_by,
            stream_seq=self.terms.stream_seq,
            producers=self.terms.has_producers,
            lease_until=self.lifetime.lease_until,
        )

    def settle(self, share: Share) -> None:
        """Acknowledge what `share` carried: it is durable now."""
        chunks, batches = share.chunks, share.batches
        self._committing -= 1
        if chunks:
            newest = chunks[-1]
            self.durable = newest.end
            self.arrived_at = newest.arrived_at
        if share.trimmed:
            self.trims.settle(share.trim_point, share.trim_point_at_once)
        self._unsettled -= len(batches)
        tail = self.durable
        for accepted in batches:
            ack = accepted.ack
            if not ack.done():
                chunk = accepted.chunk
                end = tail if accepted is batches[-1] else chunk.end
                ack.set_result(AppendAck(chunk.start, end, tail))
        if self._settlers is not None and not self._settlers.wake(tail.seq_num):
            self._settlers = None
        if chunks or (share.closed and not self.durable_closed):
            self.durable_closed = share.closed
            if self._tail_waiters is not None:
                self._tail_waiters.wake()

    def fail(
        self, written: Sequence[Share], unknown: StreamfoldError, unsent: StreamfoldError
    ) -> int:
        """Give up: `written` may or may not be durable, what is pending certainly is not.

        Returns the metered bytes that this frees.
        """
        self.failure = unsent
        pending, self._pending = self._pending or [], None
        attached, self._attached = self._attached or [], None
        settlers, self._settlers = self._settlers, None
        for share in written:
            for accepted in share.batches:
                reject(accepted.ack, unknown)
            for rows_of_caller in share.attached:
                reject(rows_of_caller.done, unknown)
        for accepted in pending:
            reject(accepted.ack, unsent)
        for rows_of_caller in attached:
            reject(rows_of_caller.done, unsent)
        if settlers is not None:
            settlers.fail(unknown)
        self.dismiss(unsent)
        return sum(share.metered for share in written) + sum(
            accepted.chunk.metered for accepted in pending
        )

    def dismiss(self, error: StreamfoldError) -> None:
        """Raise `error` in all followers: nothing more will come."""
        if self._tail_waiters is not None:
            self._tail_waiters.fail_all(error)
