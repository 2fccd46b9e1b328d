"""Memory for answers goes to connections in turn, and a share of it to first answers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import pytest

from streamfold.server.http.problems import ClientHangupError
from streamfold.server.http.response_shares import Reservation, Room
from tests.proving import seeds

#: 70 bytes for all answers, and 10 for first ones.
CAPACITY = 80


async def begun(*waits: Coroutine[Any, Any, Reservation]) -> list[asyncio.Task[Reservation]]:
    """Reservations that were asked for, in this order."""
    asked = [asyncio.create_task(wait) for wait in waits]
    await asyncio.sleep(0)
    return asked


def admitted(*asked: asyncio.Task[Reservation]) -> list[bool]:
    return [one.done() for one in asked]


async def test_what_fits_is_reserved_at_once_and_counted() -> None:
    room = Room(CAPACITY)
    one = await room.reserve("a", 30)
    two = await room.reserve("b", 40)
    assert (room.used, room.held_by("a"), room.waiting, room.pressed) == (70, 30, 0, True)
    one.resize(10)
    two.release()
    assert (room.used, room.held_by("b"), room.pressed) == (10, 0, False)


async def test_an_answer_larger_than_the_memory_gets_what_there_is() -> None:
    room = Room(CAPACITY)
    assert (await room.reserve("a", 1000)).size == room.largest == 70


async def test_a_connection_with_many_waiting_answers_delays_another_by_one() -> None:
    room = Room(CAPACITY)
    holding = await room.reserve("greedy", 70)
    *greedy, other = await begun(
        *(room.reserve("greedy", 70) for _ in range(5)), room.reserve("other", 70)
    )
    assert (room.waiting, room.missing) == (6, 140)
    holding.release()
    await asyncio.sleep(0)
    (await greedy[0]).release()
    await asyncio.sleep(0)
    assert admitted(*greedy, other) == [True, False, False, False, False, True]
    (await other).release()
    for one in greedy[1:]:
        (await one).release()
    assert room.used == 0


async def test_a_small_answer_does_not_overtake_a_large_one() -> None:
    room = Room(CAPACITY)
    holding = await room.reserve("a", 40)
    large, small = await begun(room.reserve("b", 60), room.reserve("c", 1))
    assert admitted(large, small) == [False, False]
    holding.release()
    await asyncio.sleep(0)
    assert admitted(large, small) == [True, True]


async def test_a_first_answer_gets_memory_while_others_hold_all_they_may() -> None:
    room = Room(CAPACITY)
    await room.reserve("slow", 70)
    waiting, first = await begun(
        room.reserve("slow", 5, first=True), room.reserve("new", 10, first=True)
    )
    assert admitted(waiting, first) == [False, True]
    assert (room.used, first.result().first, room.first_waits_since) == (80, True, None)
    (second,) = await begun(room.reserve("new", 1, first=True))
    assert admitted(second) == [False], "it has its first answer"
    first.result().release()
    await asyncio.sleep(0)
    assert admitted(waiting, second) == [False, True], "now it holds nothing again"


async def test_memory_for_first_answers_goes_to_answers_that_ask_for_it() -> None:
    room = Room(CAPACITY)
    await room.reserve("slow", 70)
    session, page = await begun(room.reserve("a", 5), room.reserve("b", 5, first=True))
    assert admitted(session, page) == [False, True]


async def test_a_wait_that_is_cancelled_holds_nothing_and_lets_others_in() -> None:
    room = Room(CAPACITY)
    holding = await room.reserve("a", 40)
    large, small = await begun(room.reserve("b", 60), room.reserve("c", 30))
    large.cancel()
    await asyncio.gather(large, return_exceptions=True)
    assert (await small).size == 30
    (late,) = await begun(room.reserve("d", 60))
    holding.release()
    small.result().release()  # admits the last one, which is cancelled before it learns of that
    late.cancel()
    await asyncio.gather(late, return_exceptions=True)
    assert (room.used, room.waiting) == (0, 0)


async def test_waits_of_a_connection_that_is_cut_off_end_with_an_error() -> None:
    room = Room(CAPACITY)
    await room.reserve("cut", 70)
    one, two, other = await begun(
        room.reserve("cut", 70), room.reserve("cut", 1), room.reserve("other", 1)
    )
    room.refuse("cut", ClientHangupError("cut off"))
    for refused in (one, two):
        with pytest.raises(ClientHangupError):
            await refused
    assert (room.waiting, other.done()) == (1, False)


@pytest.mark.parametrize("seed", seeds(4, proving=1000))
async def test_memory_stays_within_bounds_and_every_answer_gets_its_share(seed: int) -> None:
    """Random connections reserve, shrink, release and give up, in any order."""
    some, room = random.Random(seed), Room(CAPACITY)
    asked: list[asyncio.Task[Reservation]] = []
    for _ in range(400):
        match some.randrange(4):
            case 0 | 1:
                owner, size = some.randrange(5), some.randint(1, 60)
                asked += await begun(room.reserve(owner, size, first=some.random() < 0.5))
            case 2 if waiting := [one for one in asked if not one.done()]:
                one = some.choice(waiting)
                one.cancel()
                asked.remove(one)
            case _ if held := [one for one in asked if one.done()]:
                one = some.choice(held)
                one.result().resize(some.randint(0, one.result().size))
        await asyncio.sleep(0)
        asked = [one for one in asked if not (one.done() and not one.result().size)]
        assert room.used <= CAPACITY
    while asked:
        ready = [one for one in asked if one.done()]
        assert ready, "all wait, and none holds anything"
        for one in ready:
            one.result().release()
            asked.remove(one)
        await asyncio.sleep(0)
    assert (room.used, room.waiting) == (0, 0)
