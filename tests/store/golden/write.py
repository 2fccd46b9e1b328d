"""Writes a golden store: python -m tests.store.golden.write tests/store/golden/v1

A golden store is written once, by the version that brings a new format, and never again: what a user
has on disk does not change either. So this refuses to write where something is.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from pathlib import Path

import msgspec

from streamfold.store.engine.local_disk import LocalDisk
from streamfold.store.engine.location import open_location
from streamfold.store.engine.slatedb import SlateEngine
from streamfold.store.settings import StoreSettings
from streamfold.store.store import open_store
from streamfold.testing.engine_faults import FaultyEngine
from tests.store.golden import content

#: The boot during which all golden stores were written.
BOOT = "golden"
#: Seconds; background work is done only when the writer asks for it.
_NEVER = StoreSettings(upkeep_interval=1e9, trim_grace=0, chunk_file_bytes=30)


async def write(target: Path) -> None:
    """Leave in `target` what a killed writer leaves: tables, a log, and work for the background."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "store"
        await _write(folder, target)
        reported = await _tell(target, Path(temporary) / "copy")
    (target / "expected.json").write_bytes(msgspec.json.encode(reported))


async def _write(folder: Path, target: Path) -> None:
    engines: list[FaultyEngine] = []

    async def open_engine() -> FaultyEngine:
        location = open_location(folder.as_uri())
        assert location.folder is not None
        slate = await SlateEngine.open(location, LocalDisk(location.folder, boot=BOOT))
        engines.append(FaultyEngine(slate))
        return engines[-1]

    now = iter(range(content.EPOCH, 1 << 62))
    async with open_store(
        folder.as_uri(), _NEVER, now=lambda: next(now), opener=open_engine
    ) as store:
        await content.write_tables(store)
        slate = engines[0].inner
        assert isinstance(slate, SlateEngine)
        await slate.flush()
        await content.write_log(store)
        await store.delete_basin(content.GOING)
        await store.delete_stream(content.PLAIN, "going")
        engines[0].hold()  # from here on nothing of the deletion gets done
        shutil.copytree(folder, target)
        engines[0].resume()


async def _tell(golden: Path, copy: Path) -> object:
    shutil.copytree(golden, copy)
    async with open_store(copy.as_uri(), _NEVER, now=lambda: content.EPOCH + 3_600_000) as store:
        return await content.describe(store)


def main() -> None:
    target = Path(sys.argv[1])
    if target.exists():
        raise SystemExit(f"{target} exists: a golden store is never written again")
    asyncio.run(write(target))


if __name__ == "__main__":
    main()
