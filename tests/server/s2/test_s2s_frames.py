"""s2s sessions byte by byte, with a client that breaks the rules."""

from __future__ import annotations

import json

import pytest

from streamfold.model.records import Record
from streamfold.server.main import Server, running_server
from tests.server.conftest import BASIN, STREAM, configuration
from tests.server.frames import PATH, SESSION, append_frame, frames_in
from tests.server.raw_h2 import Answer, H2Client, h2_client


def ending(answer: Answer) -> tuple[int, dict[str, object]]:
    """Status and body of the terminal frame, which must be the last and only one."""
    *others, last = frames_in(bytes(answer.body))
    assert not any(frame.terminal for frame in others)
    assert last.terminal
    failure = last.failure()
    return failure.status, json.loads(failure.body)


def bodies_of(answer: Answer) -> list[bytes]:
    """Those of all whole frames in what came so far."""
    return [frame.body for frame in frames_in(bytes(answer.body))]


async def test_the_head_of_an_append_session_comes_before_any_frame(h2: H2Client) -> None:
    session = h2.open("POST", PATH, SESSION)
    answer = await h2.head(session)
    assert answer.status == 200
    assert answer.headers["content-type"] == "s2s/proto"
    assert answer.headers["cache-control"] == "no-cache, no-transform"
    assert answer.headers["x-accel-buffering"] == "no"


async def test_an_ack_comes_while_the_request_is_still_open(h2: H2Client) -> None:
    session = h2.open("POST", PATH, SESSION)
    for number in range(3):
        await h2.send(session, append_frame(b"x"))
        while len(frames_in(bytes(h2.answer(session).body))) <= number:
            await h2.body_of(session, len(h2.answer(session).body) + 1)
    await h2.send(session, b"", end=True)
    answer = await h2.whole(session)
    assert answer.ended
    assert len(frames_in(bytes(answer.body))) == 3


async def test_frames_may_be_cut_anywhere(h2: H2Client) -> None:
    session = h2.open("POST", PATH, SESSION)
    for byte in append_frame(b"one") + append_frame(b"two"):
        await h2.send(session, bytes((byte,)))
    await h2.send(session, b"", end=True)
    answer = await h2.whole(session)
    assert [frame.terminal for frame in frames_in(bytes(answer.body))] == [False, False]


async def test_a_session_without_frames_just_ends(h2: H2Client) -> None:
    answer = await h2.exchange("POST", PATH, SESSION, b"")
    assert (answer.status, answer.ended, bytes(answer.body)) == (200, True, b"")


async def test_everything_before_a_failure_is_acknowledged_and_nothing_after_applied(
    h2: H2Client, server: Server
) -> None:
    frames = [append_frame(b"a"), append_frame(b"b"), append_frame(b"c", match_seq_num=7)]
    answer = await h2.exchange("POST", PATH, SESSION, b"".join([*frames, append_frame(b"d")]))
    assert ending(answer) == (412, {"seq_num_mismatch": 2})
    assert len(frames_in(bytes(answer.body))) == 3
    assert (await server.store.check_tail(BASIN, STREAM)).seq_num == 2


@pytest.mark.parametrize(
    "broken",
    [
        b"\x00\x00\x00",
        b"\xff\xff\xff\x00",
        b"\x00\x00\x03\x00\xff\xff",
        b"\x00\x00\x05\x20abcd",
        b"\x00\x00\x05\x60abcd",
        b"\x00\x00\x03\x80\x01\x90",
    ],
    ids=["no-length", "too-long", "no-protobuf", "no-zstd", "no-compression", "terminal"],
)
async def test_a_broken_frame_ends_the_session_after_the_acks_before_it(
    h2: H2Client, server: Server, broken: bytes
) -> None:
    answer = await h2.exchange(
        "POST", PATH, SESSION, append_frame(b"good") + broken + append_frame(b"late")
    )
    status, body = ending(answer)
    assert (status, body["code"]) == (400, "bad_frame")
    assert len(frames_in(bytes(answer.body))) == 2
    assert (await server.store.check_tail(BASIN, STREAM)).seq_num == 1


async def test_a_session_that_ends_within_a_frame_applies_nothing_of_it(
    h2: H2Client, server: Server
) -> None:
    answer = await h2.exchange("POST", PATH, SESSION, append_frame(b"whole", b"half")[:-3])
    assert ending(answer)[1]["code"] == "bad_frame"
    assert (await server.store.check_tail(BASIN, STREAM)).seq_num == 0


