"""A `streamfold serve` that can be killed and started again at the same address."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import s2_sdk

from streamfold.server.config import write_self_signed
from streamfold.server.http.door import TlsFiles
from tests.ports import free_port
from tests.sdk import sdk_client

BASIN = "spark-basin"
#: What a token looks like: unlike anything else in a log.
TOKEN = "wHiSpEr-this-7f3a9c"
#: A customer's key.
KEY = "aGlkZGVuIGtleSBvZiB0aGlydHktdHdvIGJ5dGVzISE="

Found = TypeVar("Found")
Pair = tuple[bytes, bytes]


class Server:
    """A server on local disk; streams are made and looked at through the official client."""

    def __init__(self, folder: Path, tls: TlsFiles | None = None, cipher: str = "") -> None:
        self._folder = folder
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._tls = tls
        config = {"stream_cipher": cipher} if cipher else {}
        basin = {"name": BASIN, "config": config}
        (folder / "init.json").write_text(json.dumps({"basins": [basin]}))

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self._port}"

    @property
    def options(self) -> dict[str, str]:
        """What every read and write needs."""
        return {"endpoint": self.url, "basin": BASIN, "accessToken": TOKEN, "retryTimeout": "120"}

    @property
    def stored(self) -> dict[str, str]:
        """What reads from storage need, past the server."""
        return {"store": (self._folder / "data").as_uri(), "basin": BASIN}

    def start(self) -> Server:
        command = [sys.executable, "-m", "streamfold.cli.main", "serve", "--json"]
        command += ["--host=127.0.0.1", f"--port={self._port}", "--no-fsync", "--trim-grace=0"]
        command += [
            f"--local-root={self._folder / 'data'}",
            f"--init-file={self._folder / 'init.json'}",
        ]
        if self._tls is not None:
            command += [f"--tls-cert={self._tls.certificate}", f"--tls-key={self._tls.key}"]
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, (self._folder / "server.log").read_text()[-2000:]
        return self

    def kill(self, number: int = signal.SIGKILL) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(number)
            process.wait(240)
            if process.stdout:
                process.stdout.close()

    def talk(self, work: Callable[[Any], Awaitable[Found]]) -> Found:
        """Do something with the basin through the client."""

        async def run() -> Found:
            async with sdk_client(self.url, TOKEN) as client:
                return await work(client.basin(BASIN))

        return asyncio.run(run())

    def create(self, *streams: str) -> None:
        async def work(basin: Any) -> None:
            for stream in streams:
                await basin.create_stream(stream)

        self.talk(work)

    def recreate(self, stream: str) -> None:
        """Delete a stream, and create one of the same name once it is gone."""

        async def work(basin: Any) -> None:
            await basin.delete_stream(stream)
            async with asyncio.timeout(240):
                while True:
                    try:
                        await basin.create_stream(stream)
                    except s2_sdk.S2Error:
                        await asyncio.sleep(0.05)
                    else:
                        return

        self.talk(work)

    def append(self, stream: str, records: Sequence[s2_sdk.Record], key: str | None = None) -> None:
        async def work(basin: Any) -> None:
            for start in range(0, len(records), 1000):
                batch = s2_sdk.AppendInput(list(records[start : start + 1000]))
                await basin.stream(stream, encryption_key=key).append(batch)

        self.talk(work)

    def append_numbers(self, stream: str, numbers: range) -> None:
        self.append(stream, [s2_sdk.Record(b"%d" % number) for number in numbers])

    def trim(self, stream: str, seq_num: int) -> None:
        self.append(stream, [s2_sdk.Record(seq_num.to_bytes(8, "big"), [(b"", b"trim")])])

    def records(self, stream: str) -> list[s2_sdk.SequencedRecord]:
        async def work(basin: Any) -> list[s2_sdk.SequencedRecord]:
            found: list[s2_sdk.SequencedRecord] = []
            tail = await basin.stream(stream).check_tail()
            while not found or found[-1].seq_num + 1 < tail.seq_num:
                if not tail.seq_num:
                    break
                start = s2_sdk.SeqNum(found[-1].seq_num + 1 if found else 0)
                found += (await basin.stream(stream).read(start=start)).records
            return found

        return self.talk(work)

    def bodies(self, stream: str) -> list[bytes]:
        return [record.body for record in self.records(stream)]


class SecuredServer(Server):
    """TLS by a certificate of its own, and a basin whose streams are encrypted."""

    def __init__(self, folder: Path) -> None:
        files = write_self_signed(folder)
        super().__init__(folder, files, "aegis-256")
        self.certificate = files.certificate

    def append_sealed(self, stream: str, numbers: range) -> None:
        """Through the official client, which trusts what the environment says."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SSL_CERT_FILE", str(self.certificate))
            self.create(stream)
            self.append(stream, [s2_sdk.Record(b"%d" % number) for number in numbers], KEY)
