"""Tails of many streams in one request, or one by one if the server lacks it. Without Spark."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from s2_sdk import AccessTokenScope, Operation, PrefixMatch

from streamfold.errors import (
    InvalidError,
    NotFoundError,
    PermissionDeniedError,
    RetryLaterError,
    StreamfoldError,
    UnauthenticatedError,
)
from streamfold.model.access_tokens import Secret
from streamfold.server.main import running_server
from streamfold.spark import EndpointUnavailableError
from streamfold.spark.stream.client import Endpoint, ServerConnection, StreamCalls
from tests.server.conftest import ROOT, configuration
from tests.server.durable_streams.test_access import issue

from .server import BASIN, Server

TAILS = "/v1/tails"


class OtherServer(ThreadingHTTPServer):
    """A server of another maker, with streams `s0`, `s1` and so on, whose tails are these numbers."""

    def __init__(self, unknown: int, tails: bytes) -> None:
        """`unknown`: its status for a path or method without a route; `tails`: an answer to all."""
        super().__init__(("127.0.0.1", 0), _Handler)
        self.unknown, self.tails = unknown, tails
        self.asked: list[str] = []
        self.failures = 0


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: OtherServer

    def do_GET(self) -> None:
        stream = self.path.split("/")[3]
        self.server.asked.append(stream)
        if not stream.startswith("s"):
            self._answer(404, b'{"code":"stream_not_found","message":"no such stream"}')
        else:
            tail = {"seq_num": int(stream[1:]), "timestamp": 0}
            self._answer(200, json.dumps({"tail": tail}).encode())

    def do_POST(self) -> None:
        self.server.asked.append(self.path)
        self.rfile.read(int(self.headers["content-length"]))
        if self.server.failures:
            self.server.failures -= 1
            self._answer(503, b'{"code":"unavailable","message":"not now"}')
        else:
            self._answer(self.server.unknown, self.server.tails)

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def other_server(
    unknown: int = 200, tails: bytes = b"", retry_timeout: float = 120.0
) -> Iterator[tuple[OtherServer, StreamCalls]]:
    """A running server, and a connection to it."""
    with OtherServer(unknown, tails) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            address = f"http://127.0.0.1:{server.server_address[1]}"
            with ServerConnection(
                Endpoint(address, BASIN, retry_timeout=retry_timeout)
            ) as connection:
                yield server, StreamCalls(connection)
        finally:
            server.shutdown()
            thread.join()


def test_the_tails_of_many_streams_are_read_at_once(
    server: Server, fresh: Callable[[], str]
) -> None:
    streams = [fresh() for _ in range(3)]
    for count, stream in enumerate(streams):
        server.append_numbers(stream, range(count))
    with ServerConnection(Endpoint(server.url, BASIN)) as connection:
        tails = StreamCalls(connection).tails([*streams, "missing", "x" * 513, streams[0]])
        assert not connection.lacks_tails
        assert StreamCalls(connection).tails([]) == {}
    assert [tails[stream] for stream in streams] == [0, 1, 2]
    assert isinstance(tails["missing"], NotFoundError)
    assert "the tail of 'missing'" in str(tails["missing"])
    assert isinstance(tails["x" * 513], InvalidError)
    assert len(tails) == 5


def test_more_streams_than_one_request_may_have_are_asked_for_in_several(
    server: Server, fresh: Callable[[], str]
) -> None:
    """By their number, and by the length of their names."""
    stream = fresh()
    server.append_numbers(stream, range(3))
    short, long = [f"none-{n}" for n in range(2500)], [f"{n:0>400}é" for n in range(500)]
    with ServerConnection(Endpoint(server.url, BASIN)) as connection:
        tails = StreamCalls(connection).tails([*short, *long, stream])
    assert list(tails) == [*short, *long, stream]
    assert tails.pop(stream) == 3
    assert {type(error) for error in tails.values()} == {NotFoundError}


async def test_a_token_gets_the_tails_that_it_may_see() -> None:
    async with running_server(configuration(root_token=Secret(ROOT))) as server:
        await server.store.create_basin(BASIN)
        for stream in ("own", "other"):
            await server.store.create_stream(BASIN, stream)
        scope = AccessTokenScope(
            basins=PrefixMatch(""), streams=PrefixMatch("own"), ops=[Operation.CHECK_TAIL]
        )
        token = await issue(server, scope)

        def tails(token: str) -> dict[str, int | StreamfoldError]:
            endpoint = Endpoint(f"http://127.0.0.1:{server.port}", BASIN, token)
            with ServerConnection(endpoint) as connection:
                return StreamCalls(connection).tails(["other", "own"])

        seen = await asyncio.to_thread(tails, token)
        assert seen["own"] == 0
        assert isinstance(seen["other"], PermissionDeniedError)
        with pytest.raises(UnauthenticatedError, match="the tails of 2 streams"):
            await asyncio.to_thread(tails, "no-token")


@pytest.mark.parametrize("unknown", [404, 405])
def test_a_server_that_lacks_the_request_is_asked_for_each_stream_from_then_on(
    unknown: int,
) -> None:
    with other_server(unknown) as (server, streams):
        for _ in range(2):
            tails = streams.tails(["s5", "none", "s7"])
            assert (tails["s5"], tails["s7"]) == (5, 7)
            assert isinstance(tails["none"], NotFoundError)
        assert server.asked == [TAILS, *["s5", "none", "s7"] * 2]


def test_a_request_for_tails_that_fails_for_a_moment_is_repeated() -> None:
    answer = b'{"tails":[{"stream":"a","tail":{"seq_num":5,"timestamp":0}}]}'
    with other_server(200, answer) as (server, streams):
        server.failures = 2
        assert streams.tails(["a"]) == {"a": 5}
        assert server.asked == [TAILS] * 3
    with other_server(200, answer, retry_timeout=1.0) as (server, streams):
        server.failures = 1_000
        with pytest.raises(EndpointUnavailableError, match="not now"):
            streams.tails(["a"])


def test_a_stream_that_fails_for_a_moment_does_not_hold_up_the_others() -> None:
    answer = (
        b'{"tails":[{"stream":"a","status":500,"error":{"code":"storage","message":"damaged"}},'
        b'{"stream":"b","tail":{"seq_num":5,"timestamp":0}}]}'
    )
    with other_server(200, answer) as (server, streams):
        tails = streams.tails(["a", "b"])
        assert isinstance(tails["a"], RetryLaterError)
        assert "storage: damaged" in str(tails["a"])
        assert tails["b"] == 5
        assert server.asked == [TAILS]
