"""Sends malformed requests to a real server alongside an ordinary client."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import h2.config
import h2.connection
import psutil

from streamfold.server.http.router import Route
from streamfold.server.main import running_server
from tests.hostile.mutation import Mutator
from tests.hostile.requests import HostileRequest, Requests
from tests.server.conftest import BASIN, configuration
from tests.server.raw_h1 import h1_client
from tests.server.raw_h2 import H2Client, h2_client

REPOSITORY = Path(__file__).parents[2]
#: Milliseconds of processor time in one step of the loop, or with the interpreter's lock.
LAG_MAX = 50.0
#: Times that the requests of a slow step are repeated: a host that takes the processor away within a
#: step is not the server's doing.
TRIES = 3
#: Requests between two looks at the lag; clients that send them.
BATCH, CLIENTS = 400, 6
#: Seconds within which a request is answered or its connection closed.
ANSWER_TIMEOUT = 60.0
#: Statuses that only bytes that are no HTTP may get: the version and the coding are not supported.
_NOT_HTTP = (501, 505)
MIB = 1 << 20
#: MiB above what the server used once it was warm that may remain after an attack.
MEMORY_MAX_MIB = 96.0
#: What there is before the attack, besides the server's own stream.
_CREATED = (
    ("PUT", f"/{BASIN}/json", "application/json"),
    ("PUT", f"/{BASIN}/bytes", "application/octet-stream"),
    ("PUT", f"/{BASIN}/text", "text/plain"),
    ("PUT", "/v1/stream/json", "application/json"),
    ("PUT", "/v1/stream/bytes", "application/octet-stream"),
    ("PUT", "/v1/basins/ordinary-basin", "application/json"),
)


@dataclass
class Outcome:
    """What an attack found."""

    findings: list[str] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    sent: int = 0
    #: Milliseconds of processor time, at most, in the best of the tries.
    worst_lag: float = 0.0
    #: MiB of resident memory: once warm, at most, and after the attack.
    memory: tuple[float, float, float] = (0.0, 0.0, 0.0)
    #: Appends of the ordinary client beside it, all acknowledged.
    ordinary: int = 0
    routes: int = 0
    least_per_route: int = 0


@dataclass
class Watched:
    """A server process that tells how long its event loop was held up."""

    process: Process
    port: int
    log: Path

    async def lag(self) -> float:
        """Milliseconds of processor time of the longest step since this was last asked."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(b"\n")
        line = await self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server ended: {self.errors()}")
        _, worked, held = map(float, line.split())
        return max(worked, held)

    def errors(self) -> list[str]:
        """Tracebacks and errors that the server logged."""
        return [
            line for line in self.log.read_text(errors="replace").splitlines() if _is_error(line)
        ]

    @property
    def rss_mib(self) -> float:
        return float(psutil.Process(self.process.pid).memory_info().rss) / MIB


def _is_error(line: str) -> bool:
    return "Traceback" in line or "Error" in line or "panicked" in line


@asynccontextmanager
async def watched_server(folder: Path) -> AsyncIterator[Watched]:
    log = folder / "server.log"
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.server.lag_server", (folder / "store").as_uri()),
            cwd=REPOSITORY,
            stdin=PIPE,
            stdout=PIPE,
            stderr=stderr,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = await process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server did not start: {log.read_text()[-2000:]}")
        yield Watched(process, int(line), log)
        process.stdin.close()
        status = await asyncio.wait_for(process.wait(), 60)
        if status:
            raise RuntimeError(f"the server ended with status {status}: {log.read_text()[-2000:]}")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def all_routes() -> Sequence[Route]:
    """The route table of a server."""
    async with running_server(configuration()) as server:
        return server.routes


