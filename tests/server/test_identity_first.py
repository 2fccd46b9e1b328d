"""Callers are authenticated before their bodies are read."""

from __future__ import annotations

import pytest

from streamfold.model.access_tokens import AccessToken, ResourceSet, Right, Scope, Secret
from streamfold.server.main import running_server
from tests.server.conftest import BASIN, STREAM, configuration
from tests.server.raw_h1 import h1_client

ROOT = "the-root-token-of-this-test"
JSON, OCTETS = "application/json", "application/octet-stream"
#: Every route of both faces that has a body.
ROUTES = [
    ("POST", "/v1/access-tokens", JSON),
    ("POST", "/v1/basins", JSON),
    ("PUT", f"/v1/basins/{BASIN}", JSON),
    ("PATCH", f"/v1/basins/{BASIN}", JSON),
    ("POST", "/v1/streams", JSON),
    ("PUT", f"/v1/streams/{STREAM}", JSON),
    ("PATCH", f"/v1/streams/{STREAM}", JSON),
    ("POST", f"/v1/streams/{STREAM}/records", JSON),
    ("POST", f"/v1/streams/{STREAM}/records", "application/protobuf"),
    ("POST", f"/v1/streams/{STREAM}/records", "s2s/proto"),
    ("PUT", f"/v1/streams/{STREAM}/snapshot/0", OCTETS),
    ("PUT", "/v1/locations/default", JSON),
    ("PUT", f"/{BASIN}/{STREAM}", OCTETS),
    ("POST", f"/{BASIN}/{STREAM}", OCTETS),
    ("PUT", f"/{BASIN}/{STREAM}/snapshot/0000000000000000_0000000000000000", OCTETS),
    ("PUT", "/v1/stream/some/stream", OCTETS),
    ("POST", "/v1/stream/some/stream", OCTETS),
    ("PUT", "/v1/stream/__ds/subscriptions/one", JSON),
    ("POST", "/v1/stream/__ds/subscriptions/one/streams", JSON),
    ("POST", "/v1/stream/__ds/subscriptions/one/claim", JSON),
    ("POST", "/v1/stream/__ds/subscriptions/one/ack", JSON),
    ("POST", "/v1/stream/__ds/subscriptions/one/callback", JSON),
    ("POST", "/v1/stream/__ds/subscriptions/one/release", JSON),
]


async def status_without_a_body(
    port: int, method: str, path: str, content_type: str, authorization: str
) -> int:
    """The answer to a head that announces a body which never comes."""
    async with h1_client(port) as client:
        await client.send(
            f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ns2-basin: {BASIN}\r\n{authorization}"
            f"content-type: {content_type}\r\ncontent-length: 1000000\r\n\r\n".encode()
        )
        status, _ = await client.head()
        return status


@pytest.mark.parametrize(("method", "path", "content_type"), ROUTES)
async def test_a_stranger_is_refused_before_its_body(
    method: str, path: str, content_type: str
) -> None:
    async with running_server(configuration(root_token=Secret(ROOT))) as server:
        for header in ("", "authorization: Bearer wrong\r\n"):
            status = await status_without_a_body(server.port, method, path, content_type, header)
            assert status == 401


@pytest.mark.parametrize(("method", "path", "content_type"), ROUTES)
async def test_a_caller_without_the_right_is_refused_before_its_body(
    method: str, path: str, content_type: str
) -> None:
    async with running_server(configuration(root_token=Secret(ROOT))) as server:
        await server.store.create_basin(BASIN)
        everything = ResourceSet.prefix("")
        scope = Scope(
            basins=everything,
            streams=everything,
            access_tokens=everything,
            ops=frozenset((Right.LIST_BASINS,)),
        )
        secret = await server.store.account.issue_access_token(AccessToken("reader", scope))
        header = f"authorization: Bearer {secret.text}\r\n"
        status = await status_without_a_body(server.port, method, path, content_type, header)
        # Another caller's subscription, or an invalid token of a wake, reveals nothing more.
        assert status in ((401, 403, 404) if "__ds" in path else (403,))
