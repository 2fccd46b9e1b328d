"""The published examples of durability, with real processes, a real bucket and a real network fault."""

from __future__ import annotations

import asyncio
import json
import signal
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from s2_sdk import AppendInput, Record, Retry, S2Error, SeqNum, SeqNumMismatchError
from s2_sdk import S2Stream as Stream

from streamfold.testing.adversary.proxy import StorageProxy, StorageWeather
from tests.cli.commands import Shell, ending_of, line_of
from tests.s3 import S3Server, s3_client
from tests.sdk import sdk_client

BASIN, STREAM = "my-basin", "my-stream"


@asynccontextmanager
async def lite(*options: str, **variables: str) -> AsyncIterator[tuple[Process, str]]:
    """`streamfold lite` with these options: its process, and where it serves."""
    with_port = ("lite", "--port", "0", "--no-access-log", "--json", *options)
    async with Shell(variables).running(*with_port) as process:
        yield process, json.loads(await line_of(process))["url"]


@asynccontextmanager
async def stream_at(url: str) -> AsyncIterator[Stream]:
    """The stream of the examples, created where it is missing; nothing is tried twice."""
    once = Retry(max_attempts=1)
    async with sdk_client(url, retry=once) as s2:
        await s2.ensure_basin(BASIN)
        await s2.basin(BASIN).ensure_stream(STREAM)
        yield s2.basin(BASIN).stream(STREAM)


async def bodies(stream: Stream) -> list[bytes]:
    if not (await stream.check_tail()).seq_num:
        return []
    return [record.body for record in (await stream.read(start=SeqNum(0))).records]


def batch(*texts: str, match: int | None = None) -> AppendInput:
    return AppendInput([Record(text.encode()) for text in texts], match_seq_num=match)


async def test_e9_an_acknowledged_batch_is_whole_and_every_reader_sees_it_at_once() -> None:
    async with lite() as (_, url), stream_at(url) as writer, stream_at(url) as reader:
        for number in range(20):
            ack = await writer.append(batch("a", "b", "c"))
            assert (await reader.check_tail()).seq_num == ack.end.seq_num == 3 * (number + 1)
        assert await bodies(reader) == [b"a", b"b", b"c"] * 20
        with pytest.raises(SeqNumMismatchError):
            await writer.append(batch("d", "e", match=5))
        assert len(await bodies(reader)) == 60


async def test_e10_a_client_that_left_before_its_ack_finds_out_by_match_seq_num(
    tmp_path: Path,
) -> None:
    async with lite("--local-root", str(tmp_path)) as (_, url), stream_at(url) as stream:
        address = url.removeprefix("http://").split(":")
        body = b'{"records":[{"body":"left"}],"match_seq_num":0}'
        _, writer = await asyncio.open_connection(*address)
        writer.write(
            b"POST /v1/streams/%b/records HTTP/1.1\r\nhost: localhost\r\ns2-basin: %b\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (STREAM.encode(), BASIN.encode(), len(body), body)
        )
        await writer.drain()
        async with asyncio.timeout(120):
            while not (await stream.check_tail()).seq_num:  # noqa: ASYNC110 - it left: there is no event for it
                await asyncio.sleep(0.01)
        writer.close()
        with pytest.raises(SeqNumMismatchError):
            await stream.append(batch("left", match=0))
        assert await bodies(stream) == [b"left"]


async def test_e10_what_was_acknowledged_is_there_after_a_crash(tmp_path: Path) -> None:
    async with lite("--local-root", str(tmp_path)) as (process, url), stream_at(url) as stream:
        await stream.append(batch("a", "b"))
        process.kill()
        await process.wait()
    async with lite("--local-root", str(tmp_path)) as (_, url), stream_at(url) as stream:
        assert await bodies(stream) == [b"a", b"b"]


async def test_e10_a_partition_from_storage_gives_errors_and_no_acks_until_it_heals(
    s3_server: S3Server,
) -> None:
    async with StorageProxy(s3_server.endpoint).running() as proxy:
        variables = {**s3_server.environment(), "AWS_ENDPOINT_URL_S3": proxy.endpoint}
        variables["AWS_ENDPOINT_URL"] = variables["AWS_ENDPOINT"] = proxy.endpoint
        options = ("--bucket", s3_server.bucket, "--path", "partition")
        async with lite(*options, **variables) as (_, url), stream_at(url) as stream:
            await stream.append(batch("before"))
            await proxy.turn(StorageWeather.REFUSED)
            with pytest.raises(S2Error):
                await stream.append(batch("during"))
            await proxy.turn(StorageWeather.CLEAR)
            await _healed(stream)
            found = await bodies(stream)
    assert found[0] == b"before"
    assert found.count(b"after") == 1
    assert found.count(b"during") <= 1, "its outcome is unknown, and it is there at most once"


