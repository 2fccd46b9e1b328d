"""Malformed requests get a 4xx and have no effect."""

from __future__ import annotations

import json

import pytest

from streamfold.errors import BasinNotFoundError, StreamNotFoundError
from streamfold.server.main import Server, running_server
from tests.server.conftest import BASIN, configuration
from tests.server.raw_h1 import h1_client
from tests.server.raw_h2 import H2Client


async def ask(server: Server, head: bytes, body: bytes = b"") -> tuple[int, dict[str, str], bytes]:
    """The answer to a request; `head` has no length and no end."""
    async with h1_client(server.port) as client:
        await client.send(b"%b\r\ncontent-length: %d\r\n\r\n%b" % (head, len(body), body))
        status, headers = await client.head()
        size = 0 if head.startswith(b"HEAD") else int(headers.get("content-length", 0))
        return status, headers, await client.body(size)


@pytest.mark.parametrize("digits", [20, 5_000])
@pytest.mark.parametrize(
    "path",
    [
        b"/test-basin/streams?limit=%b",
        b"/v1/basins?limit=%b",
        b"/v1/stream/known?offset=%b",
        b"/v1/stream/known/snapshot/%b",
        b"/v1/stream/known/retention/%b",
        b"/v1/streams/orders/records?seq_num=%b",
        b"/v1/streams/orders/snapshot/%b",
        b"/v1/metrics?set=storage&start=%b",
    ],
)
async def test_numbers_of_any_length_are_refused_in_a_sentence(
    server: Server, path: bytes, digits: int
) -> None:
    target = path % (b"9" * digits)
    method = b"PUT" if b"retention" in path else b"GET"
    head = b"%b %b HTTP/1.1\r\nhost: localhost\r\ns2-basin: %b" % (method, target, BASIN.encode())
    status, _, body = await ask(server, head)
    assert status in (400, 404, 422)
    assert len(json.loads(body)["message"]) < 1_000


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET *", 400),
        (b"OPTIONS *", 204),
        (b"CONNECT localhost:80", 400),
        (b"GET localhost:80", 400),
        (b"GET http://localhost/health", 200),
        (b"GET http://localhost", 200),
        (b"GET /%FF/%FF", 400),
        (b"GET //", 404),
    ],
)
async def test_targets_of_every_form_are_answered(
    server: Server, request_line: bytes, status: int
) -> None:
    head = b"%b HTTP/1.1\r\nhost: localhost" % request_line
    assert (await ask(server, head))[0] == status


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_a_host_that_cannot_be_one_is_refused_before_anything_happens(host: str) -> None:
    settings = configuration(host=host)
    async with running_server(settings) as server:
        for bad in (b"a\xff", b"a b", b"a/b", b"\xc3\xa9"):
            status, _, _ = await ask(server, b"PUT /v1/stream/s HTTP/1.1\r\nhost: %b" % bad)
            assert status in (400, 403)
        with pytest.raises((StreamNotFoundError, BasinNotFoundError)):
            await server.store.check_tail(settings.default_basin, "s")


@pytest.mark.parametrize("source", [b"/b/\xff", b"/v1/stream/\xff", b"\xff", b"/test-basin/%FF"])
async def test_the_source_of_a_fork_must_be_text(server: Server, source: bytes) -> None:
    head = b"PUT /v1/stream/fork HTTP/1.1\r\nhost: localhost\r\nstream-forked-from: %b" % source
    status, _, body = await ask(server, head)
    assert (status, json.loads(body)["code"]) in ((400, "invalid"), (404, "stream_not_found"))


async def test_a_creation_that_is_refused_leaves_no_bucket(server: Server) -> None:
    head = b"PUT /new-bucket/s HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json"
    assert (await ask(server, head, b"[1,"))[0] == 400
    with pytest.raises(BasinNotFoundError):
        await server.store.basin_config("new-bucket")


async def test_a_path_in_utf8_names_the_stream_that_its_escapes_name(server: Server) -> None:
    raw, escaped = "/v1/stream/é".encode(), b"/v1/stream/%C3%A9"
    head = b"%b %b HTTP/1.1\r\nhost: localhost"
    status, headers, _ = await ask(server, head % (b"PUT", raw))
    assert (status, headers["location"]) == (201, "http://localhost/v1/stream/%C3%A9")
    assert (await ask(server, head % (b"HEAD", escaped)))[0] == 200


async def test_what_is_quoted_in_a_refusal_is_short(h2: H2Client) -> None:
    long = "x" * 60_000
    made = [("content-type", "text/plain"), ("content-length", "0")]
    assert (await h2.exchange("PUT", "/v1/stream/quoted", made, b"")).status == 201
    for status, method, path, headers, body in (
        (400, "POST", "/v1/basins", {}, {"basin": long}),
        (400, "POST", "/v1/access-tokens", {}, {"id": "a", "scope": {"ops": [long]}}),
        (400, "PUT", "/v1/stream/__ds/subscriptions/s", {}, {"type": long}),
        (400, "GET", f"/v1/stream/quoted?offset=-1&live={long}", {}, None),
        (404, "PUT", "/v1/stream/fork", {"stream-forked-from": f"/{long}"}, {}),
        (409, "POST", "/v1/stream/quoted", {"content-type": long}, {}),
        (409, "PUT", "/v1/stream/quoted/snapshot/0", {"stream-snapshot-match": long}, {}),
    ):
        sent = None if body is None else json.dumps(body).encode()
        head = {"content-type": "application/json", "content-length": str(len(sent or b""))}
        answer = await h2.exchange(method, path, [*(head | headers).items()], sent)
        assert (answer.status, len(answer.body) < 1_000) == (status, True), path[:40]


@pytest.mark.parametrize("name", ["host", "origin", "authorization", "s2-basin"])
async def test_a_header_that_says_who_is_calling_may_come_once(server: Server, name: str) -> None:
    """A proxy may look at the first of two, and this server at the last."""
    values = {"host": "localhost", "s2-basin": BASIN, name: "localhost"}
    head = b"GET /v1/streams HTTP/1.1" + b"".join(
        b"\r\n%b: %b" % (header.encode(), value.encode()) for header, value in values.items()
    )
    twice = b"%b\r\n%b: other" % (head, name.encode())
    status, _, body = await ask(server, twice)
    assert (status, json.loads(body)["code"]) == (400, "bad_header")
    assert "may come once" in json.loads(body)["message"]