@pytest.mark.parametrize(
    ("message", "code"), [(append_frame(), "invalid"), (append_frame(*[b""] * 1001), "invalid")]
)
async def test_a_batch_that_breaks_a_rule_ends_the_session(
    h2: H2Client, message: bytes, code: str
) -> None:
    status, body = ending(await h2.exchange("POST", PATH, SESSION, message))
    assert (status, body["code"]) == (422, code)


async def test_what_is_wrong_before_the_session_opens_is_an_ordinary_answer(h2: H2Client) -> None:
    missing = await h2.exchange("POST", "/v1/streams/nope/records", SESSION, append_frame(b"x"))
    assert missing.status == 404
    assert json.loads(missing.body)["code"] == "stream_not_found"
    headers = (*SESSION, ("s2-stream-config", '{"retention_policy":{"age":0}}'))
    bad = await h2.exchange("POST", PATH, headers, append_frame(b"x"))
    assert (bad.status, json.loads(bad.body)["code"]) == (400, "bad_header")


async def test_a_stream_deleted_meanwhile_ends_the_session(h2: H2Client, server: Server) -> None:
    session = h2.open("POST", PATH, SESSION)
    await h2.head(session)
    await server.store.delete_stream(BASIN, STREAM)
    await h2.send(session, append_frame(b"late"))
    status, body = ending(await h2.whole(session))
    assert (status, body["code"]) in [
        (409, "stream_deletion_pending"),
        (404, "stream_not_found"),
    ]


async def test_a_heartbeat_comes_at_once_on_an_empty_stream(h2: H2Client) -> None:
    session = h2.open("GET", PATH, SESSION, end=True)
    assert (await h2.head(session)).headers["content-type"] == "s2s/proto"
    assert await h2.body_of(session, 6) == bytes.fromhex("000003001200")


async def test_a_follower_gets_batches_with_a_tail_after_its_heartbeat(
    h2: H2Client, server: Server
) -> None:
    await server.store.append(BASIN, STREAM, [Record(b"old")])
    session = h2.open("GET", f"{PATH}?seq_num=0", SESSION, end=True)
    while len(frames_in(bytes(h2.answer(session).body))) < 2:
        await h2.body_of(session, len(h2.answer(session).body) + 1)
    await server.store.append(BASIN, STREAM, [Record(b"new")])
    # On a busy machine there may be more heartbeats beside it.
    while not (live := [body for body in bodies_of(h2.answer(session)) if b"new" in body]):
        await h2.body_of(session, len(h2.answer(session).body) + 1)
    old, heartbeat, *_ = bodies_of(h2.answer(session))
    [new] = live
    assert b"old" in old
    assert heartbeat.startswith(b"\x12")
    assert b"new" in new
    assert new.index(b"\x12", new.index(b"new")) > 0


async def test_heartbeats_continue_while_nothing_comes() -> None:
    async with running_server(configuration(heartbeat=(0.01, 0.02))) as server:
        await server.store.create_basin(BASIN)
        await server.store.create_stream(BASIN, STREAM)
        async with h2_client(server.port) as h2:
            session = h2.open("GET", PATH, SESSION, end=True)
            assert await h2.body_of(session, 60) >= bytes.fromhex("000003001200") * 10


@pytest.mark.parametrize(
    ("query", "status", "code"),
    [
        ("seq_num=x", 400, "bad_query"),
        ("seq_num=1&timestamp=1", 422, "invalid"),
        ("clamp=maybe", 400, "bad_query"),
        ("seq_num=99", 416, None),
        ("seq_num=0&count=1", 416, None),
    ],
)
async def test_a_read_session_that_cannot_start_is_an_ordinary_answer(
    h2: H2Client, query: str, status: int, code: str | None
) -> None:
    answer = await h2.exchange("GET", f"{PATH}?{query}", SESSION)
    assert answer.status == status
    assert json.loads(answer.body).get("code") == code


async def test_read_frames_are_compressed_as_the_client_accepts(
    h2: H2Client, server: Server
) -> None:
    await server.store.append(BASIN, STREAM, [Record(b"a" * 5000)])
    for accepted, flag in [("gzip", 0x40), ("gzip, zstd", 0x20), ("br", 0x00)]:
        headers = (*SESSION, ("accept-encoding", accepted))
        answer = await h2.exchange("GET", f"{PATH}?seq_num=0&count=1", headers)
        assert answer.body[3] == flag
        assert "content-encoding" not in answer.headers
        assert b"a" * 5000 in frames_in(bytes(answer.body))[0].body
