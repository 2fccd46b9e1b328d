"""Memory for answers, shared among connections in turn.

Connections take turns: however many answers one of them waits for, another waits for one of these at
most. One share is kept for first answers, those of connections that hold nothing, so that connections
which hold much and take it slowly cannot keep others from a small read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, Final

from streamfold.server.http.problems import ClientHangupError

#: The part of the memory that is kept for first answers.
FIRST_PART: Final = 8


@dataclass(slots=True, eq=False)
class Reservation:
    """Memory that a connection holds; `release` it whatever happens."""

    room: Room
    owner: Hashable
    size: int
    #: Whether it is part of the share for first answers.
    first: bool

    def resize(self, size: int) -> None:
        """Hold `size` bytes from here on. Growing never waits: it could block all others."""
        self.room.add(self, size - self.size)

    def release(self) -> None:
        self.resize(0)


@dataclass(slots=True, eq=False)
class _Waiter:
    size: int
    #: Whether it may have memory of the share for first answers.
    first: bool
    since: float
    admitted: asyncio.Future[Reservation]


@dataclass(slots=True, eq=False)
class _Account:
    """What one connection holds and waits for."""

    size: int = 0
    #: At most one for each request of the connection.
    waiting: tuple[_Waiter, ...] = ()

    @property
    def next_is_first(self) -> bool:
        return bool(self.waiting) and not self.size and self.waiting[0].first


class Room:
    """Reserves memory; a request never waits for memory while it holds a reservation."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._first_max = capacity // FIRST_PART
        #: The most that one reservation can have.
        self.largest = capacity - self._first_max
        self._common = 0
        self._first = 0
        self._accounts: dict[Hashable, _Account] = {}
        #: Connections that wait, the one whose turn is next first; and those of them that wait for
        #: their first answer.
        self._turns: dict[Hashable, None] = {}
        self._first_turns: dict[Hashable, None] = {}

    @property
    def used(self) -> int:
        """Bytes that are reserved."""
        return self._common + self._first

    @property
    def waiting(self) -> int:
        """How many answers wait."""
        return sum(len(self._accounts[owner].waiting) for owner in self._turns)

    @property
    def pressed(self) -> bool:
        """Whether connections wait, or hold more than they should."""
        return bool(self._turns) or self._common >= self.largest

    @property
    def missing(self) -> int:
        """Bytes that must be released for one answer of each connection that waits."""
        waiting = sum(self._accounts[owner].waiting[0].size for owner in self._turns)
        return self._common + waiting - self.largest

    @property
    def next_waits_since(self) -> float | None:
        """When the answer whose turn is next began to wait."""
        owner = next(iter(self._turns), None)
        return None if owner is None else self._accounts[owner].waiting[0].since

    @property
    def first_waits_since(self) -> float | None:
        """When the connection that has waited longest for a first answer began to wait."""
        owner = self._next_first()
        return None if owner is None else self._accounts[owner].waiting[0].since

    def held_by(self, owner: Hashable) -> int:
        account = self._accounts.get(owner)
        return account.size if account else 0

    async def reserve(
        self,
        owner: Hashable,
        size: int,
        *,
        first: bool = False,
        gone: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> Reservation:
        """Wait for memory in turn, `largest` bytes at most.

        With `first`, it may come from the share for first answers. ClientHangupError once `gone`
        returns, which is called only if there is a wait.
        """
        size = min(size, self.largest)
        if not self._turns and self._common + size <= self.largest:
            return self.reserve_at_once(owner, size)
        loop = asyncio.get_running_loop()
        waiter = _Waiter(size, first, loop.time(), loop.create_future())
        account = self._account(owner)
        account.waiting = (*account.waiting, waiter)
        self._turns.setdefault(owner)
        if account.next_is_first:
            self._first_turns.setdefault(owner)
        self._admit()
        leaving = None if gone is None else loop.create_task(gone())
        if leaving is not None:
            leaving.add_done_callback(lambda _: self._refuse_one(owner, waiter))
        try:
            return await waiter.admitted
        except asyncio.CancelledError:
            if waiter.admitted.cancelled():
                self._forget(owner, waiter)
            elif waiter.admitted.exception() is None:
                waiter.admitted.result().release()  # it came together with the cancellation
            raise
        finally:
            if leaving is not None:
                leaving.cancel()

    def reserve_at_once(self, owner: Hashable, size: int) -> Reservation:
        """Reserve memory even beyond the limit."""
        reservation = Reservation(self, owner, 0, first=False)
        self.add(reservation, size)
        return reservation

    def refuse(self, owner: Hashable, error: Exception) -> None:
        """Raise `error` where answers of a connection wait."""
        account = self._accounts.get(owner)
        if account is None:
            return
        for waiter in account.waiting:
            if not waiter.admitted.done():
                waiter.admitted.set_exception(error)
        account.waiting = ()
        self._settle(owner, account)
        self._admit()

    def add(self, reservation: Reservation, size: int) -> None:
        """Change a reservation by so many bytes; for `Reservation` alone."""
        if not size:
            return
        account = self._account(reservation.owner)
        reservation.size += size
        account.size += size
        if reservation.first:
            self._first += size
        else:
            self._common += size
        if self._turns:
            if size < 0:
                self._settle(reservation.owner, account)
                self._admit()
        elif not account.size:
            del self._accounts[reservation.owner]

    def _account(self, owner: Hashable) -> _Account:
        account = self._accounts.get(owner)
        if account is None:
            account = self._accounts[owner] = _Account()
        return account

    def _settle(self, owner: Hashable, account: _Account) -> None:
        """Bring the turns of a connection in line with what it holds and waits for."""
        if not account.waiting:
            self._turns.pop(owner, None)
            if not account.size:
                del self._accounts[owner]
        if account.next_is_first:
            self._first_turns.setdefault(owner)
        else:
            self._first_turns.pop(owner, None)

    def _admit(self) -> None:
        """Admit in turn what fits; one that does not fit is not overtaken in its share."""
        while (owner := next(iter(self._turns), None)) is not None:
            if self._common + self._accounts[owner].waiting[0].size > self.largest:
                break
            self._admit_next(owner, first=False)
        while (owner := self._next_first()) is not None:
            if self._first + self._accounts[owner].waiting[0].size > self._first_max:
                break
            self._admit_next(owner, first=True)

    def _next_first(self) -> Hashable | None:
        return next(iter(self._first_turns), None)

    def _admit_next(self, owner: Hashable, *, first: bool) -> None:
        account = self._accounts[owner]
        waiter, *rest = account.waiting
        account.waiting = tuple(rest)
        del self._turns[owner]
        if rest:
            self._turns[owner] = None  # behind all others
        if waiter.admitted.done():  # cancelled, and not forgotten yet
            self._settle(owner, account)
            return
        reservation = Reservation(self, owner, 0, first)
        self.add(reservation, waiter.size)
        self._settle(owner, account)
        waiter.admitted.set_result(reservation)

    def _refuse_one(self, owner: Hashable, waiter: _Waiter) -> None:
        """End the wait of an answer whose client has gone; nothing if it is over."""
        if not waiter.admitted.done():
            waiter.admitted.set_exception(ClientHangupError("the client hung up"))
            self._forget(owner, waiter)

    def _forget(self, owner: Hashable, waiter: _Waiter) -> None:
        account = self._accounts.get(owner)
        if account is not None and waiter in account.waiting:
            account.waiting = tuple(one for one in account.waiting if one is not waiter)
            self._settle(owner, account)
            self._admit()
