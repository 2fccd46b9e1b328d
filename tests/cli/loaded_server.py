"""A server with something of everything in its store, and load on both faces."""

from __future__ import annotations

import json
import random
import signal
import threading
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.cli.commands import Shell, ending_of, line_of

OCTETS = {"content-type": "application/octet-stream"}
BASIN = "load-basin"
#: Streams that change only before the load begins.
STILL = ("configured", "trimmed", "fenced", "source", "fork", "snapshotted")
#: Seconds between two appends of one writer: each costs a log file, and moto is slow.
_PAUSE = 0.1
#: Streams that are appended to: through S2, through Durable Streams.
S2_LOADED, DS_LOADED = "loaded", "ds-loaded"


def token(seq_num: int) -> str:
    """The Durable Streams offset of a position."""
    return f"{seq_num:016d}_{0:016d}"


@asynccontextmanager
async def server_on(shell: Shell, *where: str) -> AsyncIterator[str]:
    """The URL of a server on a store, which must stop well at the end."""
    options = ("--host", "127.0.0.1", "--port", "0", "--json", "--no-access-log")
    async with shell.running("serve", *where, *options, "--trim-grace", "0") as process:
        yield json.loads(await line_of(process))["url"]
        process.send_signal(signal.SIGTERM)
        ended = await ending_of(process)
        assert ended.status == 0, ended.stderr


@dataclass
class Face:
    """A client of one server."""

    url: str
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = httpx.Client(base_url=self.url, timeout=120, headers={"s2-basin": BASIN})

    def __enter__(self) -> Face:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        response = self.client.request(method, path, **more)
        assert response.status_code < 300, (method, path, response.status_code, response.text)
        return response

    def append(self, stream: str, *bodies: bytes, command: str = "") -> int:
        """Append through S2, or have it obey a command; returns the seq_num after the last record."""
        headers = [["", b64encode(command.encode()).decode()]] if command else []
        records = [{"headers": headers, "body": b64encode(body).decode()} for body in bodies]
        path, form = f"/v1/streams/{stream}/records", {"s2-format": "base64"}
        acked = self.ask("POST", path, json={"records": records}, headers=form).json()
        return int(acked["end"]["seq_num"])

    def trim(self, stream: str, seq_num: int) -> int:
        return self.append(stream, seq_num.to_bytes(8, "big"), command="trim")

    def records(self, stream: str, start: int = 0) -> dict[int, Any]:
        """Every record of a stream that can be read, by seq_num."""
        records: dict[int, Any] = {}
        tail = int(self.ask("GET", f"/v1/streams/{stream}/records/tail").json()["tail"]["seq_num"])
        while start < tail:
            answer = self.client.get(
                f"/v1/streams/{stream}/records",
                params={"seq_num": start, "clamp": "true"},
                headers={"s2-format": "base64"},
            )
            if answer.status_code == 416:
                break
            batch = answer.raise_for_status().json()["records"]
            if not batch:
                break
            records |= {int(record["seq_num"]): record for record in batch}
            start = int(batch[-1]["seq_num"]) + 1
        return records


def fill(face: Face) -> None:
    """Make something of everything."""
    config = {"default_stream_config": {"retention_policy": {"age": 864_000}}}
    face.ask("PUT", f"/v1/basins/{BASIN}", json=config)
    for name in ("configured", "trimmed", "fenced", S2_LOADED):
        settings = {"timestamping": {"mode": "arrival"}} if name == "configured" else {}
        face.ask("PUT", f"/v1/streams/{name}", json=settings)
    face.append("configured", *(b"%d" % number for number in range(10)))
    face.append("trimmed", *(b"x" * 40_000 for _ in range(10)))
    face.trim("trimmed", 7)
    face.append("fenced", b"my-token", command="fence")
    bucket = f"/{BASIN}"
    face.ask("PUT", f"{bucket}/source", headers=OCTETS, content=b"zero")
    for number in range(5):
        producer = {"producer-id": "p", "producer-epoch": "3", "producer-seq": str(number)}
        face.ask("POST", f"{bucket}/source", headers={**OCTETS, **producer}, content=b"%d" % number)
    forked = {**OCTETS, "stream-forked-from": f"{bucket}/source", "stream-fork-offset": token(3)}
    face.ask("PUT", f"{bucket}/fork", headers=forked)
    face.ask("POST", f"{bucket}/fork", headers=OCTETS, content=b"of the fork")
    face.ask("PUT", f"{bucket}/snapshotted", headers=OCTETS, content=b"a")
    face.ask("POST", f"{bucket}/snapshotted", headers=OCTETS, content=b"b")
    face.ask("PUT", f"{bucket}/snapshotted/snapshot/{token(1)}", content=bytes(range(256)) * 4000)
    face.ask("PUT", f"{bucket}/{DS_LOADED}", headers=OCTETS)
    face.ask("PUT", "/v1/stream/wakes", headers=OCTETS)
    pull = {"type": "pull-wake", "pattern": "still/*", "wake_stream": "wakes"}
    face.ask("PUT", "/v1/stream/__ds/subscriptions/sub", json=pull)
    scope = {"basins": {"prefix": ""}, "op_groups": {"account": {"read": True}}}
    face.ask("POST", "/v1/access-tokens", json={"id": "my-access", "scope": scope})


