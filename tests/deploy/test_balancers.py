"""An active server and its standby behind a load balancer of `deploy/`: whatever happens to them, every
acknowledged record is stored once and in order, followers get just these, and no append that its
client repeats fails.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from streamfold.cli.exit_status import ExitStatus
from tests.deploy.balancers import Balancer, haproxy, nginx
from tests.deploy.load import loading
from tests.ports import free_port
from tests.s3 import S3Server
from tests.server.test_standby import EXPIRY, NEVER, Bucket, Node, suspended


@dataclass
class Pair:
    """Two servers behind one address."""

    bucket: Bucket
    stack: AsyncExitStack
    expiry: str = EXPIRY
    ports: tuple[int, int] = field(default_factory=lambda: (free_port(), free_port()))

    async def start(self, index: int) -> Node:
        serving = self.bucket.serve(expiry=self.expiry, port=self.ports[index])
        return await self.stack.enter_async_context(serving)


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


@pytest.mark.parametrize("expiry", [NEVER])  # a busy machine must not look like a dead server
async def test_both_servers_are_restarted_in_turn(
    balancer: Balancer, pair: Pair, active: Node, standby: Node, tmp_path: Path
) -> None:
    async with balancer(tmp_path, pair.ports) as urls, loading(urls) as load:
        active.process.send_signal(signal.SIGTERM)
        assert (await active.ending()).status == 0
        again = await pair.start(0)
        await load.advance()
        await again.logged("standby: ")
        standby.process.send_signal(signal.SIGTERM)
        assert (await standby.ending()).status == 0
        await load.advance()
    assert load.lost_by_client == 0  # upstream defect 27


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
