"""Live reads end when their access token is revoked or expires, on both faces by one rule."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from s2_sdk import S2, AccessTokenScope, Operation, PrefixMatch

from streamfold.model.access_tokens import Secret
from streamfold.server.main import Server, running_server
from tests.sdk import sdk_client
from tests.server.conftest import ROOT, configuration, until
from tests.server.durable_streams.conftest import JSON, browsing
from tests.server.durable_streams.test_access import BUCKET, STREAM, bearer
from tests.server.s2.test_session_tokens import Clock, clock

__all__ = ["clock"]

READER = AccessTokenScope(
    basins=PrefixMatch(""), streams=PrefixMatch(""), ops=[Operation.READ, Operation.CHECK_TAIL]
)
LIVE = f"{STREAM}?offset=now&live="


@pytest.fixture
async def guarded() -> AsyncIterator[Server]:
    """A server whose long-polls take longer than any test."""
    async with running_server(configuration(root_token=Secret(ROOT), long_poll=300.0)) as server:
        async with browsing(server, headers=bearer(ROOT)) as root:
            await root.put(STREAM, headers=JSON, content=b"[1]")
        yield server


@asynccontextmanager
async def account(server: Server) -> AsyncIterator[S2]:
    endpoint = f"http://127.0.0.1:{server.port}"
    async with sdk_client(endpoint, ROOT) as s2:
        yield s2


async def reading(server: Server, requests: int = 1) -> None:
    """Wait until so many requests are under way, beside those that set up the test."""
    await until(lambda: server.gate.inside >= requests)


async def test_events_end_when_their_token_is_revoked(guarded: Server) -> None:
    async with account(guarded) as root, browsing(guarded) as web:
        token = await root.issue_access_token("reader", scope=READER)
        async with web.stream("GET", f"{LIVE}sse", headers=bearer(token)) as events:
            lines = events.aiter_lines()
            assert await anext(lines) == "event: control"
            await root.revoke_access_token("reader")
            async with asyncio.timeout(60):
                assert not [line async for line in lines if line.startswith("event")]
        assert (await web.get(f"{LIVE}sse", headers=bearer(token))).status_code == 401


async def test_events_end_when_their_token_expires(guarded: Server, clock: Clock) -> None:
    soon = datetime.now(UTC) + timedelta(hours=1)
    async with account(guarded) as root, browsing(guarded) as web:
        token = await root.issue_access_token("reader", scope=READER, expires_at=soon)
        async with web.stream("GET", f"{LIVE}sse", headers=bearer(token)) as events:
            lines = events.aiter_lines()
            assert await anext(lines) == "event: control"
            clock.ahead = timedelta(hours=2)
            async with asyncio.timeout(60):
                assert not [line async for line in lines if line.startswith("event")]


async def test_nothing_is_sent_after_a_revocation(guarded: Server) -> None:
    async with (
        account(guarded) as root,
        browsing(guarded) as web,
        browsing(guarded, headers=bearer(ROOT)) as writer,
    ):
        token = await root.issue_access_token("reader", scope=READER)
        async with web.stream("GET", f"{LIVE}sse", headers=bearer(token)) as events:
            lines = events.aiter_lines()
            assert await anext(lines) == "event: control"
            await root.revoke_access_token("reader")
            await writer.post(STREAM, headers=JSON, content=b'"secret"')
            async with asyncio.timeout(60):
                assert not [line async for line in lines if "secret" in line]


async def test_a_long_poll_answers_401_when_its_token_is_revoked(guarded: Server) -> None:
    async with account(guarded) as root, browsing(guarded) as web:
        token = await root.issue_access_token("reader", scope=READER)
        waiting = asyncio.create_task(web.get(f"{LIVE}long-poll", headers=bearer(token)))
        await reading(guarded)
        await root.revoke_access_token("reader")
        assert_unauthenticated(await waiting)


async def test_a_long_poll_answers_401_when_its_token_expires(
    guarded: Server, clock: Clock
) -> None:
    soon = datetime.now(UTC) + timedelta(hours=1)
    async with account(guarded) as root, browsing(guarded) as web:
        token = await root.issue_access_token("reader", scope=READER, expires_at=soon)
        waiting = asyncio.create_task(web.get(f"{LIVE}long-poll", headers=bearer(token)))
        await reading(guarded)
        clock.ahead = timedelta(hours=2)
        assert_unauthenticated(await waiting)


async def test_a_waiting_read_of_s2_answers_401_when_its_token_is_revoked(guarded: Server) -> None:
    async with account(guarded) as root, browsing(guarded) as web:
        token = await root.issue_access_token("reader", scope=READER)
        headers = bearer(token) | {"s2-basin": BUCKET}
        path = "/v1/streams/orders/records?tail_offset=0&wait=60"
        waiting = asyncio.create_task(web.get(path, headers=headers))
        await reading(guarded)
        await root.revoke_access_token("reader")
        assert_unauthenticated(await waiting)


async def test_the_long_poll_of_another_token_continues(guarded: Server) -> None:
    async with (
        account(guarded) as root,
        browsing(guarded) as web,
        browsing(guarded, headers=bearer(ROOT)) as writer,
    ):
        ending = await root.issue_access_token("first", scope=READER)
        lasting = await root.issue_access_token("second", scope=READER)
        waiting = [
            asyncio.create_task(web.get(f"{LIVE}long-poll", headers=bearer(token)))
            for token in (ending, lasting)
        ]
        await reading(guarded, 2)
        await root.revoke_access_token("first")
        assert_unauthenticated(await waiting[0])
        await writer.post(STREAM, headers=JSON, content=b"2")
        assert (await waiting[1]).json() == [2]


def assert_unauthenticated(answer: httpx.Response) -> None:
    assert (answer.status_code, answer.json()["code"]) == (401, "authn")
