"""Every route answers malformed requests. `make prove` sends a hundred thousand."""

from __future__ import annotations

import asyncio
import re

import pytest

from tests.hostile.attack import Outcome, all_routes, attack, send_h1
from tests.hostile.requests import HostileRequest, Requests

REQUESTS, SEED = 2_500, 20_260_118


@pytest.mark.alone
async def test_no_request_makes_a_server_fail_or_holds_it_up() -> None:
    """Over HTTP/1.1, HTTP/2 and as bytes that are neither, beside an ordinary client."""
    outcome = await attack(REQUESTS, SEED, settle=0.0)
    assert not outcome.findings, f"seed {SEED}:\n" + "\n".join(outcome.findings)
    assert outcome.sent == REQUESTS
    assert outcome.ordinary > 0
    # The requests were right enough to be looked at.
    assert {200, 201, 204, 400, 404, 405, 409, 422} <= set(outcome.statuses)


async def test_requests_reach_every_route() -> None:
    routes = await all_routes()
    requests = Requests(routes, SEED)
    made = [requests.next() for _ in range(REQUESTS)]
    for route in routes:
        pattern = re.escape(route.path).replace(r"\{\}", "[^/?]*").replace(r"\{\.\.\.\}", "[^?]*")
        fits = re.compile(rf"{pattern}(\?.*)?")
        assert any(
            one.method.decode() == route.method and fits.fullmatch(one.target.decode("latin-1"))
            for one in made
        ), route


async def test_an_answer_500_and_a_missing_answer_are_findings() -> None:
    request = HostileRequest(b"GET", b"/", (), b"")
    for answer, status in ((b"HTTP/1.1 500 Oops\r\n\r\n", 500), (b"", 0)):

        async def serve(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: bytes = answer
        ) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            writer.close()

        outcome = Outcome()
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            await send_h1(server.sockets[0].getsockname()[1], [request], outcome)
        [finding] = outcome.findings
        assert finding.startswith(f"{status}: b'GET / HTTP/1.1")
