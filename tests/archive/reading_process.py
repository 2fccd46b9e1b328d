"""Reads an archive and prints the peak of its memory: run by a test."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import streamfold.archive


def held(line: str) -> int:
    """Return a figure of this process, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{line}:")[1].split()[0]) << 10


async def read(folder: str, form: str) -> dict[str, int]:
    archive = await streamfold.archive.open(folder, formats=[form])
    rows = sum([len(batch) async for batch in archive.batches()])
    return {"rows": rows, "peak": held("VmHWM")}


def main() -> None:
    print(json.dumps(asyncio.run(read(*sys.argv[1:]))))


if __name__ == "__main__":
    main()
