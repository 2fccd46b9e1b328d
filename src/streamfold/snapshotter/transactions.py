"""Finds where a run of records can end without splitting a transaction; pure, without I/O.

Changes of one transaction are adjacent, as in every commit log. So a transaction is open from its
first record until its end is marked, or a record outside of it follows. A run can end before the first
record of an open transaction, or at its last.

| the source says | the transaction is complete |
|---|---|
| where it ends | at that mark |
| only which transaction a change belongs to | when another record follows, or none for `quiet` |

A transaction that is incomplete after `max_wait` or `max_records` is cut, and the caller reports it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, NamedTuple

import msgspec


class Membership(NamedTuple):
    """The open transaction after one record; `id` is None without one."""

    id: str | None
    #: Whether the source marks the end.
    marked: bool = False


#: After a change outside of transactions, or the last record of one.
OUTSIDE = Membership(None)


class Tail(msgspec.Struct, frozen=True, array_like=True):
    """The transaction in which a batch of records ends, regardless of earlier batches.

    `follow` combines the tails of batches.
    """

    #: None if this batch shows no open transaction at its end.
    id: str | None = None
    #: Its first record in this batch.
    since: int = -1
    marked: bool = False
    #: Whether it may have begun before the batch.
    joins: bool = False
    #: Whether no record of the batch says anything about transactions.
    silent: bool = True


#: Tails of batches that say nothing, and of batches after which no transaction is open.
SILENT, CLOSED = Tail(), Tail(silent=False)


class OpenTransaction(NamedTuple):
    """A transaction whose end has not arrived."""

    id: str
    #: Its first record.
    since: int
    marked: bool


def tail_of(backwards: Iterable[tuple[int, Membership]]) -> Tail:
    """Return the tail of (seq_num, membership) pairs, last record first; reads one transaction."""
    last: Membership | None = None
    since, marked = -1, False
    for seq_num, membership in backwards:
        if last is None and membership.id is None:
            return CLOSED
        if last is not None and membership.id != last.id:
            return Tail(last.id, since, marked, joins=False, silent=False)
        last, since, marked = membership, seq_num, marked or membership.marked
    return Tail(last.id, since, marked, joins=True, silent=False) if last else SILENT


def follow(transaction: OpenTransaction | None, tail: Tail) -> OpenTransaction | None:
    """Return the open transaction after a batch, given the one before it."""
    if tail.silent:
        return transaction
    if tail.id is None:
        return None
    if tail.joins and transaction is not None and transaction.id == tail.id:
        return transaction._replace(marked=transaction.marked or tail.marked)
    return OpenTransaction(tail.id, tail.since, tail.marked)


#: The most records to hold back: a larger diff would take minutes and gigabytes.
MAX_HELD = 20_000_000


@dataclass(frozen=True, slots=True)
class TransactionLimits:
    """How long to wait for the end of a transaction."""

    #: The most records to hold back, which are read again when the end arrives.
    max_records: Annotated[int, msgspec.Meta(ge=1, le=MAX_HELD)] = 1_000_000
    #: More than it takes for all records of a transaction to arrive.
    max_wait: timedelta = timedelta(minutes=5)
    #: Time without records after which a transaction without an end mark is complete.
    quiet: timedelta = timedelta(seconds=5)


class TransactionWait:
    """The open transaction at the end of what was read, and whether to wait any longer.

    Times are seconds of a monotonic clock.
    """

    def __init__(self, limits: TransactionLimits) -> None:
        self._limits = limits
        self.transaction: OpenTransaction | None = None
        self._began = 0.0
        self._heard = 0.0

    def forget(self) -> None:
        """Start again at the end of a transaction."""
        self.transaction = None

    def read(self, tails: Iterable[Tail], now: float) -> None:
        """Add the tails of the next records."""
        before = self.transaction
        for tail in tails:
            self.transaction = follow(self.transaction, tail)
        if self.transaction is not None and (
            before is None or before.since != self.transaction.since
        ):
            self._began = now
        self._heard = now

    def is_complete(self, now: float) -> bool:
        """Return whether the held transaction counts as complete: unmarked, and no record followed."""
        transaction, quiet = self.transaction, self._limits.quiet.total_seconds()
        return transaction is not None and not transaction.marked and now - self._heard >= quiet

    def is_cut(self, last: int, now: float) -> bool:
        """Return whether the held transaction exceeds a limit; `last` is the last record read."""
        if self.transaction is None:
            return False
        many = last - self.transaction.since + 1 >= self._limits.max_records
        return many or now - self._began >= self._limits.max_wait.total_seconds()
