"""Bodies that are too large, too slow or malformed."""

from __future__ import annotations

import asyncio
import gzip
import json

import pytest
import zstandard

from streamfold.server.http.request_limits import RequestBudget
from streamfold.server.main import Server, running_server
from streamfold.wire.s2.headers import BODY_MAX
from tests.server.conftest import BASIN, STREAM, configuration
from tests.server.frames import PATH, SESSION, append_frame, frames_in
from tests.server.raw_h1 import h1_client
from tests.server.raw_h2 import H2Client, h2_client

UNARY = (("s2-basin", BASIN), ("content-type", "application/protobuf"))
JSON = (("s2-basin", BASIN), ("content-type", "application/json"))


async def nothing_was_appended(server: Server) -> bool:
    return (await server.store.check_tail(BASIN, STREAM)).seq_num == 0


async def test_a_body_declared_too_large_is_refused_before_it_is_sent(
    h2: H2Client, server: Server
) -> None:
    for headers, code in [(UNARY, "bad_proto"), (JSON, "bad_json")]:
        size = ("content-length", str(BODY_MAX + 1))
        request = h2.open("POST", PATH, (*headers, size))
        answer = await h2.whole(request)
        assert (answer.status, json.loads(answer.body)["code"]) == (400, code)
    assert await nothing_was_appended(server)


async def test_a_body_that_turns_out_too_large_is_refused(h2: H2Client, server: Server) -> None:
    request = h2.open("POST", PATH, JSON)
    await h2.send(request, b'{"records":[{"body":"')
    sent = 0
    while not h2.answer(request).headers and sent <= 3 * BODY_MAX:
        await h2.send(request, b"x" * 65536)
        sent += 65536
    answer = await h2.head(request)
    assert (answer.status, json.loads((await h2.whole(request)).body)["code"]) == (400, "bad_json")
    assert sent <= BODY_MAX + (2 << 20)
    assert await nothing_was_appended(server)


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
async def test_a_body_that_inflates_without_end_is_refused(
    h2: H2Client, server: Server, coding: str
) -> None:
    bomb = b"\0" * (256 << 20)
    packed = gzip.compress(bomb, 1) if coding == "gzip" else zstandard.compress(bomb)
    answer = await h2.exchange("POST", PATH, (*JSON, ("content-encoding", coding)), packed)
    assert (answer.status, json.loads(answer.body)["code"]) == (400, "bad_json")
    assert await nothing_was_appended(server)


async def test_a_frame_that_inflates_without_end_is_refused(h2: H2Client, server: Server) -> None:
    packed = zstandard.compress(b"\0" * (64 << 20))
    frame = (1 + len(packed)).to_bytes(3, "big") + b"\x20" + packed
    answer = await h2.exchange("POST", PATH, SESSION, frame)
    (last,) = frames_in(bytes(answer.body))
    assert json.loads(last.failure().body)["code"] == "bad_frame"
    assert await nothing_was_appended(server)


