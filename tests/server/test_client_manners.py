"""Clients that hang up, that do not read, and that do not care."""

from __future__ import annotations

import asyncio
import json

import pytest

from streamfold.model.records import Record
from streamfold.server.http.response_shares import FIRST_PART
from streamfold.server.main import Server, running_server
from tests.server.conftest import BASIN, STREAM, configuration, until
from tests.server.frames import PATH, SESSION, append_frame, frames_in
from tests.server.raw_h1 import h1_client
from tests.server.raw_h2 import H2Client, h2_client


async def test_a_follower_that_hangs_up_is_forgotten(server: Server) -> None:
    async with h2_client(server.port) as h2:
        followers = [h2.open("GET", PATH, SESSION, end=True) for _ in range(5)]
        for follower in followers:
            await h2.body_of(follower, 6)
        assert server.gate.inside == 5
        h2.reset(followers[0])
        await until(lambda: server.gate.inside == 4)
    await until(lambda: server.gate.inside == 0)


async def test_a_follower_over_http1_that_hangs_up_is_forgotten(server: Server) -> None:
    async with h1_client(server.port) as client:
        await client.send(
            b"GET /v1/streams/orders/records HTTP/1.1\r\nhost: localhost\r\ns2-basin: test-basin\r\n"
            b"accept: text/event-stream\r\n\r\n"
        )
        await client.head()
        await until(lambda: server.gate.inside == 1)
    await until(lambda: server.gate.inside == 0)


async def test_a_read_that_waits_is_given_up_with_its_client(server: Server) -> None:
    async with h2_client(server.port) as h2:
        waiting = h2.open("GET", f"{PATH}?wait=60", (("s2-basin", BASIN),), end=True)
        await until(lambda: server.gate.inside == 1)
        h2.reset(waiting)
        await until(lambda: server.gate.inside == 0)


async def test_a_read_that_waits_for_memory_is_given_up_with_its_client(server: Server) -> None:
    room = server.client_limits.unread.room
    held = room.reserve_at_once("another connection", room.capacity)
    waiting_for_first = [
        asyncio.create_task(room.reserve(f"new connection {number}", 512 << 10, first=True))
        for number in range(64)
    ]
    await until(lambda: room.used == room.capacity + room.capacity // FIRST_PART)
    async with h2_client(server.port) as h2:
        read = h2.open("GET", f"/{BASIN}/{STREAM}", end=True)
        await until(lambda: room.waiting == 1)
        h2.reset(read)
        await until(lambda: server.gate.inside == 0)
    assert room.waiting == 0
    for reservation in (held, *(await asyncio.gather(*waiting_for_first))):
        reservation.release()
    assert room.used == 0


async def test_an_append_session_that_is_aborted_keeps_what_it_accepted(server: Server) -> None:
    async with h2_client(server.port) as h2:
        session = h2.open("POST", PATH, SESSION)
        await h2.send(session, append_frame(b"kept") + append_frame(b"cut")[:-1])
        await h2.body_of(session, 10)
        h2.reset(session)
        await until(lambda: server.gate.inside == 0)
    assert (await server.store.check_tail(BASIN, STREAM)).seq_num == 1


async def test_a_follower_that_does_not_read_delays_no_other_and_gets_everything_later(
    server: Server,
) -> None:
    body = b"z" * 100_000
    async with h2_client(server.port, give_credit=False, window=1000) as slow:
        stuck = slow.open("GET", f"{PATH}?seq_num=0", SESSION, end=True)
        await slow.head(stuck)
        for _ in range(20):
            await server.store.append(BASIN, STREAM, [Record(body)] * 10)
        async with h2_client(server.port) as quick:
            answer = await quick.exchange("GET", f"{PATH}?seq_num=0&count=200", SESSION)
        got = b"".join(frame.body for frame in frames_in(bytes(answer.body)))
        assert got.count(body) == 200
        assert len(slow.answer(stuck).body) <= 1000
        assert server.gate.inside == 1


async def test_a_follower_that_does_not_read_is_not_sent_more_than_a_little(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    async with running_server(configuration(access_log=True)) as server:
        await server.store.create_basin(BASIN)
        await server.store.create_stream(BASIN, STREAM)
        for _ in range(40):
            await server.store.append(BASIN, STREAM, [Record(b"z" * 1_000_000)])
        async with h2_client(server.port, give_credit=False, window=1000) as slow:
            stuck = slow.open("GET", f"{PATH}?seq_num=0", SESSION, end=True)
            await slow.body_of(stuck, 1000)
            await standstill(server)
        await until(lambda: server.gate.inside == 0)
    (line,) = capfdbinary.readouterr().err.splitlines()
    assert json.loads(line)["sent"] <= 2 << 20


async def test_a_client_that_does_not_read_its_acks_is_not_read_from_indefinitely(
    server: Server,
) -> None:
    """Acknowledgements pile up to a bound; then the server takes no more batches."""
    async with h2_client(server.port, give_credit=False, window=100) as stubborn:
        session = stubborn.open("POST", PATH, SESSION)
        await stubborn.head(session)
        sending = asyncio.create_task(stubborn.send(session, append_frame(b"y" * 1000) * 100_000))
        await standstill(server)
        assert not sending.done()
        sending.cancel()


async def standstill(server: Server) -> None:
    """Wait until the stream does not grow, however often another one does."""
    await server.store.create_stream(BASIN, "clock")
    seen, ticks = -1, 0
    while ticks < 50:
        await server.store.append(BASIN, "clock", [Record(b"tick")])
        tail = (await server.store.check_tail(BASIN, STREAM)).seq_num
        ticks = ticks + 1 if tail == seen else 0
        seen = tail


async def test_one_broken_session_leaves_the_others_of_its_connection_alone(h2: H2Client) -> None:
    good = h2.open("POST", PATH, SESSION)
    bad = h2.open("POST", PATH, SESSION)
    await h2.send(bad, b"\x00\x00\x00")
    assert (await h2.whole(bad)).ended
    await h2.send(good, append_frame(b"fine"), end=True)
    (ack,) = frames_in(bytes((await h2.whole(good)).body))
    assert not ack.terminal
