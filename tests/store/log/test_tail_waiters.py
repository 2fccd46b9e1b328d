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
def waiters(loop: HandLoop) -> TailWaiters:
    return TailWaiters(loop)


def add_waiters(waiters: TailWaiters, loop: HandLoop, count: int) -> list[asyncio.Future[bool]]:
    return [Waiter(waiters, loop).wait(None) for _ in range(count)]


def reported(waits: list[asyncio.Future[bool]]) -> int:
    return sum(wait.done() for wait in waits)


def test_a_record_after_a_silence_wakes_followers_at_once(
    waiters: TailWaiters, loop: HandLoop
) -> None:
    waits = add_waiters(waiters, loop, 3)
    waiters.wake()
    assert [wait.result() for wait in waits] == [True] * 3
    assert len(waiters) == 0


def test_many_followers_are_woken_a_few_per_round_so_that_others_can_run(
    waiters: TailWaiters, loop: HandLoop
) -> None:
    waits = add_waiters(waiters, loop, MANY)
    waiters.wake()
    assert reported(waits) == WAKES_PER_STEP
    loop.take_turn()
    assert reported(waits) == 2 * WAKES_PER_STEP
    assert len(waiters) == MANY - 2 * WAKES_PER_STEP
    loop.pass_time(0)
    assert reported(waits) == MANY


def test_a_record_soon_after_a_round_waits_for_the_next_and_wakes_followers_once(
    waiters: TailWaiters, loop: HandLoop
) -> None:
    add_waiters(waiters, loop, MANY)
    waiters.wake()
    loop.pass_time(0)
    waits = add_waiters(waiters, loop, MANY)
    for _ in range(10):
        waiters.wake()
    loop.pass_time(MANY * PAUSE_PER_WAITER * 0.9)
    assert reported(waits) == 0
    loop.pass_time(MANY * PAUSE_PER_WAITER * 0.2)
    assert reported(waits) == MANY


def test_a_record_during_a_round_reaches_followers_already_woken_and_those_not_yet(
    waiters: TailWaiters, loop: HandLoop
) -> None:
    first = add_waiters(waiters, loop, MANY)
    waiters.wake()
    again = add_waiters(waiters, loop, WAKES_PER_STEP)
    waiters.wake()
    loop.pass_time(0)
    assert reported(first) == MANY
    assert reported(again) == 0
    loop.pass_time(2 * MANY * PAUSE_PER_WAITER)
    assert reported(again) == WAKES_PER_STEP


def test_a_closed_waiter_is_not_woken_and_delays_no_other(
    waiters: TailWaiters, loop: HandLoop
) -> None:
    waiter = Waiter(waiters, loop)
    waiter.wait(None).cancel()
    waiter.stop_waiting()
    assert len(waiters) == 0
    waits = add_waiters(waiters, loop, 1)
    waiters.wake()
    assert reported(waits) == 1


def test_a_timeout_counts_from_its_wait_however_many_came_before(
    waiters: TailWaiters, loop: HandLoop
) -> None:
    waiter = Waiter(waiters, loop)
    for _ in range(5):
        wait = waiter.wait(10.0)
        loop.pass_time(9.0)
        assert not wait.done()
        waiters.wake()
        assert wait.result() is True
        waiter.stop_waiting()
    wait = waiter.wait(10.0)
    loop.pass_time(9.9)
    assert not wait.done()
    loop.pass_time(0.2)
    assert wait.result() is False


def test_a_wait_with_a_shorter_timeout_than_those_before_ends_in_time(
    waiters: TailWaiters, loop: HandLoop
) -> None:
    waiter = Waiter(waiters, loop)
    waiter.wait(10.0)
    waiters.wake()
    waiter.stop_waiting()
    wait = waiter.wait(1.0)
    loop.pass_time(1.1)
    assert wait.result() is False
    waiter.stop_waiting()
    assert not waiter.wait(None).done()
    loop.pass_time(100.0)
    assert len(waiters) == 1


def test_dismissal_reaches_those_who_wait_and_those_of_a_round_under_way(
    waiters: TailWaiters, loop: HandLoop
) -> None:
    called = add_waiters(waiters, loop, MANY)
    waiters.wake()
    waiting = add_waiters(waiters, loop, 1)
    waiters.wake()
    waiters.fail_all(StoreClosingError())
    loop.pass_time(0)
    loop.pass_time(60.0)
    for wait in (*called[WAKES_PER_STEP:], *waiting):
        with pytest.raises(StoreClosingError):
            wait.result()
    assert reported(called[:WAKES_PER_STEP]) == WAKES_PER_STEP
    assert len(waiters) == 0
