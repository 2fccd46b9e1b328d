"""Whatever happens to three servers and their storage: at most one answers, and in the end one does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from tests.cluster.three_servers import EXPIRY, RATES, Cluster

NUMBERS = st.integers(0, len(RATES) - 1)
#: What becomes of requests; "late" ones have their effect after their sender has given up.
FATES = st.sampled_from(["done", "done", "refused", "answer lost", "late", "lost", "slow"])
PICKS = st.integers(0, 7)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Three servers, of which the first is active."""
    cluster = Cluster()
    for number in range(len(RATES)):
        cluster.start(number)
    cluster.settle()
    assert [server.serving for server in cluster.servers.values()] == [True, False, False]
    yield cluster
    cluster.close()


def test_a_renewal_counts_from_when_it_was_sent(cluster: Cluster) -> None:
    """Its answer may come when another server has the lease."""
    active, standby = cluster.servers[0], cluster.servers[1]
    active.fate = "slow"
    cluster.live(2 * EXPIRY)
    assert standby.serving
    active.fate = "done"
    cluster.run()
    assert not active.trusted
    cluster.check_progress()


def test_a_server_that_was_paused_before_it_opened_the_store_stops_and_the_other_one_goes_on(
    cluster: Cluster,
) -> None:
    first, second, third = cluster.servers.values()
    third.kill()
    first.kill()
    second.fate = None
    requests = cluster.storage.waiting
    while not (opening := [each for each in requests if each.effect == cluster.storage.open]):
        cluster.pass_time(0.5)
        for request in requests[:1]:
            cluster.answer(request, "done")
    second.paused = True
    cluster.start(0)
    cluster.live(2 * EXPIRY)
    again = cluster.servers[0]
    assert again.serving
    cluster.answer(opening[0], "done")  # the request of the paused server arrives
    cluster.append(0)
    cluster.live(1.0)
    second.paused, second.fate = False, "done"
    cluster.live(EXPIRY)
    assert (second.running, again.serving) == (False, True)


def test_a_storage_that_comes_back_finds_the_same_server_active(cluster: Cluster) -> None:
    for server in cluster.servers.values():
        server.fate = "refused"
    cluster.live(60.0)
    assert not any(server.trusted for server in cluster.servers.values())
    for server in reversed(cluster.servers.values()):
        server.fate = "done"
        cluster.live(0.5)
    cluster.live(2.0)
    assert cluster.servers[0].serving


def test_a_server_that_starts_when_the_lease_has_just_been_deleted_waits(cluster: Cluster) -> None:
    cluster.servers[2].kill()
    cluster.damage_lease(None)
    cluster.start(2)
    cluster.live(2 * EXPIRY)
    assert cluster.servers[0].serving


def test_a_store_whose_lease_was_renewed_long_ago_is_claimed_at_once(cluster: Cluster) -> None:
    for server in cluster.servers.values():
        server.kill()
    cluster.storage.time += EXPIRY + 2
    cluster.start(0)
    cluster.live(2.0)
    assert cluster.servers[0].serving


def test_a_lease_that_was_given_up_is_claimed_at_the_next_look(cluster: Cluster) -> None:
    cluster.servers[0].stop()
    cluster.live(1.5)
    assert [server.serving for server in cluster.servers.values()].count(True) == 1
    assert not cluster.servers[0].running


def test_one_active_server_writes_half_a_request_a_second(cluster: Cluster) -> None:
    before = next(cluster.storage.etags)
    cluster.live(200.0)
    assert next(cluster.storage.etags) - before - 1 <= 100


class ThreeServers(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster()
        for number in range(len(RATES)):
            self.cluster.start(number)
        self.cluster.settle()

    @rule(number=NUMBERS, fate=st.none() | FATES)
    def change_storage(self, number: int, fate: str | None) -> None:
        """Let storage work, or fail, for one server; None: it hangs."""
        self.cluster.servers[number].fate = fate

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.0, 4.0, 7.0, 10.0]))
    def live(self, seconds: float) -> None:
        self.cluster.live(seconds)

    @rule(pick=PICKS, fate=FATES)
    def answer(self, pick: int, fate: str) -> None:
        waiting = self.cluster.storage.waiting
        if waiting:
            self.cluster.answer(waiting[pick % len(waiting)], fate)

    @rule(pick=PICKS)
    @precondition(lambda self: self.cluster.storage.late)
    def arrive(self, pick: int) -> None:
        late = self.cluster.storage.late
        self.cluster.arrive(late[pick % len(late)])

    @rule(seconds=st.sampled_from([0.3, 2.0, 6.5, 8.5]))
    def pass_time(self, seconds: float) -> None:
        self.cluster.pass_time(seconds)

    @rule(number=NUMBERS)
    def append(self, number: int) -> None:
        self.cluster.append(number)

    @rule(number=NUMBERS)
    def pause_or_continue(self, number: int) -> None:
        server = self.cluster.servers[number]
        server.paused = not server.paused
        self.cluster.run()

    @rule(number=NUMBERS)
    def kill(self, number: int) -> None:
        self.cluster.servers[number].kill()

    @rule(number=NUMBERS)
    def stop(self, number: int) -> None:
        if not self.cluster.servers[number].paused:
            self.cluster.servers[number].stop()
            self.cluster.run()

    @rule(number=NUMBERS)
    def start_again(self, number: int) -> None:
        if not self.cluster.servers[number].running:
            self.cluster.start(number)

    @rule(data=st.sampled_from([None, b"\xff", b"{}"]))
    def damage_lease(self, data: bytes | None) -> None:
        self.cluster.damage_lease(data)

    def teardown(self) -> None:
        try:
            self.cluster.check_progress()
        finally:
            self.cluster.close()


class ThreeServersWithTakeOvers(ThreeServers):
    """The records stay in order also if an operator takes the store over; two may answer reads."""

    @rule(number=NUMBERS)
    def take_over(self, number: int) -> None:
        if not self.cluster.servers[number].running:
            self.cluster.start(number, take_over=True)


TestThreeServers = ThreeServers.TestCase
TestThreeServers.settings = settings(max_examples=250, stateful_step_count=30)
TestThreeServersWithTakeOvers = ThreeServersWithTakeOvers.TestCase
TestThreeServersWithTakeOvers.settings = settings(max_examples=80, stateful_step_count=30)
