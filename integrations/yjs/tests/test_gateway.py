"""The gateway over a real server: what it refuses, and what it says when Streamfold refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pycrdt
import pytest
from tests.ports import free_port
from tests.server.conftest import configuration, until

from streamfold.model.access_tokens import Secret
from streamfold.server.main import running_server
from streamfold_yjs import make_app
from streamfold_yjs.updates import frame

DOCUMENT = "/v1/yjs/notes/docs/a"
UPDATES = "/v1/stream/yjs/notes/docs/a/.updates"
ROOT = "root-" + "t" * 40
BEARER = {"authorization": f"Bearer {ROOT}"}


@asynccontextmanager
async def gateway(streamfold: str, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = make_app(streamfold, **settings)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://gateway") as client,
    ):
        yield client


def update(text: str) -> bytes:
    """A change that a client makes in a document of its own."""
    document: pycrdt.Doc[Any] = pycrdt.Doc()
    content = document.get("text", type=pycrdt.Text)
    content += text
    return frame(bytes(document.get_update()))


async def snapshot_of(yjs: httpx.AsyncClient) -> str:
    """The offset of the document's snapshot, as soon as there is one."""
    async with asyncio.timeout(60):
        while True:
            answer = await yjs.get(DOCUMENT, params={"offset": "snapshot"})
            assert answer.status_code == 307
            offset = httpx.URL(answer.headers["location"]).params["offset"]
            if offset != "-1":
                return offset
            await asyncio.sleep(0.005)


async def test_a_body_that_is_no_update_is_refused_and_stores_nothing() -> None:
    async with running_server(configuration()) as server, gateway(server.url) as yjs:
        created = await yjs.put(DOCUMENT)
        for body in (b"", b"\x01\x02\x03", update("a") + b"\x05"):
            answer = await yjs.post(DOCUMENT, content=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "INVALID_REQUEST"
        head = await yjs.head(DOCUMENT)
        assert head.headers["stream-next-offset"] == created.headers["stream-next-offset"]


async def test_records_of_somebody_else_are_not_compacted_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        running_server(configuration()) as server,
        gateway(server.url, compact_after=100) as yjs,
        httpx.AsyncClient(base_url=server.url, timeout=60) as streamfold,
    ):
        await yjs.put(DOCUMENT)
        binary = {"content-type": "application/octet-stream"}
        await streamfold.post(UPDATES, content=b"\x03\xff\xff\xff", headers=binary)
        (await yjs.post(DOCUMENT, content=update("x" * 100))).raise_for_status()
        await until(lambda: "stays as it is" in caplog.text)
        stored = await streamfold.get(UPDATES)
        assert stored.content.startswith(b"\x03\xff\xff\xff")


async def test_a_reader_from_before_a_snapshot_gets_it_as_its_first_update() -> None:
    async with (
        running_server(configuration()) as server,
        gateway(server.url, compact_after=100) as yjs,
    ):
        await yjs.put(DOCUMENT)
        for text in ("first", "second", "x" * 100):
            (await yjs.post(DOCUMENT, content=update(text))).raise_for_status()
        key = await snapshot_of(yjs)
        snapshot = await yjs.get(DOCUMENT, params={"offset": key})
        start = await yjs.get(DOCUMENT, params={"offset": "-1"})
        assert start.content == frame(snapshot.content)
        behind = {snapshot.headers["stream-next-offset"], start.headers["stream-next-offset"]}
        for offset in behind:
            rest = await yjs.get(DOCUMENT, params={"offset": offset})
            assert rest.status_code == 200
            assert rest.content == b""
            assert "stream-up-to-date" in rest.headers
        document: pycrdt.Doc[Any] = pycrdt.Doc()
        document.apply_update(snapshot.content)
        text = str(document.get("text", type=pycrdt.Text))
        assert sorted(text) == sorted("first" + "second" + "x" * 100)


async def test_a_document_needs_a_token_that_streamfold_accepts() -> None:
    async with (
        running_server(configuration(root_token=Secret(ROOT))) as server,
        gateway(server.url) as yjs,
    ):
        (await yjs.put(DOCUMENT, headers=BEARER)).raise_for_status()
        for headers in ({}, {"authorization": "Bearer of-somebody-else"}):
            for method in ("PUT", "POST", "GET", "HEAD", "DELETE"):
                body = update("a") if method == "POST" else b""
                answer = await yjs.request(method, DOCUMENT, headers=headers, content=body)
                assert answer.status_code == 401, method
                if method != "HEAD":
                    assert answer.json()["error"]["code"] == "UNAUTHORIZED"
        (await yjs.get(DOCUMENT, headers=BEARER)).raise_for_status()


async def test_the_own_token_needs_the_rights_of_the_guide() -> None:
    ops = ["read", "append", "trim", "list-streams", "delete-stream"]
    scope = {"basins": {"prefix": ""}, "streams": {"prefix": "yjs/"}, "ops": ops}
    async with (
        running_server(configuration(root_token=Secret(ROOT))) as server,
        httpx.AsyncClient(base_url=server.url, headers=BEARER, timeout=60) as streamfold,
    ):
        issued = await streamfold.post("/v1/access-tokens", json={"id": "yjs", "scope": scope})
        token = issued.raise_for_status().json()["access_token"]
        async with gateway(server.url, token=token, compact_after=100) as yjs:
            yjs.headers.update(BEARER)
            (await yjs.put(DOCUMENT)).raise_for_status()
            (await yjs.post(DOCUMENT, content=update("x" * 100))).raise_for_status()
            await snapshot_of(yjs)
            awareness = UPDATES.replace(".updates", ".awareness/default")
            assert (await streamfold.head(awareness)).status_code == 200
            (await yjs.delete(DOCUMENT)).raise_for_status()
            for path in (UPDATES, awareness):
                assert (await streamfold.head(path)).status_code == 404


async def test_a_streamfold_that_is_away_is_unavailable() -> None:
    async with gateway(f"http://127.0.0.1:{free_port()}") as yjs:
        for method in ("PUT", "GET"):
            answer = await yjs.request(method, DOCUMENT)
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "UNAVAILABLE"


@pytest.mark.parametrize("name", ["a%2F..%2Fb", ".updates", "a/.awareness/b", "a b", "a" * 257])
async def test_names_that_could_be_other_streams_are_refused(name: str) -> None:
    async with gateway(f"http://127.0.0.1:{free_port()}") as yjs:
        answer = await yjs.put(f"/v1/yjs/notes/docs/{name}")
        assert answer.status_code in (400, 404)
        assert "UNAVAILABLE" not in answer.text


async def test_pages_of_other_origins_are_refused_unless_they_are_named() -> None:
    asked = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type",
    }
    async with gateway("http://127.0.0.1:1", cors_origins=["https://app.example"]) as yjs:
        for origin, allowed in {
            "https://app.example": True,
            "http://localhost:3000": True,
            "https://other.example": False,
            "http://localhost.other.example": False,
        }.items():
            answer = await yjs.options(DOCUMENT, headers={"origin": origin, **asked})
            assert ("access-control-allow-origin" in answer.headers) is allowed, origin
