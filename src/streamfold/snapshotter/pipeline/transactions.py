"""Where a run of records may end without cutting a transaction in two; pure, and no I/O.

Changes of one transaction stand next to each other, as in every log of commits. So it is open from
its first record on until its end is marked, or until a record follows that belongs to another one or
to none. A run may end before the first record of what is open, or at its last record.

| the source says | the transaction is complete |
|---|---|
| where it ends | at that mark |
| only which one a change belongs to | when another record follows, or none for `quiet` |

One that is not complete after `max_wait` or `max_records` is cut, and whoever waits for it says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import msgspec


class Membership(NamedTuple):
    """What one record says: after it, a transaction is open, or none is (`id` is None)."""

    id: str | None
    #: Whether the source says where the transaction ends.
    marked: bool = False


#: A change of no transaction, or the last record of one.
OUTSIDE = Membership(None)


class Tail(msgspec.Struct, frozen=True, array_like=True):
    """The transaction that a batch of records ends in; small, whatever the batch.

    Made without the records before the batch: `follow` puts the tails of batches together.
    """

    #: None when nothing is open at the end, as far as this batch can tell.
    id: str | None = None
    #: Its first record in this batch.
    since: int = -1
    marked: bool = False
    #: Nothing comes before it in the batch that would end another: it may have begun earlier.
    joins: bool = False
    #: No record of the batch says anything about transactions.
    silent: bool = True


#: Of records that say nothing, and of records after which nothing is open.
SILENT, CLOSED = Tail(), Tail(silent=False)


class OpenTransaction(NamedTuple):
    """A transaction whose end has not come."""

    id: str
    #: Its first record.
    since: int
    marked: bool


def tail_of(backwards: Iterable[tuple[int, Membership]]) -> Tail:
    """The tail of records that say something, given as (seq_num, membership) from the last one on.

    Looks at the last transaction only.
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
    """What is open after a batch, by what was open before it."""
    if tail.silent:
        return held
    if tail.id is None:
        return None
    if tail.joins and held is not None and held.id == tail.id:
        return held._replace(marked=held.marked or tail.marked)
    return OpenTransaction(tail.id, tail.since, tail.marked)


#: Records that may be held back at the most: a diff of more would take minutes and gigabytes.
MAX_HELD = 20_000_000


@dataclass(frozen=True, slots=True)
class TransactionLimits:
    """How long the end of a transaction is waited for."""

    #: Records that are held back at most: they are read a second time when the end has come.
    max_records: int = 1_000_000
    #: Longer than the records of a transaction take to arrive, from the first to the last.
    max_wait: timedelta = timedelta(minutes=5)
    #: Time without a record after which a transaction is over whose end nothing marks.
    quiet: timedelta = timedelta(seconds=5)


class TransactionWait:
    """The open transaction at the end of what was read of one stream, and whether to wait on.

    Times are seconds of any clock that never goes back.
    """

    def __init__(self, limits: TransactionLimits) -> None:
        self._limits = limits
        self.held: OpenTransaction | None = None
        self._began = 0.0
        self._heard = 0.0

    def forget(self) -> None:
        """Begin anew, at the end of a transaction."""
        self.held = None

    def read(self, tails: Iterable[Tail], now: float) -> None:
        """Take note of the next records."""
        before = self.held
        for tail in tails:
            self.held = follow(self.held, tail)
        if self.held is not None and (before is None or before.since != self.held.since):
            self._began = now
        self._heard = now

    def is_complete(self, now: float) -> bool:
        """Whether what is held is taken as complete: nothing marks its end, and nothing came."""
        held, quiet = self.held, self._limits.quiet.total_seconds()
        return held is not None and not held.marked and now - self._heard >= quiet

    def is_cut(self, last: int, now: float) -> bool:
        """Whether what is held is beyond a limit; `last` is the last record that was read."""
        if self.held is None:
            return False
        many = last - self.held.since + 1 >= self._limits.max_records
        return many or now - self._began >= self._limits.max_wait.total_seconds()
