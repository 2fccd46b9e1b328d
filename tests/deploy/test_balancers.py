"""An active server and its standby behind a load balancer of `deploy/`: whatever happens to them, every
acknowledged record is stored once and in order, followers get just these, and no append that its
client repeats fails.
"""

from __future__ import annotations

import json
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from s2_sdk import AppendInput, Record

from streamfold.cli.exit_status import ExitStatus
from tests.deploy.balancers import Balancer, haproxy, logged, nginx
from tests.deploy.load import Load, loading
from tests.ports import free_port
from tests.s3 import S3Server
from tests.server.frames import PATH, SESSION, frames_in
from tests.server.raw_h1 import h1_client
from tests.server.raw_h2 import h2_client
from tests.server.test_standby import (
    APPEND_SESSION,
    BASIN,
    NEVER,
    STREAM,
    Bucket,
    Node,
    client_of,
    create_stream,
    failure_of,
    suspended,
)

#: Seconds, as by default: the load and its storage share the processors of one machine, and a server
#: that comes by none for a while must not lose its lease.
EXPIRY = "8"
#: Restarts, one of which must cost S2's client no append. It may lose one whenever its machine, or the
#: server's, is too slow for the moment that the server leaves it; without that moment, it always does.
ROUNDS = 3


@dataclass
class Pair:
    """Two servers behind one address."""

    bucket: Bucket
    stack: AsyncExitStack
    expiry: str = EXPIRY
    ports: tuple[int, int] = field(default_factory=lambda: (free_port(), free_port()))
    #: The last server that was started at each port.
    started: dict[int, Node] = field(default_factory=dict)

    async def start(self, index: int) -> Node:
        serving = self.bucket.serve(expiry=self.expiry, port=self.ports[index])
        self.started[index] = await self.stack.enter_async_context(serving)
        return self.started[index]


@pytest.fixture(params=[haproxy, nginx])
def balancer(request: pytest.FixtureRequest) -> Balancer:
    run: Balancer = request.param
    return run


@pytest.fixture
def expiry() -> str:
    return EXPIRY


@pytest.fixture
async def pair(
    s3_server: S3Server, expiry: str, request: pytest.FixtureRequest
) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        yield Pair(Bucket(s3_server, request.node.name), stack, expiry)


@pytest.fixture
async def active(pair: Pair) -> Node:
    node = await pair.start(0)
    await node.serves()
    return node


@pytest.fixture
async def standby(pair: Pair, active: Node) -> Node:
    node = await pair.start(1)
    await node.logged("standby: ")
    return node


@pytest.mark.timeout(1800)  # each append that is lost takes half a minute to be missed
@pytest.mark.parametrize("expiry", [NEVER])  # a busy machine must not look like a dead server
async def test_both_servers_are_restarted_in_turn(
    balancer: Balancer, pair: Pair, active: Node, standby: Node, tmp_path: Path
) -> None:
    async with balancer(tmp_path, pair.ports) as urls, loading(urls) as load:
        lost = [await restart_both(pair, load, active, standby)]
        while lost[-1] and len(lost) < ROUNDS:
            standby = await pair.start(1)
            await standby.logged("standby: ")
            lost.append(await restart_both(pair, load, pair.started[0], standby))
    assert 0 in lost, lost  # upstream defect 27


async def restart_both(pair: Pair, load: Load, active: Node, standby: Node) -> int:
    """Restart the server at the first port, which is active, and stop the other one when it is.

    Returns the number of appends that S2's client has lost.
    """
    before = load.lost_by_client
    active.process.send_signal(signal.SIGTERM)
    assert (await active.ending()).status == 0
    await standby.serves()  # or the restarted server may come by the lease before it
    again = await pair.start(0)
    await load.advance()
    await again.logged("standby: ")
    standby.process.send_signal(signal.SIGTERM)
    assert (await standby.ending()).status == 0
    await load.advance()
    return load.lost_by_client - before


@pytest.mark.usefixtures("standby")
@pytest.mark.parametrize("expiry", [NEVER])
async def test_a_draining_server_ends_its_sessions_itself(
    pair: Pair, active: Node, tmp_path: Path
) -> None:
    """HAProxy cuts none of them, although it has noticed that the server takes no new ones."""
    await create_stream(active)
    async with client_of(active) as s2:
        for _ in range(10):  # more than the server sends to a reader that takes nothing
            record = Record(b"m" * 1_000_000)
            await s2.basin(BASIN).stream(STREAM).append(AppendInput([record]))
    log = tmp_path / "haproxy.log"
    async with haproxy(tmp_path, pair.ports) as urls:
        # Until its first check, a server counts as up.
        await logged(log, "Server streamfold/b is DOWN")
        port = httpx.URL(urls.h1).port
        assert port is not None
        async with h1_client(port) as writer, h2_client(port, give_credit=False, window=100) as h2:
            await writer.send(APPEND_SESSION)
            assert (await writer.head())[0] == 200
            reader = h2.open("GET", f"{PATH}?seq_num=0", SESSION, end=True)
            await h2.body_of(reader, 100)
            active.process.send_signal(signal.SIGTERM)
            await logged(log, "Server streamfold/a is ")  # stopping; or down, and both are cut
            h2.take(reader, 1 << 30)
            last = frames_in(bytes((await h2.whole(reader)).body))[-1]
            for failure in (last.failure(), await failure_of(writer)):
                code = json.loads(failure.body)["code"]
                assert (failure.status, code) == (503, "server_draining")
            assert (await active.ending()).status == 0


@pytest.mark.usefixtures("standby")
async def test_the_active_server_is_killed(
    balancer: Balancer, pair: Pair, active: Node, tmp_path: Path
) -> None:
    async with balancer(tmp_path, pair.ports) as urls, loading(urls) as load:
        active.process.kill()
        await load.advance()


@pytest.mark.usefixtures("standby")
async def test_the_active_server_hangs_for_longer_than_its_lease(
    balancer: Balancer, pair: Pair, active: Node, tmp_path: Path
) -> None:
    async with balancer(tmp_path, pair.ports) as urls, loading(urls) as load:
        with suspended(active):
            await load.advance()
        assert (await active.ending()).status == ExitStatus.FENCED
        await load.advance()
