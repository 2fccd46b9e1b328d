"""Ingesters and servers in processes of their own, to be killed and measured."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

from tests.ingest.conftest import BASIN
from tests.ingest.postgres import PATIENCE
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
    await end(process, signal.SIGKILL)


async def end(process: asyncio.subprocess.Process, how: signal.Signals = signal.SIGTERM) -> int:
    """Send a signal, and return the status that the process ends with."""
    process.send_signal(how)
    await process.communicate()  # reads to the end: a pipe that stays open is a warning later
    assert process.returncode is not None
    return process.returncode


async def start(*arguments: str) -> asyncio.subprocess.Process:
    command = (sys.executable, "-m", "streamfold.cli.main", *arguments)
    return await asyncio.create_subprocess_exec(*command, stdout=PIPE)


async def line_with(process: asyncio.subprocess.Process, text: bytes) -> None:
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE):
        while text not in (line := await process.stdout.readline()):
            assert line, "the ingester ended"
