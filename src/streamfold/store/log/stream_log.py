"""One active stream: sequences its appends and tracks which are durable.

Accepting is synchronous: one step checks an append against the newest accepted state and adds it to
the pending appends. So no lock is needed, and records are in call order.
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
from streamfold.store.log.admission import AppendRequest
from streamfold.store.log.chunks import Chunk
from streamfold.store.log.retention import Expiry, Lifetime, TrimPoints, age_limit
from streamfold.store.log.sealing import GCM_SEQ_NUM_MAX, SealingKey
from streamfold.store.log.shares import Accepted, AppendAck, Attached, Share
from streamfold.store.log.tail_waiters import DurableWaiters, TailWaiters, Waiter, reject
from streamfold.store.log.terms import Terms
from streamfold.store.rows import CleanupRow, ProducerRow, StateRow, StreamRow, TailMark


class StreamLog:
    """The state of one stream. Readers see the records from `readable_from` to `durable`.

    Kept small, about 1 KiB, because tens of thousands of idle logs are in memory.
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
        #: `trim_grace` is in ms.
        self.trims = TrimPoints.at(state.trim_point, trim_grace, now)
        #: Milliseconds for which a record is kept after its arrival; None = no limit.
        self.age_limit = age_limit(row.config)
        # No record that the stream wrote itself arrived before its creation.
        self._expiry = Expiry(self.age_limit or 0, 0, 0 if row.lineage else row.created_at)
        #: Every record below this has expired. Valid until `_expiry_holds_until`.
        self._expired = 0
        self._expiry_holds_until = self._expiry.holds_until(self.age_limit)
        #: When the last record arrived or the stream was created, in ms since the Unix epoch.
        self.arrived_at = arrived_at
        #: Whether the stream rejects appends and reads because it or its basin is deleted.
        self.deleting = row.deleted_at is not None
        self.basin_deleting = False
        #: Whether the close is durable, so that readers may see it.
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
        #: Arrival of the last accepted record. A clock that moves back must not make records look
        #: old: retention would remove them and all records before them.
        self._last_arrival = arrived_at
        self._fencing_token = state.fencing_token
        #: Whether the stored state row contains the tail. Rows of format 3 and earlier do not.
        self._tail_stored = state.tail is not None
        self._state_changed = False
        self._trim_changed = False
        self._cleaned_up = False
        # Looked up once, because each lookup is a system call in Python 3.11.
        self._loop = asyncio.get_running_loop()
        #: None while nothing is pending, as in most logs, which are idle.
        self._pending: list[Accepted] | None = None
        self._unsettled = 0
        #: Number of shares of this log in commits that are not durable yet.
        self._committing = 0
        #: Callers' rows for the next commit of this log.
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
        """The first readable record: not trimmed, and not expired at the last check."""
        return not self._next_seq_num

    @property
    def readable_from(self) -> int:
        """The first retained record. Readers may briefly get some records before it."""
        effective = self.trims.effective
        return effective if effective > self._expired else self._expired

    @property
    def retained_from(self) -> int:
        """The first record that is kept: readers may get some before it, but not for long."""
        return max(self.trims.durable, self._expired)

    def hide_expired(self) -> bool:
        """Hide expired records. Returns False if that requires storage (`apply_retention`)."""
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
        """Apply a changed row, which is durable or in the next commit."""
        self.row = row
        self.deleting = self.basin_deleting or row.deleted_at is not None
        self.age_limit = age_limit(row.config)
        self._apply_expiry()

    @property
    def oldest_arrival(self) -> int:
        """No record from `readable_from` on arrived before this; ms since the Unix epoch."""
        return self._expiry.oldest

    def expire(self, expiry: Expiry) -> None:
        """Hide expired records. They stay on storage until trimmed."""
        if expiry.limit != self._expiry.limit or expiry.seq_num >= self._expiry.seq_num:
            self._expiry = expiry
            self._apply_expiry()

    def _apply_expiry(self) -> None:
        """Cache the values that every batch of every follower needs."""
        self._expiry_holds_until = self._expiry.holds_until(self.age_limit)
        self._expired = self._expiry.seq_num if self._expiry.limit == self.age_limit else 0

    def check(self, request: AppendRequest, now: int) -> bool:
        """Raise if the append is rejected. Returns whether it repeats an earlier accepted append.

        A rejection may depend on state that is not durable yet: await `settled` before reporting
        it.
        """
        if self.failure is not None or self.deleting or self.lifetime.deadline is not None:
            self.check_alive()
        if self.row.cipher is not None:
            self.check_key(request.key)
        if request.claim is not None:
            if self.terms.repeats(request.claim, now):
                return True
        elif self.terms.closed:
            self.terms.check_open()
        token, expected = request.fencing_token, request.match_seq_num
        if token is not None and token != self._fencing_token:
            raise FencingTokenMismatchError(token, self._fencing_token)
        if expected is not None and expected != self._next_seq_num:
            raise SeqNumMismatchError(expected, self._next_seq_num)
        return False

    def accept(
        self, request: AppendRequest, now: int, ack: asyncio.Future[AppendAck] | None = None
    ) -> None:
        """Assign slots to the batches of a request that passed `check`.

        `ack` resolves when the last batch is durable. Without batches, it does not resolve.
        """
        batches = request.batches
        if len(batches) == 1 and request.claim is None:
            # Same as below, in fewer steps, for nearly all appends.
            batch = batches[0]
            if self._next_seq_num + batch.count <= self._seq_num_max:
                self._sequence(batch, request.key, now, ack)
                return
        if self._next_seq_num + request.count > self._seq_num_max:
            raise InvalidError(
                f"stream {self.name!r} has no sequence numbers left: {self._seq_num_max} is its "
                "last; append to a new stream"
            )
        for batch in batches[:-1]:
            self._sequence(batch, request.key, now, None)
        if batches:
            self._sequence(batches[-1], request.key, now, ack)
        if request.claim is not None:
            self._apply_claim(request.claim, now)

    def _apply_claim(self, claim: Claim, now: int) -> None:
        first_producer = claim.producer is not None and not self.terms.has_producers
        if claim.close or claim.stream_seq is not None or first_producer:
            self._state_changed = True
        self.terms.apply(claim, now)

    def write_state(self) -> None:
        """Make the next commit write the state row, even if unchanged."""
        self._state_changed = True

    def renew(self, now: int) -> bool:
        """Extend the lifetime of a stream in use. Returns whether a commit must store that."""
        if self.lifetime.deadline is None or not self.lifetime.renew(now):
            return False
        self._state_changed = True
        return True

    def _sequence(
        self,
        batch: RecordBatch,
        key: SealingKey | None,
        now: int,
        ack: asyncio.Future[AppendAck] | None,
    ) -> None:
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
        accepted = Accepted(chunk, ack, key if self.row.cipher else None)
        if self._pending is None:
            self._pending = [accepted]
        else:
            self._pending.append(accepted)
        self._unsettled += 1

    def check_key(self, key: SealingKey | None) -> None:
        """Raise if the stream is encrypted and `key` is None."""
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
        """Trim everything below `seq_num`. Takes effect for readers with the next commit."""
        self._trim(seq_num, at_once=True)

    def _trim(self, seq_num: int, *, at_once: bool) -> None:
        if self.trims.accept(seq_num, at_once=at_once):
            self._state_changed = self._trim_changed = True

    def store_tail(self) -> None:
        """Have the next commit store the tail if only chunks have it: they may be deleted then."""
        if not self._tail_stored:
            self._state_changed = True

    def attach(self, rows: Sequence[Op]) -> asyncio.Future[None]:
        """Commit `rows` atomically with everything pending.

        The future resolves when they are durable.
        """
        attached = Attached(rows, self._loop.create_future())
        self._attached = [*(self._attached or ()), attached]
        return attached.done

    def delete_with_basin(self) -> None:
        """Reject all appends and reads from now on, because the stream's basin is being deleted."""
        self.deleting = self.basin_deleting = True
        self.dismiss(BasinDeletingError(self.basin))

    def clean_up_done(self) -> None:
        """Make the next commit remove the clean-up row, unless it carries another trim."""
        self._cleaned_up = True

    @property
    def status(self) -> StreamStatus:
        """The durable state of the stream."""
        traits, tail = self.row.traits or StreamTraits(), int(self.durable.seq_num)
        return StreamStatus(self.id, traits, self.retained_from, tail, self.durable_closed)

    @property
    def over(self) -> bool:
        """Whether the stream is deleted or has expired."""
        deadline = self.lifetime.deadline
        return self.deleting or (deadline is not None and deadline <= self._now())

    def check_alive(self) -> None:
        """Raise unless this object represents a stream that accepts appends and reads."""
        if self.failure is not None:
            raise self.failure.with_traceback(None)
        if self.basin_deleting:
            raise BasinDeletingError(self.basin)
        if self.deleting:
            raise StreamDeletingError(self.basin, self.name)
        if self.lifetime.deadline is not None and self.over:
            raise StreamNotFoundError(self.basin, self.name)

    async def settled(self) -> None:
        """Wait until everything accepted so far is durable. Raises if that fails."""
        if self._unsettled:
            if self._settlers is None:
                self._settlers = DurableWaiters(self._loop)
            # Do not wait until nothing is pending: on a busy stream, something always is.
            await self._settlers.wait_for(self._next_seq_num)

    def waiter(self) -> Waiter:
        """Return a waiter for calls of `advanced`. Close it afterwards."""
        if self._tail_waiters is None:
            self._tail_waiters = TailWaiters(self._loop)
        return Waiter(self._tail_waiters, self._loop)

    async def advanced(self, seq_num: int, waiter: Waiter, max_wait: float | None) -> bool:
        """Wait for a durable record at or after `seq_num`. Returns False on timeout.

        Also returns True when the stream is closed, because no more records can come.
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
        """Take everything pending as this stream's share of a commit."""
        pending, self._pending = self._pending or [], None
        ops: list[Op] = []
        if pending or self._state_changed:
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
            pending,
            self.trims.accepted,
            self.trims.accepted_at_once,
            self._trim_changed,
            self.terms.closed,
            ops,
            pending[0].chunk.metered
            if len(pending) == 1
            else sum([accepted.chunk.metered for accepted in pending]),
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
        """Acknowledge the batches of `share`, which is now durable."""
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
            if ack is not None and not ack.done():
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
        """Fail all appends: `written` may or may not be durable, pending ones certainly are not.

        Returns the metered bytes that this releases.
        """
        self.failure = unsent
        pending, self._pending = self._pending or [], None
        attached, self._attached = self._attached or [], None
        settlers, self._settlers = self._settlers, None
        for share in written:
            for accepted in share.batches:
                accepted.fail(unknown)
            for rows_of_caller in share.attached:
                reject(rows_of_caller.done, unknown)
        for accepted in pending:
            accepted.fail(unsent)
        for rows_of_caller in attached:
            reject(rows_of_caller.done, unsent)
        if settlers is not None:
            settlers.fail(unknown)
        self.dismiss(unsent)
        return sum(share.metered for share in written) + sum(
            accepted.chunk.metered for accepted in pending
        )

    def dismiss(self, error: StreamfoldError) -> None:
        """Raise `error` in all followers, because nothing more will come."""
        if self._tail_waiters is not None:
            self._tail_waiters.fail_all(error)
