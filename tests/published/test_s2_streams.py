"""The published examples of S2 streams, by curl and by the command line."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.cli.commands import Shell
from tests.published.conftest import BASIN
from tests.server.curl import Response, curl

HEADERS = ("-H", f"S2-Basin: {BASIN}", "-H", "content-type: application/json")
DAY = 86_400


async def create(endpoint: str, stream: str, config: Any = None) -> Response:
    body = json.dumps({"stream": stream, "config": config or {}})
    return await curl(*HEADERS, "-d", body, f"{endpoint}/v1/streams")


async def append(endpoint: str, stream: str, *records: dict[str, Any], **more: Any) -> Response:
    body = json.dumps({"records": records, **more})
    return await curl(*HEADERS, "-d", body, f"{endpoint}/v1/streams/{stream}/records")


async def read(endpoint: str, stream: str, query: str = "seq_num=0") -> Any:
    found = await curl(*HEADERS, f"{endpoint}/v1/streams/{stream}/records?{query}")
    return found.json()


@pytest.mark.parametrize(
    "name",
    ["user-123-events", "device_telemetry", "orders%2F2024%2F03", "log.application.production"],
)
async def test_e1_names(endpoint: str, name: str) -> None:
    assert (await create(endpoint, name.replace("%2F", "/"))).status == 201
    assert (await append(endpoint, name, {"body": "x"})).status == 200


async def test_e1_names_have_1_to_512_bytes_and_their_case_matters(endpoint: str) -> None:
    assert (await create(endpoint, "n" * 512)).status == 201
    assert (await create(endpoint, "n" * 513)).status == 400
    assert (await create(endpoint, "")).status == 400
    for name in ("MyStream", "mystream"):
        assert (await create(endpoint, name)).status == 201
    await append(endpoint, "MyStream", {"body": "only here"})
    assert (await read(endpoint, "MyStream"))["records"][0]["body"] == "only here"
    assert (await read(endpoint, "mystream", "seq_num=0&clamp=true"))["tail"]["seq_num"] == 0


async def test_e2_the_first_record_has_seq_num_0_and_the_tail_is_the_next(endpoint: str) -> None:
    await create(endpoint, "numbered")
    ack = (await append(endpoint, "numbered", {"body": "a"}, {"body": "b"})).json()
    assert (ack["start"]["seq_num"], ack["end"]["seq_num"]) == (0, 2)
    tail = await curl(*HEADERS, f"{endpoint}/v1/streams/numbered/records/tail")
    last = (await read(endpoint, "numbered"))["records"][-1]
    assert tail.json() == {"tail": {"seq_num": 2, "timestamp": last["timestamp"]}}


async def test_e3_a_stream_is_created_with_its_configuration(endpoint: str) -> None:
    config = {
        "storage_class": "express",
        "retention_policy": {"age": 30 * DAY},
        "timestamping": {"mode": "client-require", "uncapped": True},
        "delete_on_empty": {"min_age_secs": 7200},
    }
    assert (await create(endpoint, "my-stream", config)).status == 201
    found = await curl(*HEADERS, f"{endpoint}/v1/streams/my-stream")
    assert found.json() == config


@pytest.mark.parametrize(
    "config",
    [
        {"retention_policy": {"age": 7 * DAY}},
        {"retention_policy": {"infinite": {}}},
        {"delete_on_empty": {"min_age_secs": 3600}},
        {"delete_on_empty": {"min_age_secs": 0}},
    ],
    ids=["age", "infinite", "delete-on-empty", "off"],
)
async def test_e3_parts_of_a_configuration(
    endpoint: str, config: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    name = f"part-{request.node.callspec.id}"
    assert (await create(endpoint, name, config)).status == 201
    found = (await curl(*HEADERS, f"{endpoint}/v1/streams/{name}")).json()
    assert {key: found[key] for key in config} == config


async def test_e5_client_prefer_falls_back_to_the_time_of_arrival(endpoint: str) -> None:
    await create(endpoint, "prefer", {"timestamping": {"mode": "client-prefer"}})
    before = time.time_ns() // 1_000_000
    await append(endpoint, "prefer", {"body": "a", "timestamp": 1000}, {"body": "b"})
    own, arrival = (await read(endpoint, "prefer"))["records"]
    assert own["timestamp"] == 1000
    assert arrival["timestamp"] >= before


async def test_e5_client_require_refuses_a_record_without_a_timestamp(endpoint: str) -> None:
    await create(endpoint, "require", {"timestamping": {"mode": "client-require"}})
    assert (await append(endpoint, "require", {"body": "a"})).status == 422
    assert (await append(endpoint, "require", {"body": "a", "timestamp": 1000})).status == 200


async def test_e5_arrival_ignores_the_timestamp_of_the_client(endpoint: str) -> None:
    await create(endpoint, "arrival", {"timestamping": {"mode": "arrival"}})
    before = time.time_ns() // 1_000_000
    await append(endpoint, "arrival", {"body": "a", "timestamp": 1000})
    (record,) = (await read(endpoint, "arrival"))["records"]
    assert record["timestamp"] >= before


@pytest.mark.parametrize("uncapped", [True, False])
async def test_e5_a_timestamp_in_the_future_is_capped_at_arrival_unless_uncapped(
    endpoint: str, uncapped: bool
) -> None:
    name, future = f"uncapped-{uncapped}", (int(time.time()) + DAY) * 1000
    await create(endpoint, name, {"timestamping": {"uncapped": uncapped}})
    await append(endpoint, name, {"body": "a", "timestamp": future})
    (record,) = (await read(endpoint, name))["records"]
    assert (record["timestamp"] == future) is uncapped


def test_e6_the_command_line(shell: Shell) -> None:
    for name in ("verbs-stream", "device-1", "device-2"):
        shell.ok("create-stream", f"s2://{BASIN}/{name}")
    listed = shell.ok("list-streams", f"s2://{BASIN}/", "--prefix", "device-")
    assert [line.split()[0] for line in listed.text.splitlines()] == ["device-1", "device-2"]
    shell.ok("delete-stream", f"s2://{BASIN}/verbs-stream", "--yes")


async def test_e6_a_listing_has_names_and_times_and_says_whether_there_is_more(
    endpoint: str,
) -> None:
    await create(endpoint, "listed-1")
    await create(endpoint, "listed-2")
    found = await curl(*HEADERS, f"{endpoint}/v1/streams?prefix=listed-&limit=1")
    page = found.json()
    assert page["has_more"] is True
    (stream,) = page["streams"]
    assert stream["name"] == "listed-1"
    assert stream["created_at"]
    assert stream.get("deleted_at") is None


@pytest.mark.parametrize("path", ["streams", "v1/streams"])
async def test_e7_the_tail_as_the_description_of_streams_has_it(endpoint: str, path: str) -> None:
    await create(endpoint, "tail-alias")
    await append(endpoint, "tail-alias", {"body": "a"})
    found = await curl(*HEADERS, f"{endpoint}/{path}/tail-alias/tail")
    assert found.status == 200
    assert found.json()["tail"]["seq_num"] > 0


def test_e8_streams_are_created_by_the_first_append_or_read_if_the_basin_says_so(
    shell: Shell,
) -> None:
    shell.ok("create-basin", "auto-basin", "--create-stream-on-append", "--create-stream-on-read")
    appended = shell.json("append", "s2://auto-basin/by-append", stdin=b"hello\n")
    assert appended["start"]["seq_num"] == 0
    assert shell.json("check-tail", "s2://auto-basin/by-append")["seq_num"] == 1
    assert shell.ok("read", "s2://auto-basin/by-read", "--clamp").text == ""
    assert "by-read" in shell.ok("list-streams", "s2://auto-basin/").text
    refused = shell("append", f"s2://{BASIN}/never-made", stdin=b"hello\n")
    assert refused.status == 4
