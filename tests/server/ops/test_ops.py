"""Operator endpoints."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import pytest

from streamfold import __version__
from streamfold.model.access_tokens import AccessToken, ResourceSet, Right, Scope, Secret
from streamfold.model.records import Record
from streamfold.server.main import running_server
from streamfold.store.usage import busy_streams
from tests.server.conftest import BASIN, configuration
from tests.server.frames import PATH
from tests.server.raw_h2 import H2Client, h2_client
from tests.store.conftest import incompressible


async def metrics(h2: H2Client) -> dict[str, str]:
    answer = await h2.exchange("GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return dict(line.rsplit(" ", 1) for line in answer.body.decode().splitlines() if line[0] != "#")


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready"])
async def test_a_server_that_works_says_ok(h2: H2Client, path: str) -> None:
    answer = await h2.exchange("GET", path)
    assert (answer.status, bytes(answer.body)) == (200, b"OK")


async def test_a_browser_at_the_root_sees_which_server_this_is(h2: H2Client) -> None:
    answer = await h2.exchange("GET", "/")
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert f"Streamfold {__version__}".encode() in bytes(answer.body)
    assert b'href="/health"' in bytes(answer.body)
    assert (await h2.exchange("HEAD", "/")).status == 200
    assert (await h2.exchange("POST", "/")).status == 405


async def test_appends_are_counted_in_the_names_of_s2_lite(h2: H2Client) -> None:
    headers = (("s2-basin", BASIN), ("content-type", "application/json"))
    for _ in range(3):
        await h2.exchange("POST", PATH, headers, b'{"records":[{"body":"12345678"},{}]}')
    lines = await metrics(h2)
    assert float(lines["s2_append_batch_records_sum"]) == 6
    assert float(lines['s2_append_batch_records_bucket{le="1.0"}']) == 0
    assert float(lines['s2_append_batch_records_bucket{le="10.0"}']) == 3
    assert float(lines["s2_append_batch_bytes_sum"]) == 72
    assert float(lines["s2_append_ack_latency_seconds_count"]) == 3
    assert float(lines["s2_append_permit_latency_seconds_count"]) == 3
    assert float(lines["process_resident_memory_bytes"]) > 0


async def test_live_dead_and_stored_bytes_are_shown(h2: H2Client) -> None:
    headers = (("s2-basin", BASIN), ("content-type", "application/json"))
    # Text of random bytes: compressed, it still takes as much as the bytes.
    body = b'{"records":[{"body":"%s"}]}' % base64.b64encode(incompressible(100_000))
    assert (await h2.exchange("POST", PATH, headers, body)).status == 200
    lines: dict[str, str] = {}
    while float(lines.get('streamfold_store_bytes{state="live"}', 0)) < 100_000:
        lines = await metrics(h2)
    assert float(lines['streamfold_store_bytes{state="disk"}']) >= 0
    assert float(lines['streamfold_store_bytes{state="dead"}']) < 100_000


async def test_every_metric_of_the_server_is_in_the_reference(h2: H2Client) -> None:
    pages = (Path(__file__).parents[3] / "docs" / "reference").glob("*.md")
    text = "".join(page.read_text() for page in pages)
    answer = await h2.exchange("GET", "/metrics")
    names = re.findall(r"^# TYPE ((?:s2|streamfold)_\w+)", answer.body.decode(), re.MULTILINE)
    assert names
    assert [name for name in names if f"`{name}" not in text] == []


@pytest.mark.parametrize("open_metrics", [False, True])
async def test_metrics_say_where_the_store_is_unless_anybody_may_read_them(
    open_metrics: bool,
) -> None:
    root = Secret("the-root-token-of-this-test")
    headers = (("authorization", f"Bearer {root.text}"),)
    async with (
        running_server(configuration(root_token=root, open_metrics=open_metrics)) as server,
        h2_client(server.port) as h2,
    ):
        answer = await h2.exchange("GET", "/metrics", headers)
    shown = f'streamfold_storage_info{{url="{server.store.url}"}} 1.0' in answer.body.decode()
    assert (answer.status, shown) == (200, not open_metrics)


async def test_the_busiest_streams_are_shown_to_callers_that_may_see_their_metrics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(busy_streams, "WINDOW_MS", 600_000)  # none is forgotten in the test
    root = Secret("the-root-token-of-this-test")
    async with running_server(configuration(root_token=root, open_metrics=True)) as server:
        await server.store.create_basin(BASIN)
        # The token has no name for a stream that is just its prefix.
        for name, count in (("app/", 4), ("app/orders", 3), ("app/carts", 2), ("other", 9)):
            await server.store.create_stream(BASIN, name)
            await server.store.append(BASIN, name, [Record(b"12345678")] * count)
        scope = Scope(
            basins=ResourceSet.prefix(""),
            streams=ResourceSet.prefix("app/"),
            ops=frozenset([Right.STREAM_METRICS]),
        )
        token = AccessToken("app", scope, auto_prefix_streams=True)
        secret = await server.store.account.issue_access_token(token)
        seen = []
        async with h2_client(server.port) as h2:
            for caller in (root, secret):
                headers = (("authorization", f"Bearer {caller.text}"),)
                answer = await h2.exchange("GET", "/v1/busiest-streams", headers)
                seen.append([stream["stream"] for stream in json.loads(answer.body)["streams"]])
    assert seen == [["other", "app/", "app/orders", "app/carts"], ["orders", "carts"]]


async def test_a_bucket_may_be_called_like_what_the_server_shows(h2: H2Client) -> None:
    kind = (("content-type", "text/plain"), ("content-length", "3"))
    for bucket in ("busiest", "busiest-streams"):
        assert (await h2.exchange("PUT", f"/{bucket}/log", kind, b"one")).status == 201
        assert bytes((await h2.exchange("GET", f"/{bucket}/log")).body) == b"one"
        assert (await h2.exchange("GET", f"/{bucket}")).status == 200
