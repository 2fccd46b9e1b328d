"""Sessions end with an error when their access token expires or is revoked."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest
from s2_sdk import (
    S2,
    AccessTokenScope,
    AppendInput,
    OperationGroupPermissions,
    Permission,
    PrefixMatch,
    Record,
    S2ServerError,
    S2Stream,
    SeqNum,
)

from streamfold.server.main import Server
from streamfold.store import store as stores
from tests.server.conftest import BASIN, ROOT, STREAM
from tests.server.frames import PATH, SESSION, append_frame, frames_in
from tests.server.http.test_drain import held_commits, open_session
from tests.server.raw_h2 import h2_client
from tests.server.s2.test_sdk_access import client
from tests.server.s2.test_sse import events

EVERYTHING = AccessTokenScope(
    basins=PrefixMatch(""),
    streams=PrefixMatch(""),
    op_groups=OperationGroupPermissions(stream=Permission.READ_WRITE),
)


@pytest.fixture
async def root(guarded: Server) -> AsyncIterator[S2]:
    async with client(guarded, ROOT) as s2:
        yield s2


class Clock:
    """The time of the server, which a test can put forward."""

    ahead = timedelta(0)

    def time_ns(self) -> int:
        return time.time_ns() + round(self.ahead.total_seconds() * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(stores, "time", clock)
    return clock


async def expiring_token(root: S2) -> str:
    """A token that is good for an hour."""
    soon = datetime.now(UTC) + timedelta(hours=1)
    token: str = await root.issue_access_token("brief", scope=EVERYTHING, expires_at=soon)
    return token


def unauthenticated(ended: pytest.ExceptionInfo[S2ServerError]) -> bool:
    return (ended.value.status_code, ended.value.code) == (401, "authn")


async def test_a_quiet_read_session_ends_when_its_token_is_revoked(
    guarded: Server, root: S2
) -> None:
    token = await root.issue_access_token("reader", scope=EVERYTHING)
    async with client(guarded, token) as s2:
        stream = s2.basin(BASIN).stream(STREAM)
        async with stream.read_session(start=SeqNum(0)) as reading:
            await reading.caught_up()
            following = asyncio.ensure_future(anext(reading))
            await root.revoke_access_token("reader")
            with pytest.raises(S2ServerError) as ended:
                await following
    assert unauthenticated(ended)


async def test_nothing_is_delivered_to_a_reader_whose_token_was_revoked(
    guarded: Server, root: S2
) -> None:
    token = await root.issue_access_token("reader", scope=EVERYTHING)
    async with (
        client(guarded, token) as s2,
        s2.basin(BASIN).stream(STREAM).read_session(start=SeqNum(0)) as reading,
    ):
        await reading.caught_up()
        following = asyncio.ensure_future(anext(reading))
        await root.revoke_access_token("reader")
        await root.basin(BASIN).stream(STREAM).append(one(b"secret"))
        with pytest.raises(S2ServerError) as ended:
            await following
    assert unauthenticated(ended)


async def test_a_quiet_append_session_ends_when_its_token_expires(
    guarded: Server, root: S2, clock: Clock
) -> None:
    authorization = ("authorization", f"Bearer {await expiring_token(root)}")
    async with h2_client(guarded.port) as h2:
        session = h2.open("POST", PATH, (*SESSION, authorization))
        await h2.send(session, append_frame(b"in time"))
        await h2.body_of(session, 10)
        clock.ahead = timedelta(hours=2)
        ack, end = frames_in(bytes((await h2.whole(session)).body))
    assert not ack.terminal
    assert end.failure().status == 401
    assert json.loads(end.failure().body)["code"] == "authn"


async def test_no_batch_is_taken_after_its_token_was_revoked(guarded: Server, root: S2) -> None:
    token = await root.issue_access_token("writer", scope=EVERYTHING)
    own: S2Stream = root.basin(BASIN).stream(STREAM)
    async with client(guarded, token) as s2:
        session = s2.basin(BASIN).stream(STREAM).append_session()
        await (await session.submit(one(b"before")))
        await root.revoke_access_token("writer")
        late = await session.submit(one(b"after"))
        with pytest.raises(S2ServerError) as ended:
            await late
        with pytest.raises(S2ServerError):
            await session.close()
    assert unauthenticated(ended)
    assert (await own.check_tail()).seq_num == 1


async def test_events_end_with_an_error_event_when_their_token_expires(
    guarded: Server, root: S2, clock: Clock
) -> None:
    authorization = ("-H", f"authorization: Bearer {await expiring_token(root)}")
    async with events(guarded, "tail_offset=0", *authorization) as stream:
        ping = await stream.next()
        assert ping is not None
        assert ping.name == "ping"
        clock.ahead = timedelta(hours=2)
        error = await stream.news()
        assert error is not None
        assert error.name == "error"
        assert json.loads(error.data)["code"] == "authn"
        assert await stream.next() is None


async def test_sessions_of_other_tokens_continue(guarded: Server, root: S2) -> None:
    first = await root.issue_access_token("first", scope=EVERYTHING)
    second = await root.issue_access_token("second", scope=EVERYTHING)
    async with (
        client(guarded, first) as one_client,
        client(guarded, second) as other,
        one_client.basin(BASIN).stream(STREAM).read_session(start=SeqNum(0)) as ending,
        other.basin(BASIN).stream(STREAM).read_session(start=SeqNum(0)) as lasting,
    ):
        await asyncio.gather(ending.caught_up(), lasting.caught_up())
        await root.revoke_access_token("first")
        with pytest.raises(S2ServerError):
            await anext(ending)
        following = asyncio.ensure_future(anext(lasting))
        await root.basin(BASIN).stream(STREAM).append(one(b"still here"))
        assert [record.body for record in (await following).records] == [b"still here"]


def one(body: bytes) -> AppendInput:
    return AppendInput([Record(body)])


async def test_a_first_append_under_way_when_its_token_expires_is_acknowledged(
    guarded: Server, root: S2, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """401 alone would say that nothing was stored."""
    token = ("authorization", f"Bearer {await expiring_token(root)}")
    async with h2_client(guarded.port) as h2:
        session = await open_session(guarded, h2, token)
        idle = h2.open("POST", PATH, (*SESSION, token))
        await h2.head(idle)
        with held_commits(monkeypatch) as commits:
            await h2.send(session, append_frame(b"first"))
            await commits.reached.wait()
            clock.ahead = timedelta(hours=2)
            (end,) = frames_in(bytes((await h2.whole(idle)).body))
            assert end.failure().status == 401
        ack, end = frames_in(bytes((await h2.whole(session)).body))
    assert not ack.terminal
    assert end.failure().status == 401
