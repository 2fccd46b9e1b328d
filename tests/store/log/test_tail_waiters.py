from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from streamfold.errors import StoreClosingError
from streamfold.store.log.tail_waiters import PAUSE_PER_WAITER, WAKES_PER_STEP, TailWaiters, Waiter

MANY = 5 * WAKES_PER_STEP


class HandLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes, and whose turns come, when a test says so."""

    now = 100.0

    def time(self) -> float:
        return self.now

    def take_turn(self) -> None:
        self.call_soon(self.stop)
        self.run_forever()

    def pass_time(self, seconds: float) -> None:
        """So many seconds, and then turns enough for what is due."""
        self.now += seconds
        for _ in range(2 * MANY // WAKES_PER_STEP):
            self.take_turn()


@pytest.fixture
def loop() -> Iterator[HandLoop]:
    made = HandLoop()
    yield made
    made.close()


@pytest.fixture
def audience(loop: HandLoop) -> TailWaiters:
    return TailWaiters(loop)


def sit(audience: TailWaiters, loop: HandLoop, count: int) -> list[asyncio.Future[bool]]:
    return [Waiter(audience, loop).wait(None) for _ in range(count)]


def reported(waits: list[asyncio.Future[bool]]) -> int:
    return sum(wait.done() for wait in waits)


def test_what_comes_after_a_silence_is_told_at_once(audience: TailWaiters, loop: HandLoop) -> None:
    waits = sit(audience, loop, 3)
    audience.wake()
    assert [wait.result() for wait in waits] == [True] * 3
    assert len(audience) == 0


def test_a_crowd_is_told_a_few_in_each_turn_so_that_others_have_theirs(
    audience: TailWaiters, loop: HandLoop
) -> None:
    waits = sit(audience, loop, MANY)
    audience.wake()
    assert reported(waits) == WAKES_PER_STEP
    loop.take_turn()
    assert reported(waits) == 2 * WAKES_PER_STEP
    assert len(audience) == MANY - 2 * WAKES_PER_STEP
    loop.pass_time(0)
    assert reported(waits) == MANY


def test_what_comes_soon_after_a_round_waits_for_the_next_and_is_told_once(
    audience: TailWaiters, loop: HandLoop
) -> None:
    sit(audience, loop, MANY)
    audience.wake()
    loop.pass_time(0)
    waits = sit(audience, loop, MANY)
    for _ in range(10):
        audience.wake()
    loop.pass_time(MANY * PAUSE_PER_WAITER * 0.9)
    assert reported(waits) == 0
    loop.pass_time(MANY * PAUSE_PER_WAITER * 0.2)
    assert reported(waits) == MANY


def test_a_record_during_a_round_reaches_those_already_told_and_those_not_yet(
    audience: TailWaiters, loop: HandLoop
) -> None:
    first = sit(audience, loop, MANY)
    audience.wake()
    again = sit(audience, loop, WAKES_PER_STEP)
    audience.wake()
    loop.pass_time(0)
    assert reported(first) == MANY
    assert reported(again) == 0
    loop.pass_time(2 * MANY * PAUSE_PER_WAITER)
    assert reported(again) == WAKES_PER_STEP


def test_a_closed_waiter_is_not_woken_and_delays_no_other(
    audience: TailWaiters, loop: HandLoop
) -> None:
    waiter = Waiter(audience, loop)
    waiter.wait(None).cancel()
    waiter.stop_waiting()
    assert len(audience) == 0
    waits = sit(audience, loop, 1)
    audience.wake()
    assert reported(waits) == 1


def test_a_timeout_counts_from_its_wait_however_many_came_before(
    audience: TailWaiters, loop: HandLoop
) -> None:
    waiter = Waiter(audience, loop)
    for _ in range(5):
        wait = waiter.wait(10.0)
        loop.pass_time(9.0)
        assert not wait.done()
        audience.wake()
        assert wait.result() is True
        waiter.stop_waiting()
    wait = waiter.wait(10.0)
    loop.pass_time(9.9)
    assert not wait.done()
    loop.pass_time(0.2)
    assert wait.result() is False


def test_a_wait_with_a_shorter_timeout_than_those_before_ends_in_time(
    audience: TailWaiters, loop: HandLoop
) -> None:
    waiter = Waiter(audience, loop)
    waiter.wait(10.0)
    audience.wake()
    waiter.stop_waiting()
    wait = waiter.wait(1.0)
    loop.pass_time(1.1)
    assert wait.result() is False
    waiter.stop_waiting()
    assert not waiter.wait(None).done()
    loop.pass_time(100.0)
    assert len(audience) == 1


def test_dismissal_reaches_those_who_wait_and_those_of_a_round_under_way(
    audience: TailWaiters, loop: HandLoop
) -> None:
    called = sit(audience, loop, MANY)
    audience.wake()
    waiting = sit(audience, loop, 1)
    audience.wake()
    audience.fail_all(StoreClosingError())
    loop.pass_time(0)
    loop.pass_time(60.0)
    for wait in (*called[WAKES_PER_STEP:], *waiting):
        with pytest.raises(StoreClosingError):
            wait.result()
    assert reported(called[:WAKES_PER_STEP]) == WAKES_PER_STEP
    assert len(audience) == 0
