"""Two servers on one bucket: one is active, the other stands by and takes over. Nothing acknowledged is
lost, and no server acknowledges anything once another one is active.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import cycle
from typing import Any

import httpx
import pytest
from s2_sdk import (
    S2,
    AppendInput,
    AppendRetryPolicy,
    Record,
    Retry,
    S2Error,
    SeqNum,
    SeqNumMismatchError,
    Timeout,
)

from streamfold.cli.exit_status import ExitStatus
from streamfold.testing.adversary.proxy import StorageProxy, StorageWeather
from streamfold.wire.s2.errors import Failure
from tests.cli.commands import Outcome, Shell, line_of
from tests.ports import free_port
from tests.s3 import S3Server, s3_client
from tests.sdk import sdk_client
from tests.server.frames import append_frame, frames_in
from tests.server.raw_h1 import H1Client, h1_client

BASIN, STREAM = "test-basin", "orders"
#: Seconds; as short as a busy machine allows, which may pause an active server for some of them.
EXPIRY = "8"
APPEND_SESSION = (
    f"POST /v1/streams/{STREAM}/records HTTP/1.1\r\nhost: localhost\r\ns2-basin: {BASIN}\r\n"
    "content-type: s2s/proto\r\ntransfer-encoding: chunked\r\n\r\n"
).encode()
#: Seconds that no test waits for.
NEVER = "300"


@dataclass
class Node:
    """A `streamfold serve` and its log."""

    process: Process
    port: int
    lines: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def logged(self, text: str) -> str:
        """The next line of the log with this text."""
        assert self.process.stderr is not None
        async with asyncio.timeout(120):
            while line := (await self.process.stderr.readline()).decode():
                self.lines.append(line)
                if text in line:
                    return line
        raise AssertionError(f"no {text!r} in {''.join(self.lines)}")

    async def serves(self) -> None:
        """Return once the server announces that it is active."""
        assert json.loads(await line_of(self.process))["port"] == self.port

    async def get(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient(base_url=self.url, verify=False, timeout=60) as client:
            return await client.get(path)

    async def says(self, path: str, status: int, text: str = "") -> None:
        """Return once the server answers like this."""
        async with asyncio.timeout(120):
            while not await self._answers(path, status, text):  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0.05)

    async def _answers(self, path: str, status: int, text: str) -> bool:
        answer = await self.get(path)
        return answer.status_code == status and text in answer.text

    async def ending(self) -> Outcome:
        async with asyncio.timeout(120):
            stdout, stderr = await self.process.communicate()
        assert self.process.returncode is not None
        return Outcome(self.process.returncode, stdout, "".join(self.lines) + stderr.decode())


@dataclass
class Bucket:
    """A place on object storage for one test, and how servers reach it."""

    s3: S3Server
    path: str
    endpoint: str | None = None

    @asynccontextmanager
    async def serve(
        self, *options: str, expiry: str = EXPIRY, port: int | None = None
    ) -> AsyncIterator[Node]:
        environment = self.s3.environment()
        if self.endpoint is not None:
            environment["AWS_ENDPOINT_URL_S3"] = self.endpoint
        port = port or free_port()
        where = ("--bucket", self.s3.bucket, "--path", self.path, "--lease-expiry", expiry)
        here = ("--host", "127.0.0.1", "--port", str(port), "--json", "--no-access-log")
        async with Shell(environment).running("serve", *where, *here, *options) as process:
            yield Node(process, port)

    @property
    def _lease(self) -> dict[str, str]:
        return {"Bucket": self.s3.bucket, "Key": f"{self.path}/db/server.lease"}

    def put_lease(self, data: bytes) -> None:
        s3_client(self.s3).put_object(Body=data, **self._lease)

    def delete_lease(self) -> None:
        s3_client(self.s3).delete_object(**self._lease)

    async def lease_written_by(self, node: Node) -> None:
        """Return once the lease on storage is that of this server."""
        client = s3_client(self.s3)
        async with asyncio.timeout(120):
            while not _names(client, self._lease, node.process.pid):  # noqa: ASYNC110 - storage announces nothing
                await asyncio.sleep(0.05)


def _names(client, lease: dict[str, str], pid: int) -> bool:  # type: ignore[no-untyped-def]  # boto3 has no types
    try:
        data = client.get_object(**lease)["Body"].read()
        return bool(json.loads(data)["owner"]["process"] == pid)
    except (client.exceptions.NoSuchKey, ValueError):
        return False


@pytest.fixture
def bucket(s3_server: S3Server, request: pytest.FixtureRequest) -> Bucket:
    return Bucket(s3_server, request.node.name)


@contextmanager
def suspended(node: Node) -> Iterator[None]:
    os.kill(node.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(node.process.pid, signal.SIGCONT)


@asynccontextmanager
async def client_of(node: Node, **options: Any) -> AsyncIterator[S2]:
    retry = Retry(max_attempts=1, append_retry_policy=AppendRetryPolicy.NO_SIDE_EFFECTS)
    async with sdk_client(node.url, retry=retry, **options) as s2:
        yield s2


@dataclass
class Writer:
    """Appends numbers, each once, at whichever server acknowledges it."""

    clients: tuple[S2, ...]
    acked: int = 0
    stopping: bool = False

    async def run(self) -> None:
        clients = cycle(self.clients)
        s2 = next(clients)
        while not self.stopping:
            record = AppendInput([Record(b"%d" % self.acked)], match_seq_num=self.acked)
            try:
                await s2.basin(BASIN).stream(STREAM).append(record)
            except SeqNumMismatchError:
                pass  # an earlier attempt worked, although its answer was lost
            except S2Error:
                s2 = next(clients)
                await asyncio.sleep(0.02)
                continue
            self.acked += 1

    async def advance(self) -> None:
        """Return when ten more appends have been acknowledged."""
        goal = self.acked + 10
        async with asyncio.timeout(120):
            while self.acked < goal:  # noqa: ASYNC110 - as long as it takes
                await asyncio.sleep(0.01)


async def create_stream(node: Node) -> None:
    """Create what `writing` appends to, while no other server can take the store over."""
    async with client_of(node) as s2:
        await s2.create_basin(BASIN)
        await s2.basin(BASIN).create_stream(STREAM)


@asynccontextmanager
async def writing(*nodes: Node) -> AsyncIterator[Writer]:
    """Clients of S2 that write to whichever server takes it; at the end all is there, in order."""
    patience = Timeout(request=timedelta(seconds=2), connection=timedelta(seconds=2))
    async with (
        client_of(nodes[0], timeout=patience) as first,
        client_of(nodes[1], timeout=patience) as second,
        client_of(nodes[1]) as reader,
    ):
        writer = Writer((first, second))
        async with asyncio.TaskGroup() as group:
            group.create_task(writer.run())
            await writer.advance()
            yield writer
            await writer.advance()
            writer.stopping = True
        assert await stored(reader) == [b"%d" % number for number in range(writer.acked)]


async def failure_of(session: H1Client) -> Failure:
    """Why an append session over HTTP/1.1 ended."""
    (frame,) = frames_in(await session.chunk())
    return frame.failure()


async def stored(s2: S2) -> list[bytes]:
    bodies: list[bytes] = []
    reading = s2.basin(BASIN).stream(STREAM).read_session(start=SeqNum(0), wait=0)
    async with reading as batches:
        async for batch in batches:
            bodies.extend(record.body for record in batch.records)
    return bodies


async def test_a_second_server_stands_by_until_the_first_one_stops(bucket: Bucket) -> None:
    async with bucket.serve("--name", "first", expiry=NEVER) as first:
        await first.serves()
        await create_stream(first)
        async with bucket.serve("--name", "second", expiry=NEVER) as second:
            active = f"first (process {first.process.pid}) is active"
            assert active in await second.logged("standby: ")
            health, ready = await second.get("/health"), await second.get("/ready")
            assert (health.status_code, ready.status_code) == (200, 503)
            assert ready.text == f"standby: {active}\n"
            assert "streamfold_standby 1.0" in (await second.get("/metrics")).text
            for path in ("/v1/basins", f"/{BASIN}/{STREAM}", "/v1/stream/orders", "/console"):
                refusal = await second.get(path)
                assert refusal.status_code == 503
                assert refusal.headers["retry-after"] == "1"
                assert refusal.json()["code"] == "unavailable"
                assert active in refusal.json()["message"]
            async with writing(first, second):
                first.process.send_signal(signal.SIGTERM)
                assert (await first.ending()).status == 0
                await second.serves()
            assert (await second.get("/ready")).status_code == 200


async def test_a_standby_takes_over_from_a_server_that_was_killed(bucket: Bucket) -> None:
    """Also if both have the same name."""
    async with bucket.serve("--name", "one") as first:
        await first.serves()
        await create_stream(first)
        async with bucket.serve("--name", "one") as second:
            await second.logged("standby: ")
            async with writing(first, second):
                first.process.kill()
                await second.serves()


async def test_a_server_that_was_suspended_past_its_lease_acknowledges_nothing_and_stops(
    bucket: Bucket,
) -> None:
    async with bucket.serve() as first:
        await first.serves()
        await create_stream(first)
        async with bucket.serve() as second:
            await second.logged("standby: ")
            async with writing(first, second) as writer, client_of(first) as late:
                with suspended(first):
                    # It arrives at the first server, which reads it when it wakes.
                    lost = asyncio.create_task(
                        late.basin(BASIN).stream(STREAM).append(AppendInput([Record(b"lost")]))
                    )
                    old = asyncio.create_task(late.basin(BASIN).stream(STREAM).check_tail())
                    await second.serves()
                    await writer.advance()
                for answer in (lost, old):
                    with pytest.raises(S2Error):
                        await answer
                ended = await first.ending()
                assert ended.status == ExitStatus.FENCED, ended.stderr
                assert "took over as its writer" in ended.stderr
                assert second.process.returncode is None


async def test_a_session_of_a_server_that_was_suspended_refuses_nothing_by_its_old_tail(
    bucket: Bucket,
) -> None:
    """What its memory says about a condition may be wrong by then."""
    async with bucket.serve() as first:
        await first.serves()
        await create_stream(first)
        async with bucket.serve() as second:
            await second.logged("standby: ")
            async with writing(first, second) as writer, h1_client(first.port) as late:
                await late.send(APPEND_SESSION)
                assert (await late.head())[0] == 200
                with suspended(first):
                    await second.serves()
                    await writer.advance()
                    await late.send_chunk(append_frame(b"late", match_seq_num=writer.acked))
                failure = await failure_of(late)
                assert failure.status == 503, failure
                assert (await first.ending()).status == ExitStatus.FENCED


async def test_take_over_replaces_the_active_server_at_once(bucket: Bucket) -> None:
    async with bucket.serve(expiry=NEVER) as first:
        await first.serves()
        await create_stream(first)
        async with (
            bucket.serve("--take-over", expiry=NEVER) as second,
            writing(first, second),
        ):
            await second.serves()
            assert (await first.ending()).status == ExitStatus.FENCED


async def test_a_server_that_was_killed_starts_again_on_its_machine_without_waiting(
    bucket: Bucket,
) -> None:
    async with bucket.serve(expiry=NEVER) as first:
        await first.serves()
        first.process.kill()
        await first.process.wait()
    async with bucket.serve(expiry=NEVER) as again:
        await again.serves()


async def test_the_active_server_writes_a_damaged_lease_again(bucket: Bucket) -> None:
    async with bucket.serve() as first:
        await first.serves()
        bucket.delete_lease()
        async with bucket.serve() as second:
            await second.logged("standby: ")
            await second.says("/ready", 503, f"(process {first.process.pid}) is active")
            bucket.put_lease(b"\xff no lease")
            await bucket.lease_written_by(first)
            assert (await first.get("/ready")).status_code == 200
            second.process.send_signal(signal.SIGTERM)
            assert (await second.ending()).status == 0
        assert first.process.returncode is None


async def test_a_damaged_lease_that_nobody_repairs_is_claimed_after_the_expiry(
    bucket: Bucket,
) -> None:
    bucket.put_lease(b"{}")
    async with bucket.serve(expiry="1") as server:
        await server.logged("the lease of an unknown server was not renewed for 1 s")
        await server.serves()


async def test_the_lease_of_a_newer_version_is_respected(bucket: Bucket) -> None:
    async with bucket.serve() as first:
        await first.serves()
        bucket.put_lease(b'{"version": 2, "of": "later"}')
        assert (await first.ending()).status == ExitStatus.FENCED
    async with bucket.serve("--take-over") as second:
        ended = await second.ending()
    assert ended.status == ExitStatus.FAILURE
    assert json.loads(ended.stderr.splitlines()[-1])["error"]["code"] == "format_unsupported"


async def test_the_active_server_stays_active_when_storage_was_away_for_longer_than_its_lease(
    bucket: Bucket,
) -> None:
    async with StorageProxy(bucket.s3.endpoint).running() as proxy:
        bucket.endpoint = proxy.endpoint
        async with bucket.serve() as first:
            await first.serves()
            async with bucket.serve() as second:
                await second.logged("standby: ")
                await proxy.turn(StorageWeather.REFUSED)
                await first.logged("cannot be renewed yet")
                await first.says("/ready", 503, "could not renew its lease")
                await first.says("/v1/basins", 503, "could not renew its lease")
                await proxy.turn(StorageWeather.CLEAR)
                await first.says("/ready", 200)
                assert (await second.get("/ready")).status_code == 503
                assert first.process.returncode is None