async def attack(count: int, seed: int, settle: float) -> Outcome:
    """Send so many requests; `settle` is the seconds that memory has to return, 0 to not wait."""
    routes, outcome = await all_routes(), Outcome()
    requests = Requests(routes, seed)
    with tempfile.TemporaryDirectory(prefix="streamfold-hostile-") as folder:
        async with watched_server(Path(folder)) as server:
            async with h2_client(server.port) as client:
                for method, path, kind in _CREATED:
                    await client.exchange(method, path, [("content-type", kind)], b"")
            beside = asyncio.create_task(_ordinary(server.port, outcome))
            try:
                await _send_all(server, requests, count, seed, outcome)
            finally:
                beside.cancel()
                with suppress(asyncio.CancelledError):
                    await beside
            await _settle(server, settle, outcome)
            outcome.findings += [f"the server logged: {line}" for line in server.errors()[:5]]
    outcome.routes = len(routes)
    outcome.least_per_route = min(requests.of_route.values())
    return outcome


async def _send_all(
    server: Watched, requests: Requests, count: int, seed: int, outcome: Outcome
) -> None:
    warm, most = 0.0, 0.0
    async with h2_client(server.port) as multiplexed:
        client = multiplexed
        while outcome.sent < count and len(outcome.findings) < 20:
            size = min(BATCH, count - outcome.sent)
            batch = [requests.next() for _ in range(size * 7 // 10)]
            h2_batch = [requests.next() for _ in range(size * 2 // 10)]
            raw = [
                _raw(requests, seed + outcome.sent + number)
                for number in range(size - len(batch) - len(h2_batch))
            ]
            await server.lag()
            await _send_batch(server.port, client, batch, h2_batch, raw, outcome)
            lag = await server.lag()
            for _ in range(TRIES - 1):
                if lag <= LAG_MAX:
                    break
                await _send_batch(server.port, client, batch, h2_batch, raw, Outcome())
                lag = min(lag, await server.lag())
            if lag > LAG_MAX:
                outcome.findings.append(
                    f"a step of {lag:.0f} ms in requests {outcome.sent} to {outcome.sent + size}"
                )
            outcome.worst_lag = max(outcome.worst_lag, lag)
            outcome.sent += size
            most = max(most, server.rss_mib)
            warm = warm or (server.rss_mib if outcome.sent >= min(count, 10 * BATCH) else 0.0)
            if client.closed.is_set() or client.goaway:
                outcome.findings.append(
                    f"the server closed an HTTP/2 connection before request {outcome.sent}"
                )
                break
    outcome.memory = (warm, most, server.rss_mib)


async def _send_batch(
    port: int,
    client: H2Client,
    batch: Sequence[HostileRequest],
    h2_batch: Sequence[HostileRequest],
    raw: Sequence[bytes],
    outcome: Outcome,
) -> None:
    async with asyncio.TaskGroup() as group:
        for number in range(CLIENTS):
            group.create_task(send_h1(port, batch[number::CLIENTS], outcome))
        group.create_task(_send_h2(client, h2_batch, outcome))
        group.create_task(_send_raw(port, raw, outcome))


async def send_h1(port: int, batch: Sequence[HostileRequest], outcome: Outcome) -> None:
    """Send each on a connection of its own; those that are HTTP must be answered."""
    for request in batch:
        status = await _first_status(
            port, request.raw(), outcome, ends=not request.must_be_answered
        )
        outcome.statuses[status] += 1
        if status >= 500 or (not status and request.must_be_answered):
            outcome.findings.append(f"{status}: {request.raw()[:3000]!r}")


async def _send_raw(port: int, raw: Sequence[bytes], outcome: Outcome) -> None:
    for data in raw:
        status = await _first_status(port, data, outcome, ends=True)
        outcome.statuses[status] += 1
        if status >= 500 and status not in _NOT_HTTP:
            outcome.findings.append(f"{status}: {data[:3000]!r}")


async def _first_status(port: int, data: bytes, outcome: Outcome, *, ends: bool) -> int:
    """The status of the first answer; 0 if the connection was closed without one."""
    async with h1_client(port) as client:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT):
                with suppress(OSError):  # closed before all was sent
                    await client.send(data)
                    if ends:
                        client.writer.write_eof()
                line = await client.reader.readline()
        except TimeoutError:
            outcome.findings.append(f"no answer within {ANSWER_TIMEOUT:.0f} s: {data[:3000]!r}")
            return 0
        except (OSError, ValueError):
            return 0
    words = line.split()
    return int(words[1]) if line.startswith(b"HTTP/1.1 ") and words[1].isdigit() else 0


async def _send_h2(client: H2Client, batch: Sequence[HostileRequest], outcome: Outcome) -> None:
    """The same over HTTP/2, on one connection that must survive all of them."""
    for request in batch:
        headers = [
            (name.decode(), value.decode("latin-1").strip())
            for name, value in request.headers
            if name not in (b"host", b"expect", b"cookie")
            and value.isascii()
            and value.strip().isalnum()
        ]
        path = "/" + request.target.decode("latin-1").lstrip("/")
        method = request.method.decode()
        if method == "CONNECT" or client.closed.is_set():
            continue
        sized = [*headers, ("content-length", str(len(request.body)))]
        stream_id = client.open(method, path, sized)
        await client.send(stream_id, request.body, end=True)
        answer = await client.head(stream_id)
        if answer.reset is None and not answer.over:
            client.reset(stream_id)
        status = answer.status if answer.headers else 0
        outcome.statuses[status] += 1
        if status >= 500:
            outcome.findings.append(
                f"{status} over HTTP/2: {method} {path[:500]} {headers} {request.body[:1000]!r}"
            )


def _raw(requests: Requests, seed: int) -> bytes:
    """Half of them were HTTP/1.1 once, the others HTTP/2."""
    if seed % 2:
        return requests.next_raw()
    connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    connection.initiate_connection()
    pseudo = [
        (":method", "POST"),
        (":scheme", "http"),
        (":authority", "localhost"),
        (":path", "/v1/streams/orders/records"),
    ]
    connection.send_headers(1, [*pseudo, ("s2-basin", BASIN), ("content-type", "application/json")])
    connection.send_data(1, b'{"records":[{"body":"a"}]}', end_stream=True)
    connection.send_headers(3, [*pseudo[1:], (":method", "GET")], end_stream=True)
    return Mutator([connection.data_to_send()], seed).next()


async def _ordinary(port: int, outcome: Outcome) -> None:
    """An ordinary client that must be served all the time."""
    headers = (("s2-basin", "ordinary-basin"), ("content-type", "application/json"))
    async with h2_client(port) as client:
        await client.exchange("PUT", "/v1/streams/mine", headers, b"{}")
        while True:
            body = b'{"records":[{"body":"%d"}]}' % outcome.ordinary
            began = time.monotonic()
            answer = await client.exchange("POST", "/v1/streams/mine/records", headers, body)
            if answer.status != 200:
                outcome.findings.append(
                    f"an ordinary append got {answer.status} {bytes(answer.body)!r}"
                )
                return
            ack = json.loads(answer.body)
            if ack["start"]["seq_num"] != outcome.ordinary:
                outcome.findings.append(
                    f"an ordinary append is at {ack}, not at {outcome.ordinary}"
                )
                return
            outcome.ordinary += 1
            await asyncio.sleep(max(0.0, 0.05 - (time.monotonic() - began)))


async def _settle(server: Watched, seconds: float, outcome: Outcome) -> None:
    """Wait until memory is back, for so long at most."""
    warm, most, after = outcome.memory
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        await asyncio.sleep(min(5.0, seconds))
        after = server.rss_mib
        if after <= warm + MEMORY_MAX_MIB / 4:
            break
    outcome.memory = (warm, most, after)
    if seconds and after > warm + MEMORY_MAX_MIB:
        outcome.findings.append(
            f"memory did not return: {warm:.0f} MiB once warm, {after:.0f} MiB {seconds:.0f} s after "
            "the attack"
        )