async def _healed(stream: Stream) -> None:
    """Append once more, as soon as that works."""
    async with asyncio.timeout(120):
        while True:
            try:
                tail = (await stream.check_tail()).seq_num
                if b"after" in await bodies(stream):
                    return  # by an attempt whose answer was lost
                await stream.append(batch("after", match=tail))
                return
            except S2Error:  # or an attempt before this one has just worked
                await asyncio.sleep(0.2)


async def test_e11_memory_is_the_default_and_a_local_root_survives(tmp_path: Path) -> None:
    for options, expected in ((), []), (("--local-root", str(tmp_path / "data")), [b"kept"]):
        async with lite(*options) as (process, url), stream_at(url) as stream:
            await stream.append(batch("kept"))
            process.send_signal(signal.SIGTERM)
            assert (await ending_of(process)).status == 0
        async with lite(*options) as (_, url), stream_at(url) as stream:
            assert await bodies(stream) == expected


async def test_e12_the_flush_interval_is_the_least_time_between_commits(
    s3_server: S3Server,
) -> None:
    s3_client(s3_server).create_bucket(Bucket="my-bucket")
    variables = {**s3_server.environment(), "SL8_FLUSH_INTERVAL": "10ms", "SL8_L0_MAX_SSTS": "9"}
    async with lite("--bucket", "my-bucket", **variables) as (process, url):
        async with stream_at(url) as stream:
            for number in range(5):
                await stream.append(batch(str(number)))
        values = await metrics(url)
        process.send_signal(signal.SIGTERM)
        said = (await ending_of(process)).stderr
    assert values["streamfold_flush_interval_seconds_count"] >= 5
    assert values['streamfold_flush_interval_seconds_bucket{le="0.005"}'] == 0
    assert "SL8_FLUSH_INTERVAL is taken as --commit-interval 0.01" in said
    assert "SL8_L0_MAX_SSTS is not used" in said


async def test_e12_an_option_of_our_own_comes_first() -> None:
    variables = {"SL8_FLUSH_INTERVAL": "10s", "STREAMFOLD_COMMIT_INTERVAL": "0"}
    async with lite(**variables) as (process, url):
        async with stream_at(url) as stream:
            for number in range(3):
                await stream.append(batch(str(number)))
        process.send_signal(signal.SIGTERM)
        said = (await ending_of(process)).stderr
    assert "SL8_FLUSH_INTERVAL is not used: --commit-interval 0 is given" in said


async def test_e13_acks_and_flushes_are_measured_and_a_server_that_works_is_healthy() -> None:
    async with lite() as (_, url), stream_at(url) as stream:
        before = await metrics(url)
        for number in range(5):
            await stream.append(batch(f"{number} {'x' * 1000}"))
        after = await metrics(url)
        async with asyncio.timeout(60):
            while await queued(url):
                pass  # by the background
        async with httpx.AsyncClient(timeout=60) as web:
            assert (await web.get(f"{url}/health")).status_code == 200
    assert after["s2_append_ack_latency_seconds_count"] == 5
    for name in ("flush_duration_seconds", "flush_interval_seconds", "flush_bytes"):
        key = f"streamfold_{name}_count"
        assert after[key] - before[key] >= 5  # the background may write as well
    assert after["streamfold_flush_duration_seconds_sum"] > 0
    flushed = after["streamfold_flush_bytes_sum"] - before["streamfold_flush_bytes_sum"]
    assert flushed > 5_000


async def queued(url: str) -> float:
    """The bytes that wait for a commit, and the appends."""
    values = await metrics(url)
    return values["streamfold_flush_queue_bytes"] + values["streamfold_flush_queue_waiting"]


async def metrics(url: str) -> dict[str, float]:
    """What /metrics says, by name and labels."""
    async with httpx.AsyncClient(timeout=60) as web:
        lines = (await web.get(f"{url}/metrics")).text.splitlines()
    values = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in values}


async def test_e14_appends_in_flight_are_answered_in_order_and_bounded() -> None:
    async with lite("--append-inflight-bytes", "1MiB") as (_, url), stream_at(url) as stream:
        async with stream.append_session() as session:
            big = "x" * 100_000
            tickets = [await session.submit(batch(f"{n} {big}")) for n in range(60)]
            acks = [await ticket for ticket in tickets]
        assert [ack.start.seq_num for ack in acks] == list(range(60))
