"""Sessions over HTTP/1.1, as the Rust client and S2's own command line have them."""

from __future__ import annotations

import sys

from streamfold.model.records import Record
from streamfold.server.http.door import OpenDoor, bind
from streamfold.server.http.request import Request
from streamfold.server.main import Server
from tests.server.conftest import BASIN, STREAM
from tests.server.frames import append_frame, frames_in
from tests.server.raw_h1 import H1Client, h1_client

HEAD = (
    b"%b /v1/streams/orders/records%b HTTP/1.1\r\nhost: localhost\r\ns2-basin: test-basin\r\n"
    b"content-type: s2s/proto\r\n%b\r\n"
)
CHUNKED = b"transfer-encoding: chunked\r\n"


async def frame_of(client: H1Client) -> bytes:
    (frame,) = frames_in(await client.chunk())
    return frame.body


async def test_acks_come_while_the_chunked_request_is_still_open(server: Server) -> None:
    async with h1_client(server.port) as client:
        await client.send(HEAD % (b"POST", b"", CHUNKED))
        status, headers = await client.head()
        assert (status, headers["content-type"]) == (200, "s2s/proto")
        for _ in range(3):
            await client.send_chunk(append_frame(b"x"))
            assert await frame_of(client)
        await client.send_chunk(b"")
        assert await client.chunk() == b""
    assert (await server.store.check_tail(BASIN, STREAM)).seq_num == 3


async def test_a_read_session_follows_over_http1(server: Server) -> None:
    async with h1_client(server.port) as client:
        await client.send(HEAD % (b"GET", b"?seq_num=0", b""))
        assert (await client.head())[0] == 200
        assert await frame_of(client) == b"\x12\x00"
        await server.store.append(BASIN, STREAM, [Record(b"live")])
        while b"live" not in await frame_of(client):
            pass  # another heartbeat: the machine is busy


async def test_a_connection_serves_one_request_after_the_other(server: Server) -> None:
    async with h1_client(server.port) as client:
        for _ in range(3):
            await client.send(b"GET /v1/streams/orders/records/tail HTTP/1.1\r\nhost: localhost\r\n"
                              b"s2-basin: test-basin\r\n\r\n")  # fmt: skip
            status, headers = await client.head()
            assert status == 200
            assert b"tail" in await client.body(int(headers["content-length"]))


async def test_a_small_body_may_arrive_in_parts_and_may_be_ignored(server: Server) -> None:
    body = b'{"records":[{"body":"x"}]}'
    head = (
        b"POST /v1/%b HTTP/1.1\r\nhost: localhost\r\ns2-basin: test-basin\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
    )
    async with h1_client(server.port) as client:
        for path, missing, expected in (
            (b"nothing", 0, 404),
            (b"streams/orders/records", 0, 200),
            (b"streams/orders/records", 1, 200),
            (b"streams/orders/records", len(body), 200),
        ):
            request = head % (path, len(body)) + body
            cut = len(request) - missing
            await client.send(request[:cut])
            await server.store.append(BASIN, STREAM, [Record(b"meanwhile")])
            await client.send(request[cut:])
            status, headers = await client.head()
            assert status == expected
            await client.body(int(headers["content-length"]))
    assert (await server.store.check_tail(BASIN, STREAM)).seq_num == 4 + 3


async def test_a_request_that_is_not_http_affects_no_other(server: Server) -> None:
    async with h1_client(server.port) as client:
        await client.send(b"\x00\x01\x02 what is this\r\n\r\n")
        assert b"400" in (await client.rest()).split(b"\r\n")[0]
    async with h1_client(server.port) as client:
        await client.send(b"GET /ping HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await client.head())[0] == 200


async def test_headers_without_end_are_refused(server: Server) -> None:
    async with h1_client(server.port) as client:
        await client.send(b"GET /ping HTTP/1.1\r\nhost: localhost\r\nx: ")
        try:
            for _ in range(64):
                await client.send(b"y" * 16384)
        except ConnectionError:
            return
        try:
            answer = await client.rest()
        except ConnectionError:
            return
        assert answer.split(b" ")[1] in (b"431", b"400")


async def test_a_method_of_the_client_s_own_is_no_string_that_python_retains() -> None:
    """Some versions of Python never free an interned string, and a method has up to 64 KiB."""
    methods: list[str] = []

    async def answer(request: Request) -> None:
        methods.append(request.method)
        await request.respond(200)

    opened = OpenDoor(bind("127.0.0.1", 0), answer)
    opened.start()
    async with h1_client(opened.port) as client:
        await client.send(b"OF-THE-CLIENT / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await client.head())[0] == 200
    (method,) = methods
    assert sys.intern("".join(("OF-THE", "-CLIENT"))) is not method
    await opened.stop(60)
