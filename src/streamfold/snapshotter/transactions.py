"""Finds where a run of records may end without splitting a transaction; pure, without I/O.

Changes of one transaction are adjacent, as in every commit log. So it is open from its first record
until its end is marked, or until a record of another transaction or of none follows. A run may end
before the first record of an open transaction, or at its last record.

| the source says | the transaction is complete |
|---|---|
| where it ends | at that mark |
| only which one a change belongs to | when another record follows, or none for `quiet` |

One that is not complete after `max_wait` or `max_records` is cut, and the caller reports it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import msgspec


class Membership(NamedTuple):
    """The state after one record: a transaction is open, or none is (`id` is None)."""

    id: str | None
    #: Whether the source says where the transaction ends.
    marked: bool = False


#: A change of no transaction, or the last record of one.
OUTSIDE = Membership(None)


class Tail(msgspec.Struct, frozen=True, array_like=True):
    """The transaction that a batch of records ends in; small, whatever the batch.

    Made without the records before the batch: `follow` combines the tails of batches.
    """

    #: None if no transaction is open at the end, as far as this batch shows.
    id: str | None = None
    #: Its first record in this batch.
    since: int = -1
    marked: bool = False
    #: No record before it in the batch ends another one: it may have begun earlier.
    joins: bool = False
    #: No record of the batch says anything about transactions.
    silent: bool = True


#: Tails of records that say nothing, and of records after which no transaction is open.
SILENT, CLOSED = Tail(), Tail(silent=False)


class OpenTransaction(NamedTuple):
    """A transaction whose end has not arrived."""

    id: str
    #: Its first record.
    since: int
    marked: bool


def tail_of(backwards: Iterable[tuple[int, Membership]]) -> Tail:
    """Return the tail of records, given as (seq_num, membership) from the last one backwards.

    Reads only the last transaction.
    """
    found: Membership | None = None
    since, marked = -1, False
    for seq_num, membership in backwards:
        if found is None and membership.id is None:
            return CLOSED
        if found is not None and membership.id != found.id:
            return Tail(found.id, since, marked, joins=False, silent=False)
        found, since, marked = membership, seq_num, marked or membership.marked
    return Tail(found.id, since, marked, joins=True, silent=False) if found else SILENT


def follow(held: OpenTransaction | None, tail: Tail) -> OpenTransaction | None:
    """Return what is open after a batch, given what was open before it."""
    if tail.silent:
        return held
    if tail.id is None:
        return None
    if tail.joins and held is not None and held.id == tail.id:
        return held._replace(marked=held.marked or tail.marked)
    return OpenTransaction(tail.id, tail.since, tail.marked)


#: The most records that a configuration may hold back: a larger diff would take minutes and gigabytes.
MAX_HELD = 20_000_000


@dataclass(frozen=True, slots=True)
class TransactionLimits:
    """How long to wait for the end of a transaction."""

    #: The most records to hold back: they are read again when the end arrives.
    max_records: int = 1_000_000
    #: Must exceed the time in which all records of a transaction arrive.
    max_wait: timedelta = timedelta(minutes=5)
    #: Time without a record after which a transaction without an end marker is complete.
    quiet: timedelta = timedelta(seconds=5)


class TransactionWait:
    """The open transaction at the end of what was read of one stream, and whether to keep waiting.

    Times are seconds of a monotonic clock.
    """

    def __init__(self, limits: TransactionLimits) -> None:
        self._limits = limits
        self.held: OpenTransaction | None = None
        self._began = 0.0
        self._heard = 0.0

    def forget(self) -> None:
        """Start again, at the end of a transaction."""
        self.held = None

    def read(self, tails: Iterable[Tail], now: float) -> None:
        """Add the tails of the next records."""
        before = self.held
        for tail in tails:
            self.held = follow(self.held, tail)
        if self.held is not None and (before is None or before.since != self.held.since):
            self._began = now
        self._heard = now

    def is_complete(self, now: float) -> bool:
        """Return whether what is held counts as complete: no end is marked, and no record followed."""
        held, quiet = self.held, self._limits.quiet.total_seconds()
        return held is not None and not held.marked and now - self._heard >= quiet

    def is_cut(self, last: int, now: float) -> bool:
        """Return whether what is held exceeds a limit; `last` is the last record read."""
        if self.held is None:
            return False
        many = last - self.held.since + 1 >= self._limits.max_records
        return many or now - self._began >= self._limits.max_wait.total_seconds()
