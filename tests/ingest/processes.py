"""Ingesters and servers in processes of their own, to be killed and measured."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

from tests.ingest.conftest import BASIN
from tests.ports import free_port


class Serving:
    """A server of streams on local disk that is killed and started again at the same port."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"http://127.0.0.1:{(port := free_port())}"
        resources = folder / "resources.json"
        resources.write_text(f'{{"basins": [{{"name": "{BASIN}", "streams": []}}]}}')
        self._arguments = (
            *("serve", "--json", "--host", "127.0.0.1", "--port", str(port), "--no-console"),
            *("--local-root", str(folder / "data"), "--init-file", str(resources)),
        )

    async def start(self) -> asyncio.subprocess.Process:
        server = await start(*self._arguments)
        await line_with(server, b"port")
        return server


async def kill(process: asyncio.subprocess.Process) -> None:
    process.send_signal(signal.SIGKILL)
    await process.wait()


async def start(*arguments: str) -> asyncio.subprocess.Process:
    command = (sys.executable, "-m", "streamfold.cli.main", *arguments)
    return await asyncio.create_subprocess_exec(*command, stdout=PIPE)


async def line_with(process: asyncio.subprocess.Process, text: bytes) -> None:
    assert process.stdout is not None
    async with asyncio.timeout(120):
        while text not in (line := await process.stdout.readline()):
            assert line, "the ingester ended"
