"""Web pages: which may use a server, and which are refused before anything happens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import product
from typing import Any

import httpx
import pytest

from streamfold.errors import InvalidError
from streamfold.model.access_tokens import Secret
from streamfold.server.http.cors import parse_origin
from streamfold.server.main import running_server
from tests.server.conftest import BASIN, STREAM, configuration
from tests.server.durable_streams.conftest import JSON, browsing

ROOT = "a-root-token-of-this-test"
FOREIGN = {"origin": "https://app.example"}
LOCAL = {"origin": "http://localhost:5173"}
#: One path of each face, and one that watches the server.
PATHS = ["/v1/basins", f"/v1/stream/{STREAM}", "/health"]

ALLOWED = "access-control-allow-origin"


@asynccontextmanager
async def visited(**changes: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server with a basin and a stream."""
    async with (
        running_server(configuration(long_poll=0.1, **changes)) as server,
        browsing(server) as web,
    ):
        await server.store.create_basin(BASIN)
        token = {"authorization": f"Bearer {ROOT}"}
        created = await web.put(f"/v1/stream/{STREAM}", headers=JSON | token, content=b"[1]")
        assert created.status_code == 201
        yield web


def assert_refused(answer: httpx.Response, code: str = "origin_not_allowed") -> None:
    assert (answer.status_code, answer.json()["code"]) == (403, code)
    assert not [name for name in answer.headers if name.startswith("access-control-")]


#: Origins of pages, and whether they are of this machine.
ORIGINS = {
    "http://localhost": True,
    "http://localhost:5173": True,
    "https://localhost:8443": True,
    "http://127.0.0.1:3000": True,
    "http://127.8.9.10": True,
    "http://[::1]:3000": True,
    "https://app.example": False,
    "null": False,
    "": False,
    "http://localhost.evil.example": False,
    "http://evil.example/localhost": False,
    "http://localhost@evil.example": False,
    "http://127.0.0.1.evil.example": False,
    "file://": False,
    "chrome-extension://abcdefgh": False,
    "http://10.0.0.1": False,
}
EACH = list(product(PATHS, ORIGINS.items()))


async def test_without_tokens_pages_of_this_machine_may_use_it() -> None:
    async with visited() as web:
        for path, origin in [(path, origin) for path, (origin, local) in EACH if local]:
            answer = await web.get(path, headers={"origin": origin})
            assert answer.status_code == 200
            assert answer.headers[ALLOWED] == origin
            assert "stream-next-offset" in answer.headers["access-control-expose-headers"]
            assert "s2-provision-result" in answer.headers["access-control-expose-headers"]
            assert "origin" in answer.headers.get_list("vary")
            assert "access-control-allow-credentials" not in answer.headers


async def test_without_tokens_other_pages_are_refused() -> None:
    async with visited() as web:
        for path, origin in [(path, origin) for path, (origin, local) in EACH if not local]:
            assert_refused(await web.get(path, headers={"origin": origin}))


async def test_a_form_of_another_page_changes_nothing() -> None:
    form = FOREIGN | {"content-type": "text/plain"}
    async with visited() as web:
        for path in (f"/v1/stream/{STREAM}", f"/v1/streams/{STREAM}/records"):
            assert_refused(await web.post(path, headers=form, content=b"2"))
        assert_refused(await web.put("/v1/stream/another", headers=form))
        assert_refused(await web.delete(f"/v1/stream/{STREAM}", headers=form))
        assert (await web.get("/v1/stream/another")).status_code == 404
        assert (await web.get(f"/v1/stream/{STREAM}")).json() == [1]


async def test_what_another_site_embeds_is_refused_and_a_link_is_followed() -> None:
    async with visited() as web:
        image = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
        assert_refused(await web.get(f"/v1/stream/{STREAM}", headers=image))
        link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
        assert (await web.get(f"/v1/stream/{STREAM}", headers=link)).status_code == 200
        own = {"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors"}
        assert (await web.get(f"/v1/stream/{STREAM}", headers=own)).status_code == 200


async def test_a_preflight_is_answered_for_pages_that_may_call() -> None:
    asks = {
        "access-control-request-method": "PUT",
        "access-control-request-headers": "s2-basin,authorization",
    }
    async with visited() as web:
        for path in PATHS:
            answer = await web.options(path, headers=LOCAL | asks)
            assert answer.status_code == 204
            assert answer.headers[ALLOWED] == LOCAL["origin"]
            assert "PUT" in answer.headers["access-control-allow-methods"]
            assert answer.headers["access-control-allow-headers"] == "s2-basin,authorization"
            assert "access-control-allow-credentials" not in answer.headers
            refused = await web.options(path, headers=FOREIGN | asks)
            assert refused.status_code == 204
            assert ALLOWED not in refused.headers


