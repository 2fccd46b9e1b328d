"""Reads table files in a separate process, with bounded memory and time.

A small file may decode to any size, inside libraries that cannot be interrupted. Only a separate
process can always be limited and stopped. It costs half a second of Python startup.
"""

from __future__ import annotations

import asyncio
import math
import os
import resource
import signal
import sys
import threading
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa

from streamfold.archive.formats.jsonl.json_text import value_text
from streamfold.archive.manifest.model import Artifact
from streamfold.archive.read.decoding import DecodedLimit
from streamfold.archive.read.reader import Archive, open_archive
from streamfold.errors import InvalidError, StreamfoldError

_MODULE: Final = "streamfold.archive.preview"
#: Maximum bytes of one report. The reading process limits its answers to half of this.
_REPORT_MAX: Final = 1 << 20
#: Prefixes of environment variables withheld from a process that decodes untrusted files: tokens,
#: keys and databases. It gets storage variables (AWS_ and the like), which it needs.
_SECRETS: Final = ("STREAMFOLD_", "S2_", "PG")


class ReadLimits(msgspec.Struct, frozen=True):
    """Limits of one table read."""

    #: Bytes and rows that a preview may decode, because changes are held in memory.
    decoded_bytes: int = 256 << 20
    decoded_rows: int = 5_000_000
    #: Bytes of memory beyond the idle process. Folding copies decoded rows.
    memory: int = 768 << 20
    #: Seconds for a preview, and for a check, which reads up to 1 GiB of files.
    preview_seconds: float = 60.0
    check_seconds: float = 600.0


class TableRead(msgspec.Struct, frozen=True):
    """The read to perform. A position of None means the head."""

    kind: str
    uri: str
    limits: ReadLimits
    since: str | None = None
    position: str | None = None
    #: Command that does the same read outside the server, without limits.
    command: str = ""

    @property
    def seconds(self) -> float:
        return self.limits.check_seconds if self.kind == "check" else self.limits.preview_seconds


class Report(msgspec.Struct, frozen=True):
    """One line from the reading process: an event with its value, or an error."""

    event: str
    value: Any = None
    error: str | None = None


async def run_read(read: TableRead) -> AsyncGenerator[Report]:
    """Yield the process's reports. The process is gone when this ends, however it ends."""
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
    """Return the error for files that decode to more than the memory limit."""
    return InvalidError(
        f"this would take more than {read.limits.memory} bytes of memory, which is the "
        f"most for one table: run '{read.command}'"
    )


async def _next_report(process: asyncio.subprocess.Process, read: TableRead) -> Report | None:
    """Return the next report of the process, or None once it has exited normally."""
    if process.stdin is None or process.stdout is None:
        raise AssertionError("both are pipes")
    if not process.stdin.is_closing():
        with suppress(BrokenPipeError, ConnectionResetError):  # its exit status says why it ended
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
    harmless = {name: value for name, value in variables.items() if not name.startswith(_SECRETS)}
    return harmless | {"ARROW_DEFAULT_MEMORY_POOL": "system"}


#: Bytes of files that a preview may read.
_PREVIEW_BYTES: Final = 64 << 20
#: Rows of a preview, and characters of one value.
_ROWS: Final = 100
_SHOWN: Final = 300
#: Maximum bytes of one answer. Very wide tables show fewer rows.
_ANSWER_BYTES: Final = 512 << 10
#: Arrow threads, and bytes of a thread's stack. All of them count against the memory limit.
_THREADS: Final = 2
_STACK: Final = 1 << 20
#: Seconds beyond a read's limit after which the process exits even if no server stops it.
_GRACE: Final = 5


def size_of(artifact: Artifact) -> int:
    """Return the bytes of the artifact's smallest format, because a reader fetches only one."""
    return min(files.size_bytes for files in artifact.formats.values())


def check_size(size: int, most: int, command: str) -> None:
    """Raise InvalidError for more than `most` bytes, naming the `command` to run instead."""
    if size > most:
        raise InvalidError(
            f"this would read {size} bytes of files, and at most {most} are read here: "
            f"run '{command}'"
        )


async def _first_rows(read: TableRead) -> AsyncGenerator[Report]:
    archive = await _opened(read)
    plan = archive.plan(position=read.position)
    check_size(sum(map(size_of, plan.artifacts)), _PREVIEW_BYTES, read.command)
    columns: list[str] = []
    rows: list[list[str | None]] = []
    async with aclosing(archive.batches(position=read.position)) as batches:
        async for batch in batches:
            columns = batch.schema.names
            rows += _texts(batch.slice(0, _ROWS + 1 - len(rows)))
            if len(rows) > _ROWS:
                break
    shown = _fitting(rows[:_ROWS])
    answer = {"position": plan.position, "columns": columns, "rows": shown}
    yield Report("result", answer | {"more": len(rows) > len(shown)})


