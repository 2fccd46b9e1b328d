"""Reads files of tables in a process of its own, with bounded memory and time.

A small file may decode to any size, inside libraries that cannot be interrupted: only a process can be
limited and stopped whatever it does. Its cost is half a second for starting Python.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from typing import Any, Final

import msgspec

from streamfold.errors import InvalidError, StreamfoldError

_MODULE: Final = "streamfold.archive.preview.reads"
#: Bytes of one report; the reading process keeps its answers to half of this.
_REPORT_MAX: Final = 1 << 20
#: Begin the names of variables that are not for a process that decodes what others wrote: tokens, keys
#: and databases. Those of the storage (AWS_ and the like) are needed.
_SECRETS: Final = ("STREAMFOLD_", "S2_", "PG")


class ReadLimits(msgspec.Struct, frozen=True):
    """What one read of a table may take."""

    #: Bytes and rows that a preview may decode: what changed is held in memory.
    decoded_bytes: int = 256 << 20
    decoded_rows: int = 5_000_000
    #: Bytes of memory beyond those of the idle process: folding copies what was decoded.
    memory: int = 768 << 20
    #: Seconds of a preview, and of a check, which reads up to 1 GiB of files.
    preview_seconds: float = 60.0
    check_seconds: float = 600.0


class TableRead(msgspec.Struct, frozen=True):
    """What to read; positions are None for the head."""

    kind: str
    uri: str
    limits: ReadLimits
    since: str | None = None
    position: str | None = None
    #: What reads the same outside the server, without limits.
    command: str = ""

    @property
    def seconds(self) -> float:
        return self.limits.check_seconds if self.kind == "check" else self.limits.preview_seconds


class Report(msgspec.Struct, frozen=True):
    """A line that the reading process writes: an event with its value, or an error."""

    event: str
    value: Any = None
    error: str | None = None


async def run_read(read: TableRead) -> AsyncGenerator[Report]:
    """Yield what the process reports; it is gone when this ends, however it ends."""
    deadline = asyncio.get_running_loop().time() + read.seconds
    process = await asyncio.create_subprocess_exec(
        # -P: a module in the current folder must not replace ours.
        *(sys.executable, "-P", "-m", _MODULE),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_REPORT_MAX,
        env=_environment(os.environ),
    )
    try:
        while True:
            async with asyncio.timeout_at(deadline):
                report = await _next_report(process, read)
            if report is None:
                return
            yield report
    except TimeoutError:
        raise InvalidError(
            f"this takes longer than {read.seconds:g} seconds: run '{read.command}'"
        ) from None
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        while process.stdout and await process.stdout.read(_REPORT_MAX):
            pass  # asyncio's own loop does not see the end of a pipe that it has paused
        await process.wait()


def over_memory(read: TableRead) -> InvalidError:
    """The files decode to more than memory may hold."""
    return InvalidError(
        f"this would take more than {read.limits.memory} bytes of memory, which is the "
        f"most for one table: run '{read.command}'"
    )


async def _next_report(process: asyncio.subprocess.Process, read: TableRead) -> Report | None:
    """The next line of the process; None when it has ended as it should."""
    if process.stdin is None or process.stdout is None:
        raise AssertionError("both are pipes")
    if not process.stdin.is_closing():
        with suppress(BrokenPipeError, ConnectionResetError):  # its status says why it ended
            process.stdin.write(msgspec.json.encode(read))
            await process.stdin.drain()
        process.stdin.close()
    try:
        line = await process.stdout.readline()
    except ValueError:  # longer than `_REPORT_MAX`
        raise InvalidError(
            f"this has too many columns to be shown here: run '{read.command}'"
        ) from None
    if line:
        report = msgspec.json.decode(line, type=Report)
        if report.error is not None:
            raise StreamfoldError.from_wire(report.error)
        return report
    status = await process.wait()
    if status < 0:
        raise over_memory(read)
    if status:
        raise RuntimeError(f"the process that reads tables ended with status {status}")
    return None


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    # Arrow's own pool reserves memory in advance, which the limit would count.
    kept = {name: value for name, value in variables.items() if not name.startswith(_SECRETS)}
    return kept | {"ARROW_DEFAULT_MEMORY_POOL": "system"}