async def test_a_request_that_breaks_off_appends_nothing(server: Server) -> None:
    """The first record is whole and the rest is missing: it must not pass for the whole batch."""
    body = append_frame(b"first", b"second")[4:]
    whole_first = len(append_frame(b"first")[4:])
    async with h2_client(server.port) as h2:
        request = h2.open("POST", PATH, (*UNARY, ("content-length", str(len(body)))))
        await h2.send(request, body[:whole_first])
        h2.reset(request)
        # The connection is still good, and answers in order: by then the reset was seen.
        assert (await h2.exchange("GET", f"{PATH}/tail", UNARY)).status == 200
    async with h1_client(server.port) as client:
        await client.send(
            b"POST /v1/streams/orders/records HTTP/1.1\r\nhost: localhost\r\ns2-basin: test-basin\r\n"
            b"content-type: application/protobuf\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        await client.send_chunk(body[:whole_first])
    async with h1_client(server.port) as client:
        await client.send(b"GET /ping HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await client.head())[0] == 200
    assert await nothing_was_appended(server)


async def test_protobuf_of_undeclared_size_over_http2_is_appended_whole_or_not_at_all(
    h2: H2Client, server: Server
) -> None:
    """A reset after a whole record must not pass for the end of the batch."""
    body = append_frame(b"first", b"second")[4:]
    broken = h2.open("POST", PATH, UNARY)
    await h2.send(broken, body[: len(append_frame(b"first")[4:])])
    await requests_under_way(server, 1)
    h2.reset(broken)
    await requests_under_way(server, 0)
    assert await nothing_was_appended(server)
    assert (await h2.exchange("POST", PATH, UNARY, body)).status == 200
    assert (await server.store.check_tail(BASIN, STREAM)).seq_num == 2


async def test_a_request_without_a_body_over_http2_declares_no_size(h2: H2Client) -> None:
    """As curl sends it: the head ends the request."""
    stream, text = "/v1/stream/chat", [("content-type", "text/plain")]
    assert (await h2.exchange("PUT", stream, text)).status == 201
    source = [("stream-forked-from", stream)]
    assert (await h2.exchange("PUT", "/v1/stream/fork", source)).status == 201
    assert (await h2.exchange("POST", stream, text, b"all of it")).status == 204
    closed = await h2.exchange("POST", stream, [("stream-closed", "true")])
    assert (closed.status, closed.headers["stream-closed"]) == (204, "true")
    read = await h2.exchange("GET", stream)
    assert (read.status, bytes(read.body)) == (200, b"all of it")
    assert read.headers["stream-closed"] == "true"


CHUNKED = "transfer-encoding: chunked"
#: Bodies that HTTP/1 cannot make sense of, with the header that announces them.
BROKEN = {
    "a size that is no number": (CHUNKED, b"zz\r\n{}\r\n0\r\n\r\n"),
    "a size beyond all": (CHUNKED, b"fffffffffffffffff\r\n{}\r\n"),
    "more than its size": (CHUNKED, b"1\r\n{}\r\n0\r\n\r\n"),
    "a bad size after a good one": (CHUNKED, b"2\r\n{}\r\n-1\r\n\r\n"),
    "a long extension": (CHUNKED, b"2;" + b"a" * 20_000 + b"\r\n{}\r\n0\r\n\r\n"),
    "an early end": ("content-length: 100", b"{}"),
}


@pytest.mark.parametrize("broken", BROKEN)
async def test_a_malformed_body_is_the_client_s_fault(
    server: Server, h2: H2Client, broken: str
) -> None:
    """500 would mean that the append may have happened."""
    created = await h2.exchange("PUT", "/v1/stream/text", [("content-type", "text/plain")])
    assert created.status == 201
    size, body = BROKEN[broken]
    for line, content_type in (
        (f"POST {PATH}", "application/json"),
        (f"POST {PATH}", "application/protobuf"),
        ("POST /v1/streams", "application/json"),
        ("PUT /v1/stream/other", "text/plain"),
        ("POST /v1/stream/text", "text/plain"),
        ("PUT /v1/stream/text/snapshot/0000000000000000_0000000000000000", "text/plain"),
        ("PUT /v1/stream/__ds/subscriptions/one", "application/json"),
        (f"GET {PATH}?seq_num=0&wait=60", "application/json"),
    ):
        head = f"host: localhost\r\ns2-basin: {BASIN}\r\ncontent-type: {content_type}\r\n{size}"
        async with h1_client(server.port) as h1:
            await h1.send(f"{line} HTTP/1.1\r\n{head}\r\n\r\n".encode() + body)
            h1.writer.write_eof()
            status, headers = await h1.head()
            answer = json.loads(await h1.body(int(headers["content-length"])))
            assert (status, answer["code"]) == (400, "bad_body"), line
    assert await nothing_was_appended(server)


async def requests_under_way(server: Server, number: int) -> None:
    async with asyncio.timeout(60):
        while server.gate.inside != number:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.01)


async def test_a_request_that_breaks_off_before_its_body_does_nothing(
    h2: H2Client, server: Server
) -> None:
    """Its reset says no error, so that the body seems to end before it began."""
    text = [("content-type", "text/plain")]
    h2.reset(h2.open("PUT", "/v1/stream/first", text))
    assert (await h2.exchange("GET", "/ping")).status == 200
    await requests_under_way(server, 0)
    later = h2.open("PUT", "/v1/stream/second", text)
    await requests_under_way(server, 1)
    h2.reset(later)
    await requests_under_way(server, 0)
    for stream in ("/v1/stream/first", "/v1/stream/second"):
        assert (await h2.exchange("HEAD", stream)).status == 404


async def test_an_append_that_closes_and_breaks_off_does_not_close(
    h2: H2Client, server: Server
) -> None:
    """A stream must never be closed without what it was to end with."""
    stream, text = "/v1/stream/chat", [("content-type", "text/plain")]
    assert (await h2.exchange("PUT", stream, text)).status == 201
    closing = [*text, ("stream-closed", "true")]
    for body in (b"", b"the"):
        request = h2.open("POST", stream, closing)
        if body:
            await h2.send(request, body)
        await requests_under_way(server, 1)
        h2.reset(request)
        await requests_under_way(server, 0)
        assert "stream-closed" not in (await h2.exchange("HEAD", stream)).headers
    assert (await h2.exchange("POST", stream, closing, b"the end")).status == 204
    read = await h2.exchange("GET", stream)
    assert (bytes(read.body), read.headers["stream-closed"]) == (b"the end", "true")


async def test_a_body_that_dawdles_is_given_up() -> None:
    async with running_server(configuration(body_timeout=0.5)) as server:
        await server.store.create_basin(BASIN)
        await server.store.create_stream(BASIN, STREAM)
        async with h2_client(server.port) as h2:
            request = h2.open("POST", PATH, (*JSON, ("content-length", "100")))
            await h2.send(request, b'{"reco')
            answer = await h2.whole(request)
            assert (answer.status, json.loads(answer.body)["code"]) == (408, "request_timeout")
            # The good body has time, however busy the machine is.
            server.client_limits.request_budget = RequestBudget()
            good = await h2.exchange("POST", PATH, JSON, b'{"records":[{"body":"x"}]}')
            assert good.status == 200


async def test_an_answer_shows_nothing_of_the_insides(h2: H2Client) -> None:
    answer = await h2.exchange("POST", PATH, JSON, b'{"records":[{"body":"\xff"}]}')
    assert answer.status == 400
    assert b"Traceback" not in answer.body
    assert b".py" not in answer.body
