"""Appends by h2load over HTTP/2 or HTTP/1.1, whose requests cost far less than the server's answers."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from tests.server.frames import append_frame, frames_in

from bench.figures import Latencies
from bench.store import BASIN

#: The forms of an append, by the name that a row gives them.
CONTENT_TYPES = {"protobuf": "application/protobuf", "JSON": "application/json"}
#: Appends before a measurement, at least.
WARM_UP_REQUESTS = 500


@dataclass(frozen=True, slots=True)
class Shape:
    """So many connections with so many requests at once on each, by so many processes.

    Every client of one h2load goes through the list of URIs from its start, all in step. With several
    processes whose lists start elsewhere, the requests under way are spread over all streams.
    """

    connections: int
    requests: int
    processes: int = 1
    http1: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """What was answered; failures are answers other than 2xx, and requests without one."""

    #: Acks per second while all processes were at work.
    acks_per_s: float
    #: Nanoseconds, of all acks.
    latencies: Latencies
    failures: int


def available() -> bool:
    return shutil.which("h2load") is not None


class Appender:
    """Posts one message to many URIs."""

    def __init__(
        self, uris: Sequence[str], message: bytes, headers: Mapping[str, str], folder: Path
    ) -> None:
        self._uris = uris
        self._folder = folder
        self._headers = headers
        self._message = folder / "append-input"
        self._message.write_bytes(message)

    @classmethod
    def to_s2(
        cls, url: str, streams: Sequence[str], body: bytes, folder: Path, form: str = "protobuf"
    ) -> Self:
        """Append records of one body to many streams of the S2 server at `url`."""
        uris = [f"{url}/v1/streams/{name}/records" for name in streams]
        kind = CONTENT_TYPES[form]
        headers = {"s2-basin": BASIN, "content-type": kind, "accept": kind}
        return cls(uris, _message(body, form), headers, folder)

    async def warm_up(self) -> None:
        """Append to every stream, so that the server has all of them open."""
        count = max(len(self._uris), WARM_UP_REQUESTS)
        load = await self.append_to_each(count, at_once=64)
        if load.failures:
            raise RuntimeError(f"{load.failures} of {count} appends were not acknowledged")

    async def append_to_each(self, count: int, at_once: int) -> Load:
        """Append `count` times on one connection, to one stream after the other."""
        options = (f"--requests={count}", f"--max-concurrent-streams={at_once}")
        return _join([await self._run(0, *options)])

    async def run(self, shape: Shape, seconds: float) -> Load:
        """Append in this shape for so many seconds."""
        options = (
            f"--clients={shape.connections // shape.processes}",
            f"--max-concurrent-streams={shape.requests}",
            f"--duration={seconds * 1000:.0f}ms",
            *["--h1"] * shape.http1,
        )
        step = len(self._uris) // shape.processes
        runs = (self._run(number * step, *options) for number in range(shape.processes))
        return _join(await asyncio.gather(*runs))

    async def _run(self, first: int, *options: str) -> Latencies:
        """One h2load from this URI on: rows of start in microseconds, status, microseconds taken."""
        uris, log = self._folder / f"uris-{first}", self._folder / f"h2load-{first}.log"
        uris.write_text("\n".join((*self._uris[first:], *self._uris[:first])))
        log.unlink(missing_ok=True)
        headers = (f"--header={name}: {value}" for name, value in self._headers.items())
        command = ["h2load", *options, *headers]
        command += [f"--input-file={uris}", f"--data={self._message}", f"--log-file={log}"]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        output, _ = await process.communicate()
        if process.returncode or not log.stat().st_size:
            raise RuntimeError(f"h2load {process.returncode}: {output.decode()[-2000:]}")
        return np.loadtxt(log, dtype=np.int64, usecols=(0, 1, 2), ndmin=2)


def _message(body: bytes, form: str) -> bytes:
    if form == "JSON":
        return json.dumps({"records": [{"body": body.decode()}]}).encode()
    return frames_in(append_frame(body))[0].body


def _join(logs: Sequence[Latencies]) -> Load:
    rows = np.concatenate(logs)
    acked = rows[(rows[:, 1] >= 200) & (rows[:, 1] < 300)]
    begin = max(log[:, 0].min() for log in logs)
    end = min((log[:, 0] + log[:, 2]).max() for log in logs)
    ends = acked[:, 0] + acked[:, 2]
    within = int(((ends >= begin) & (ends <= end)).sum())
    if end <= begin or not within:
        raise RuntimeError(f"{len(acked)} of {len(rows)} requests were acknowledged, none in time")
    return Load(within / ((end - begin) / 1e6), acked[:, 2] * 1000, len(rows) - len(acked))
