"""`serve --bucket`: a server on S3, stopped and started again, with the official client."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from s2_sdk import S2, AppendInput, Record, SeqNum

from streamfold.testing.adversary.proxy import StorageProxy, StorageWeather
from tests.cli.commands import Shell, ending_of, line_of
from tests.s3 import S3Server, s3_client
from tests.sdk import sdk_client

BASIN, STREAM = "test-basin", "orders"


@asynccontextmanager
async def serving_bucket(s3: S3Server, path: str) -> AsyncIterator[S2]:
    """A client of a server on the bucket, which at the end is asked to stop, and must do so well."""
    options = ("--host", "127.0.0.1", "--port", "0", "--json", "--no-access-log")
    shell = Shell(s3.environment())
    async with shell.running("serve", "--bucket", s3.bucket, "--path", path, *options) as process:
        announced = json.loads(await line_of(process))
        assert announced["location"] == f"s3://{s3.bucket}/{path}"
        url = announced["url"]
        async with sdk_client(url) as s2:
            yield s2
        process.send_signal(signal.SIGTERM)
        ended = await ending_of(process)
        assert ended.status == 0, ended.stderr


async def test_what_one_server_wrote_to_a_bucket_the_next_one_reads(s3_server: S3Server) -> None:
    async with serving_bucket(s3_server, "some/where") as s2:
        await s2.create_basin(BASIN)
        await s2.basin(BASIN).create_stream(STREAM)
        stream = s2.basin(BASIN).stream(STREAM)
        await stream.append(AppendInput([Record(b"one", [(b"k", b"v")])]))
        async with stream.append_session() as session:
            tickets = [
                await session.submit(AppendInput([Record(b"%d" % number)])) for number in range(50)
            ]
            acks = [await ticket for ticket in tickets]
        assert [ack.start.seq_num for ack in acks] == list(range(1, 51))
    async with serving_bucket(s3_server, "some/where") as s2:
        stream = s2.basin(BASIN).stream(STREAM)
        batch = await stream.read(start=SeqNum(0))
        assert [record.body for record in batch.records] == [
            b"one", *(b"%d" % number for number in range(50)),
        ]  # fmt: skip
        assert batch.records[0].headers == [(b"k", b"v")]
        ack = await stream.append(AppendInput([Record(b"after")], match_seq_num=51))
        assert ack.tail.seq_num == 52


async def test_a_server_keeps_everything_below_its_path(s3_server: S3Server) -> None:
    async with serving_bucket(s3_server, "tenants/one") as s2:
        await s2.create_basin(BASIN)
    async with serving_bucket(s3_server, "tenants/two") as s2:
        assert (await s2.list_basins()).items == []
    listed = s3_client(s3_server).list_objects_v2(Bucket=s3_server.bucket, Prefix="tenants/")
    folders = {item["Key"].split("/")[1] for item in listed["Contents"]}
    assert folders == {"one", "two"}


async def test_a_bucket_that_is_not_there_is_refused_in_one_line(s3_server: S3Server) -> None:
    shell = Shell(s3_server.environment())
    async with shell.running("serve", "--bucket", "no-such-bucket", "--port", "0") as process:
        ended = await ending_of(process)
    assert ended.status == 1
    *_, last = ended.stderr.splitlines()
    assert last.startswith("error: ")
    assert "Traceback" not in ended.stderr
    assert "trying again" not in ended.stderr  # a refusal is definite


@pytest.mark.parametrize("weather", [StorageWeather.REFUSED, StorageWeather.ANSWERS_LOST])
async def test_a_server_starts_although_its_first_connections_to_storage_break(
    s3_server: S3Server, weather: StorageWeather
) -> None:
    async with StorageProxy(s3_server.endpoint).running() as proxy:
        await proxy.turn(weather)
        shell = Shell(s3_server.environment() | {"AWS_ENDPOINT_URL_S3": proxy.endpoint})
        options = ("--host", "127.0.0.1", "--port", "0", "--json", "--no-access-log")
        where = ("--bucket", s3_server.bucket, "--path", weather.name.lower())
        async with shell.running("serve", *where, *options) as process:
            assert process.stderr is not None
            async with asyncio.timeout(120):
                assert b"trying again" in await process.stderr.readline()
            await proxy.turn(StorageWeather.CLEAR)
            async with sdk_client(json.loads(await line_of(process))["url"]) as s2:
                await s2.create_basin(BASIN)
            process.send_signal(signal.SIGTERM)
            assert (await ending_of(process)).status == 0