def described(face: Face) -> dict[str, Any]:
    """All that stays as it is while the load runs."""
    paths = {
        "basins": "/v1/basins",
        "basin": f"/v1/basins/{BASIN}",
        "streams": "/v1/streams",
        "tokens": "/v1/access-tokens",
        "subscription": "/v1/stream/__ds/subscriptions/sub",
    }
    found = {name: face.ask("GET", path).json() for name, path in paths.items()}
    for basin in found["basins"]["basins"]:
        basin.pop("location", None)  # where a store is may change
        basin.pop("scope", None)
    for stream in STILL:
        found[f"config of {stream}"] = face.ask("GET", f"/v1/streams/{stream}").json()
        found[f"records of {stream}"] = face.records(stream)
    snapshot = face.ask("GET", f"/{BASIN}/snapshotted/snapshot/{token(1)}")
    found["snapshot"] = (snapshot.content, snapshot.headers["stream-snapshot-digest"])
    return found


class Load:
    """Appends to both faces until it is stopped, and trims what is old."""

    def __init__(self, url: str, seed: int) -> None:
        self._url = url
        self._random = random.Random(seed)
        self._stop = threading.Event()
        #: The seq_num after the last acknowledged record.
        self.s2_acked = self.ds_acked = 0
        #: The acknowledged bodies, by stream and seq_num.
        self.bodies: dict[str, dict[int, bytes]] = {S2_LOADED: {}, DS_LOADED: {}}
        self.failure: BaseException | None = None

    def _s2(self) -> None:
        number = 0
        with Face(self._url) as face:
            while not self._stop.wait(_PAUSE):
                number += 1
                body = self._random.randbytes(300_000) if number % 4 == 0 else b"small"
                end = face.append(S2_LOADED, body, b"end of %d" % number)
                self.bodies[S2_LOADED] |= {end - 2: body, end - 1: b"end of %d" % number}
                self.s2_acked = end
                if number % 10 == 0:
                    self.s2_acked = face.trim(S2_LOADED, self.s2_acked - 10)

    def _ds(self) -> None:
        producer = {"producer-id": "w", "producer-epoch": "0"}
        with Face(self._url) as face:
            while not self._stop.wait(_PAUSE):
                number = self.ds_acked
                headers = {**OCTETS, **producer, "producer-seq": str(number)}
                path = f"/{BASIN}/{DS_LOADED}"
                face.ask("POST", path, headers=headers, content=b"%d" % number)
                self.bodies[DS_LOADED][number] = b"%d" % number
                self.ds_acked = number + 1

    @contextmanager
    def running(self) -> Iterator[Load]:
        threads = [
            threading.Thread(target=self._guarded, args=(work,)) for work in (self._s2, self._ds)
        ]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            for thread in threads:
                thread.join(240)
        assert self.failure is None, self.failure

    def _guarded(self, work: Any) -> None:
        try:
            work()
        except BaseException as error:
            self.failure = error
            raise

    def wait(self, records: int) -> None:
        """Return once both faces have acknowledged that many more records."""
        s2, ds = self.s2_acked + records, self.ds_acked + records
        while (self.s2_acked < s2 or self.ds_acked < ds) and self.failure is None:
            self._stop.wait(0.01)
