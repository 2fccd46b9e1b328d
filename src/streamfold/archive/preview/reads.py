"""The process that previews and checks archives: takes one read, writes reports as lines of JSON.

It limits its own memory before it opens a file; the server limits its time. See `process`.
"""

from __future__ import annotations

import asyncio
import math
import resource
import signal
import sys
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa

from streamfold.archive.formats.jsonl.json_text import value_text
from streamfold.archive.manifest.model import Artifact
from streamfold.archive.preview.process import Report, TableRead, over_memory
from streamfold.archive.read.decoding import DecodedLimit
from streamfold.archive.read.reader import Archive, open_archive
from streamfold.errors import InvalidError, StreamfoldError

#: Bytes of files that a preview may read.
_PREVIEW_BYTES: Final = 64 << 20
#: Rows of a preview, and characters of one value.
_ROWS: Final = 100
_SHOWN: Final = 300
#: Bytes of one answer: those of very wide tables show fewer rows.
_ANSWER_BYTES: Final = 512 << 10
#: Threads for Arrow, and bytes of a thread's stack: the memory limit counts all of them.
_THREADS: Final = 2
_STACK: Final = 1 << 20
#: Seconds beyond those of a read, after which the process ends although no server ended it.
_GRACE: Final = 5


def size_of(artifact: Artifact) -> int:
    """Bytes of its smallest format: a reader fetches one of them."""
    return min(files.size_bytes for files in artifact.formats.values())


def check_size(size: int, most: int, command: str) -> None:
    """Refuse to read more than `most` bytes; `command` does it outside the server."""
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
    found: list[dict[str, Any]] = []
    async with aclosing(archive.read_changes(plan)) as feed:
        async for item in feed:
            part = item.batch.slice(0, _ROWS + 1 - len(found))
            found += _shown_changes(part, item.to_position)
            if len(found) > _ROWS:
                break
    shown = _fitting(found[:_ROWS])
    yield Report("result", {"changes": shown, "more": len(found) > len(shown)})


async def _check(read: TableRead) -> AsyncGenerator[Report]:
    """Check every file; yields a report for each, and one for the result."""
    archive = await open_archive(read.uri)
    files = sum(
        len(kept.parts) for one in archive.manifest.artifacts for kept in one.formats.values()
    )
    done = 0

    def show(_: object) -> None:
        nonlocal done
        done += 1
        _write(Report("progress", {"checked": done, "files": max(done, files)}))

    found = await archive.verify(show)
    problems = [
        {"path": one.path, "message": one.problem.message} for one in found.problems if one.problem
    ]
    summary = {"files": found.files, "size_bytes": found.size_bytes, "rows": found.rows}
    yield Report("result", summary | {"problems": problems[:_ROWS]})


_READS: Final = {"rows": _first_rows, "changes": _first_changes, "check": _check}


async def _opened(read: TableRead) -> Archive:
    limit = DecodedLimit(read.limits.decoded_bytes, read.limits.decoded_rows, read.command)
    return await open_archive(read.uri, decoded_limit=limit)


def _fitting(rows: list[Any]) -> list[Any]:
    """As many of the first rows as one answer has room for."""
    while rows and len(msgspec.json.encode(rows)) > _ANSWER_BYTES:
        rows = rows[: len(rows) // 2]
    return rows


def _shown_changes(batch: pa.RecordBatch, position: str) -> list[dict[str, Any]]:
    names = batch.schema.names
    return [
        {"position": position} | dict(zip(names, change, strict=True)) for change in _texts(batch)
    ]


def _texts(batch: pa.RecordBatch) -> list[list[str | None]]:
    """Every value as text: JSON has no large numbers, bytes or decimals."""
    columns = [map(_text, _values(column)) for column in batch.columns]
    return [list(row) for row in zip(*columns, strict=True)]


def _values(column: pa.Array) -> list[Any]:
    """Python's values; those of JSON Lines where a day or an instant is of a year that Python lacks."""
    try:
        found: list[Any] = column.to_pylist()
    except OverflowError:
        found = [msgspec.json.decode(text) for text in value_text(column).to_pylist()]
    return found


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
    """Let the process take so many bytes beyond what it has; only Linux says how many that are."""
    pa.set_cpu_count(_THREADS)
    pa.set_io_thread_count(_THREADS)
    threading.stack_size(_STACK)
    status = Path("/proc/self/status")
    if not status.exists():
        return
    held = next(line for line in status.read_text().splitlines() if line.startswith("VmData:"))
    most = int(held.split()[1]) * 1024 + more
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def main() -> None:
    """Read what standard input asks for."""
    read = msgspec.json.decode(sys.stdin.buffer.read(), type=TableRead)
    _limit_memory(read.limits.memory)
    # The server ends this process in time, unless it was killed itself.
    signal.alarm(math.ceil(read.seconds) + _GRACE)
    try:
        asyncio.run(_report(read))
    except StreamfoldError as error:
        _write(Report("problem", error=error.to_wire()))
    except MemoryError:
        _write(Report("problem", error=over_memory(read).to_wire()))


if __name__ == "__main__":
    main()