async def test_a_failure_can_be_read_by_pages_that_may_call() -> None:
    async with visited() as web:
        for path in ("/v1/nowhere", "/v1/stream/missing"):
            answer = await web.get(path, headers=LOCAL)
            assert answer.status_code == 404
            assert answer.headers[ALLOWED] == LOCAL["origin"]


async def test_an_origin_that_was_named_may_call_and_others_may_not() -> None:
    async with visited(cors_origins=("https://app.example",)) as web:
        for origin in (FOREIGN, LOCAL):
            answer = await web.get("/v1/basins", headers=origin)
            assert answer.headers[ALLOWED] == origin["origin"]
        assert_refused(await web.get("/v1/basins", headers={"origin": "https://other.example"}))


@pytest.mark.parametrize(
    "changes", [{"cors_origins": ("*",)}, {"root_token": Secret(ROOT)}], ids=["star", "auth"]
)
async def test_with_tokens_or_a_star_every_page_may_call(changes: dict[str, Any]) -> None:
    async with visited(**changes) as web:
        for path, origin in product(PATHS, ("https://app.example", "http://localhost", "null")):
            token = {"authorization": f"Bearer {ROOT}"}
            answer = await web.get(path, headers={"origin": origin} | token)
            assert answer.status_code == 200
            assert answer.headers[ALLOWED] == "*"
            assert "access-control-allow-credentials" not in answer.headers


async def test_with_tokens_a_page_without_one_learns_what_is_missing() -> None:
    async with visited(root_token=Secret(ROOT)) as web:
        answer = await web.get("/v1/basins", headers=FOREIGN)
        assert answer.status_code == 401
        assert answer.headers[ALLOWED] == "*"


async def test_without_cors_no_page_of_another_origin_may_use_it() -> None:
    async with visited(cors=False) as web:
        for path in PATHS:
            assert_refused(await web.get(path, headers=LOCAL))
            assert (await web.get(path)).status_code == 200
    async with visited(cors=False, root_token=Secret(ROOT)) as web:
        answer = await web.get("/health", headers=FOREIGN)
        assert answer.status_code == 200
        assert ALLOWED not in answer.headers


async def test_a_page_of_the_server_itself_may_use_it() -> None:
    async with visited(cors=False) as web:
        own = {"origin": str(web.base_url).rstrip("/")}
        assert (await web.get("/v1/basins", headers=own)).status_code == 200


async def test_a_name_that_was_made_to_lead_to_this_machine_is_refused() -> None:
    async with visited() as web:
        for path, host in product(PATHS, ("evil.example", "localhost.evil.example:80", "a@b", "[")):
            assert_refused(await web.get(path, headers={"host": host}), "host_not_allowed")
        host = "evil.example"
        form = {"host": host, "origin": f"http://{host}", "content-type": "application/json"}
        refused = await web.post(f"/v1/stream/{STREAM}", headers=form, content=b"2")
        assert_refused(refused, "host_not_allowed")
        assert (await web.get(f"/v1/stream/{STREAM}")).json() == [1]


async def test_a_name_that_leads_here_is_refused_over_http_2() -> None:
    async with (
        running_server(configuration()) as server,
        browsing(server, http1=False, http2=True) as web,
    ):
        refused = await web.get("/health", headers={"host": "evil.example"})
        assert refused.http_version == "HTTP/2"
        assert_refused(refused, "host_not_allowed")
        assert (await web.get("/health")).status_code == 200


async def test_a_server_for_this_machine_answers_to_its_own_names() -> None:
    async with visited(public_url="https://streams.example/below") as web:
        for host in ("localhost:80", "LOCALHOST", "127.0.0.1", "[::1]:8080", "192.168.1.7:80"):
            assert (await web.get("/health", headers={"host": host})).status_code == 200
        assert (await web.get("/health", headers={"host": "streams.example"})).status_code == 200


@pytest.mark.parametrize(
    "changes",
    [{"host": "0.0.0.0"}, {"root_token": Secret(ROOT)}, {"cors_origins": ("*",)}],
    ids=["host", "auth", "star"],
)
async def test_other_servers_answer_to_every_name(changes: dict[str, Any]) -> None:
    async with visited(**changes) as web:
        assert (await web.get("/health", headers={"host": "any.example"})).status_code == 200


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("*", "*"),
        ("https://App.Example", "https://app.example"),
        ("https://app.example:443", "https://app.example"),
        ("http://app.example:8080", "http://app.example:8080"),
        ("http://[2001:db8::1]:80", "http://[2001:db8::1]"),
    ],
)
def test_an_origin_is_kept_as_browsers_write_it(text: str, origin: str) -> None:
    assert parse_origin(text) == origin


@pytest.mark.parametrize(
    "text",
    ["", "null", "app.example", "https://app.example/", "https://*.example", "ftp://x", "**"],
)
def test_what_is_not_an_origin_is_refused(text: str) -> None:
    with pytest.raises(InvalidError, match="origin"):
        parse_origin(text)
