"""Access tokens guard streams here as they do on the other face."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from s2_sdk import (
    AccessTokenScope,
    ExactMatch,
    Operation,
    PrefixMatch,
)

from streamfold.server.main import Server
from tests.sdk import sdk_client
from tests.server.conftest import ROOT
from tests.server.durable_streams.conftest import JSON, browsing

BUCKET = "durable-streams"
STREAM = "/v1/stream/orders"


@pytest.fixture
async def guarded(guarded: Server) -> Server:
    """With a stream of two messages, and a snapshot of the first."""
    async with browsing(guarded, headers=bearer(ROOT)) as root:
        await root.put(STREAM, headers=JSON, content=b"[1,2]")
        await root.put(f"{STREAM}/snapshot/1", content=b"state")
    return guarded


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


async def issue(
    server: Server, scope: AccessTokenScope, *, name: str = "token", prefixed: bool = False
) -> str:
    endpoint = f"http://127.0.0.1:{server.port}"
    async with sdk_client(endpoint, ROOT) as s2:
        secret: str = await s2.issue_access_token(name, scope=scope, auto_prefix_streams=prefixed)
        return secret


#: Requests, and the operation that each needs.
NEEDED = [
    ("POST", STREAM, Operation.APPEND),
    ("GET", STREAM, Operation.READ),
    ("GET", f"{STREAM}?offset=now&live=long-poll", Operation.READ),
    ("GET", f"{STREAM}?offset=now&live=sse", Operation.READ),
    ("HEAD", STREAM, Operation.CHECK_TAIL),
    ("GET", f"{STREAM}/snapshot", Operation.READ),
    ("GET", f"{STREAM}/snapshot/1", Operation.READ),
    ("GET", f"{STREAM}/snapshots", Operation.READ),
    ("GET", f"{STREAM}/bootstrap", Operation.READ),
    ("PUT", f"{STREAM}/snapshot/2", Operation.APPEND),
    ("PUT", f"{STREAM}/retention/1", Operation.TRIM),
    ("DELETE", f"{STREAM}/snapshot/9", Operation.TRIM),
    ("DELETE", STREAM, Operation.DELETE_STREAM),
]


async def test_without_a_good_token_nothing_is_possible(guarded: Server) -> None:
    for headers in ({}, bearer("not-a-token"), {"authorization": "Basic eDp5"}):
        async with browsing(guarded, headers=headers) as web:
            for method, path, _ in NEEDED:
                refused = await web.request(method, path, headers=JSON, content=b"3")
                assert refused.status_code == 401, (method, path)
                assert refused.headers["x-content-type-options"] == "nosniff"
    async with browsing(guarded, headers=bearer(ROOT)) as root:
        assert (await root.get(STREAM)).json() == [1, 2]


@pytest.mark.parametrize(("method", "path", "needed"), NEEDED)
async def test_each_request_needs_its_operation_and_no_other(
    guarded: Server, method: str, path: str, needed: Operation
) -> None:
    everywhere = {"basins": ExactMatch(BUCKET), "streams": PrefixMatch("")}
    others = list({operation for _, _, operation in NEEDED} - {needed})
    poor = await issue(guarded, AccessTokenScope(**everywhere, ops=others), name="poor")
    rich = await issue(guarded, AccessTokenScope(**everywhere, ops=[needed]), name="rich")
    async with browsing(guarded) as web:
        headers = JSON | bearer(poor)
        refused = await web.request(method, path, headers=headers, content=b"3")
        assert refused.status_code == 403, refused.text
        headers = JSON | bearer(rich)
        async with web.stream(method, path, headers=headers, content=b"3") as allowed:
            assert allowed.status_code in (200, 201, 204, 307, 404), allowed.status_code


@pytest.mark.parametrize(
    ("headers", "content"),
    [
        pytest.param({}, b"[3]", id="content"),
        pytest.param({"transfer-encoding": "chunked"}, b"[3]", id="content of undeclared size"),
        pytest.param({"stream-closed": "true"}, b"", id="closed"),
        pytest.param({"stream-closed": "true"}, b"[3]", id="closed with content"),
        pytest.param({"stream-forked-from": STREAM}, b"[3]", id="fork with content"),
        pytest.param(
            {"stream-forked-from": STREAM, "stream-closed": "true"}, b"", id="closed fork"
        ),
    ],
)
async def test_a_creation_that_writes_needs_the_right_to_append(
    guarded: Server, headers: dict[str, str], content: bytes
) -> None:
    creating = [Operation.CREATE_STREAM, Operation.READ]
    everywhere = {"basins": ExactMatch(BUCKET), "streams": PrefixMatch("")}
    creator = AccessTokenScope(**everywhere, ops=creating)
    writer = AccessTokenScope(**everywhere, ops=[*creating, Operation.APPEND])
    secrets = {
        403: await issue(guarded, creator, name="creator"),
        201: await issue(guarded, writer, name="writer"),
    }
    for status, secret in secrets.items():
        async with browsing(guarded, headers=bearer(secret)) as web:
            sent = headers | JSON
            answer = await web.put(
                "/v1/stream/new", headers=sent, content=_pieces(content, headers)
            )
            assert answer.status_code == status, answer.text


def _pieces(content: bytes, headers: dict[str, str]) -> bytes | AsyncIterator[bytes]:
    """The content, in a form of which a client does not know the size if it is to be chunked."""

    async def pieces() -> AsyncIterator[bytes]:
        yield content

    return pieces() if "transfer-encoding" in headers else content


async def test_an_empty_creation_needs_the_right_to_create_and_no_other(guarded: Server) -> None:
    everywhere = {"basins": ExactMatch(BUCKET), "streams": PrefixMatch("")}
    others = list({operation for _, _, operation in NEEDED} - {Operation.CREATE_STREAM})
    for status, ops in ((403, others), (201, [Operation.CREATE_STREAM])):
        secret = await issue(guarded, AccessTokenScope(**everywhere, ops=ops), name=str(status))
        async with browsing(guarded, headers=bearer(secret)) as web:
            assert (await web.put("/v1/stream/new", headers=JSON)).status_code == status


async def test_a_token_is_for_its_streams_only(guarded: Server) -> None:
    scope = AccessTokenScope(
        basins=ExactMatch(BUCKET),
        streams=PrefixMatch("mine/"),
        ops=[Operation.CREATE_STREAM, Operation.READ],
    )
    async with browsing(guarded, headers=bearer(await issue(guarded, scope))) as web:
        assert (await web.put("/v1/stream/mine/a", headers=JSON)).status_code == 201
        assert (await web.put("/v1/stream/others/a", headers=JSON)).status_code == 403
        assert (await web.put("/other-bucket/mine", headers=JSON)).status_code == 403
        assert (await web.get(STREAM)).status_code == 403
        assert (await web.get(f"{STREAM}/snapshot/1")).status_code == 403


async def test_a_snapshot_that_is_to_trim_needs_the_right_to_trim(guarded: Server) -> None:
    everywhere = {"basins": ExactMatch(BUCKET), "streams": PrefixMatch("")}
    writer = AccessTokenScope(**everywhere, ops=[Operation.APPEND])
    trimmer = AccessTokenScope(**everywhere, ops=[Operation.APPEND, Operation.TRIM])
    trimming = {"stream-trim-on-snapshot": "true"}
    other_face = {"s2-basin": BUCKET, **trimming}
    paths = {f"{STREAM}/snapshot/2": trimming, "/v1/streams/orders/snapshot/2": other_face}
    for name, scope, status in (("w", writer, 403), ("t", trimmer, 204)):
        secret = await issue(guarded, scope, name=name)
        async with browsing(guarded, headers=bearer(secret)) as web:
            for path, headers in paths.items():
                published = await web.put(path, content=b"two", headers=headers)
                assert published.status_code == status, published.text


async def test_a_fork_needs_the_right_to_read_its_source(guarded: Server) -> None:
    scope = AccessTokenScope(
        basins=ExactMatch(BUCKET),
        streams=PrefixMatch("mine/"),
        ops=[Operation.CREATE_STREAM, Operation.READ],
    )
    async with browsing(guarded, headers=bearer(await issue(guarded, scope))) as web:
        fork = {"stream-forked-from": STREAM}
        assert (await web.put("/v1/stream/mine/fork", headers=fork)).status_code == 403
        assert (await web.get("/v1/stream/mine/fork")).status_code == 404


async def tenant(server: Server) -> str:
    scope = AccessTokenScope(
        basins=PrefixMatch(""),
        streams=PrefixMatch("tenant-1/"),
        ops=[
            Operation.CREATE_STREAM,
            Operation.READ,
            Operation.APPEND,
            Operation.CHECK_TAIL,
            Operation.DELETE_STREAM,
        ],
    )
    return await issue(server, scope, prefixed=True)


async def test_an_auto_prefixed_caller_lives_in_streams_of_its_own(guarded: Server) -> None:
    async with browsing(guarded, headers=bearer(await tenant(guarded))) as web:
        created = await web.put("/v1/stream/orders", headers=JSON, content=b"[7]")
        assert created.status_code == 201
        assert created.headers["location"].endswith("/v1/stream/orders")
        await web.post("/v1/stream/orders", headers=JSON, content=b"8")
        assert (await web.get("/v1/stream/orders")).json() == [7, 8]
        fork = {"stream-forked-from": "/v1/stream/orders"}
        assert (await web.put("/v1/stream/fork", headers=fork)).status_code == 201
        assert (await web.get("/v1/stream/fork")).json() == [7, 8]
    async with browsing(guarded, headers=bearer(ROOT)) as root:
        assert (await root.get("/v1/stream/tenant-1/fork")).json() == [7, 8]
        assert (await root.get(STREAM)).json() == [1, 2]


async def test_an_auto_prefixed_caller_cannot_fork_the_streams_of_others(guarded: Server) -> None:
    async with browsing(guarded, headers=bearer(await tenant(guarded))) as web:
        fork = {"stream-forked-from": STREAM}
        assert (await web.put("/v1/stream/stolen", headers=fork)).status_code == 404
        assert (await web.get("/v1/stream/stolen")).status_code == 404


async def test_reads_are_not_for_shared_caches(guarded: Server) -> None:
    async with browsing(guarded, headers=bearer(ROOT)) as root:
        await root.put("/v1/stream/big", headers={"content-type": "text/plain"})
        for _ in range(3):
            await root.post(
                "/v1/stream/big", headers={"content-type": "text/plain"}, content=b"x" * (4 << 20)
            )
        page = await root.get("/v1/stream/big")
        assert "stream-up-to-date" not in page.headers
        assert page.headers["cache-control"].startswith("private")


async def test_preflights_need_no_token(guarded: Server) -> None:
    async with browsing(guarded) as web:
        assert (await web.options(STREAM)).status_code == 204