async def _first_changes(read: TableRead) -> AsyncGenerator[Report]:
    archive = await _opened(read)
    plan = archive.plan_changes(read.since or "", until=read.position)
    check_size(sum(map(size_of, plan.diffs)), _PREVIEW_BYTES, read.command)
    changes: list[dict[str, Any]] = []
    async with aclosing(archive.read_changes(plan)) as feed:
        async for item in feed:
            part = item.batch.slice(0, _ROWS + 1 - len(changes))
            changes += _shown_changes(part, item.to_position)
            if len(changes) > _ROWS:
                break
    shown = _fitting(changes[:_ROWS])
    yield Report("result", {"changes": shown, "more": len(changes) > len(shown)})


async def _check(read: TableRead) -> AsyncGenerator[Report]:
    """Check every file. Yields a report for each file, and one for the result."""
    archive = await open_archive(read.uri)
    files = sum(
        len(form.parts) for one in archive.manifest.artifacts for form in one.formats.values()
    )
    done = 0

    def show(_: object) -> None:
        nonlocal done
        done += 1
        _write(Report("progress", {"checked": done, "files": max(done, files)}))

    verification = await archive.verify(show)
    problems = [
        {"path": one.path, "message": one.problem.message}
        for one in verification.problems
        if one.problem
    ]
    summary = {
        "files": verification.files,
        "size_bytes": verification.size_bytes,
        "rows": verification.rows,
    }
    yield Report("result", summary | {"problems": problems[:_ROWS]})


_READS: Final = {"rows": _first_rows, "changes": _first_changes, "check": _check}


async def _opened(read: TableRead) -> Archive:
    limit = DecodedLimit(read.limits.decoded_bytes, read.limits.decoded_rows, read.command)
    return await open_archive(read.uri, decoded_limit=limit)


def _fitting(rows: list[Any]) -> list[Any]:
    """Return as many leading rows as fit into one answer."""
    while rows and len(msgspec.json.encode(rows)) > _ANSWER_BYTES:
        rows = rows[: len(rows) // 2]
    return rows


def _shown_changes(batch: pa.RecordBatch, position: str) -> list[dict[str, Any]]:
    names = batch.schema.names
    return [
        {"position": position} | dict(zip(names, change, strict=True)) for change in _texts(batch)
    ]


def _texts(batch: pa.RecordBatch) -> list[list[str | None]]:
    """Return every value as text, because JSON has no large numbers, bytes or decimals."""
    columns = [map(_text, _values(column)) for column in batch.columns]
    return [list(row) for row in zip(*columns, strict=True)]


def _values(column: pa.Array) -> list[Any]:
    """Return Python values, or JSON Lines values if a date or time is outside Python's years."""
    try:
        values: list[Any] = column.to_pylist()
    except OverflowError:
        values = [msgspec.json.decode(text) for text in value_text(column).to_pylist()]
    return values


def _text(value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, bytes):
        text = value[:_SHOWN].hex()
    elif isinstance(value, list | dict):
        text = msgspec.json.encode(value, enc_hook=str).decode()
    else:
        text = str(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def _write(report: Report) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    sys.stdout.buffer.flush()


async def _report(read: TableRead) -> None:
    async with aclosing(_READS[read.kind](read)) as reports:
        async for report in reports:
            _write(report)


def _limit_memory(more: int) -> None:
    """Limit threads, and limit memory to `more` bytes above current use (only on Linux)."""
    pa.set_cpu_count(_THREADS)
    pa.set_io_thread_count(_THREADS)
    threading.stack_size(_STACK)
    status = Path("/proc/self/status")
    if not status.exists():
        return
    data_size = next(line for line in status.read_text().splitlines() if line.startswith("VmData:"))
    most = int(data_size.split()[1]) * 1024 + more
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def main() -> None:
    """Run the read that standard input describes."""
    read = msgspec.json.decode(sys.stdin.buffer.read(), type=TableRead)
    _limit_memory(read.limits.memory)
    # The server stops this process in time, unless the server itself was killed.
    signal.alarm(math.ceil(read.seconds) + _GRACE)
    try:
        asyncio.run(_report(read))
    except StreamfoldError as error:
        _write(Report("problem", error=error.to_wire()))
    except MemoryError:
        _write(Report("problem", error=over_memory(read).to_wire()))


if __name__ == "__main__":
    main()
