"""Basins that Durable Streams have made, with names that S2 does not allow, through the S2 API."""

from __future__ import annotations

import json
import time

import pytest

from streamfold.server.main import Server
from tests.server.curl import curl

#: Shorter than S2's 8 characters, longer than its 48, with an underscore, and with a hyphen at its end.
NAMES = ("shop", "b" * 64, "under_score", "ends-with-")
JSON = ("-H", "content-type: application/json")


def url(server: Server, path: str) -> str:
    return f"http://127.0.0.1:{server.port}{path}"


@pytest.mark.parametrize("bucket", NAMES)
async def test_a_bucket_is_read_listed_configured_measured_and_deleted_through_s2(
    server: Server, bucket: str
) -> None:
    created = await curl(url(server, f"/{bucket}/cart"), "-X", "PUT", *JSON, "-d", "[1, 2]")
    assert created.status == 201
    within = ("-H", f"s2-basin: {bucket}")
    batch = await curl(url(server, "/v1/streams/cart/records?seq_num=0"), *within)
    assert [record["body"] for record in batch.json()["records"]] == ["1", "2"]
    streams = await curl(url(server, "/v1/streams"), *within)
    assert [stream["name"] for stream in streams.json()["streams"]] == ["cart"]
    for query in (f"prefix={bucket}", f"start_after={bucket[:-1]}"):
        basins = await curl(url(server, f"/v1/basins?{query}"))
        assert bucket in [basin["name"] for basin in basins.json()["basins"]]
    change = ("-X", "PATCH", *JSON, "-d", '{"create_stream_on_append": true}')
    changed = await curl(url(server, f"/v1/basins/{bucket}"), *change)
    assert (changed.status, changed.json()["create_stream_on_append"]) == (200, True)
    ensured = await curl(url(server, f"/v1/basins/{bucket}"), "-X", "PUT", *JSON, "-d", "{}")
    assert (ensured.status, ensured.headers["s2-provision-result"]) == (200, "updated")
    now = int(time.time())
    for path in (f"/v1/metrics/{bucket}", f"/v1/metrics/{bucket}/cart"):
        span = f"set=storage&start={now - 60}&end={now}"
        assert (await curl(url(server, f"{path}?{span}"))).status == 200
    assert (await curl(url(server, f"/v1/basins/{bucket}"), "-X", "DELETE")).status == 202


@pytest.mark.parametrize("name", NAMES)
async def test_s2_creates_no_basin_that_its_own_clients_could_not_name(
    server: Server, name: str
) -> None:
    posted = await curl(url(server, "/v1/basins"), *JSON, "-d", json.dumps({"basin": name}))
    assert (posted.status, posted.json()["code"]) == (400, "bad_json")
    put = await curl(url(server, f"/v1/basins/{name}"), "-X", "PUT", *JSON, "-d", "{}")
    assert (put.status, put.json()["code"]) == (400, "bad_path")
    assert (await curl(url(server, f"/v1/basins/{name}"))).status == 404
