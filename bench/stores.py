"""How fast a store is checked, backed up and restored, beside a plain copy of the same files.

    python -m bench.stores [--mib 256] [--folder /dev/shm]

Half of the bytes are large records, which are in chunk files; the other half small ones, in tables and
in the log. Bodies are random JSON, so that chunks shrink as they do in use. Every step reads from the
page cache: the figures compare the work of the programs, not of a disk.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import tempfile
import time
from pathlib import Path

from streamfold.model.records import Record
from streamfold.server.store_check import check_store
from streamfold.store import StoreSettings, open_store
from streamfold.store.backup import back_up, restore_backup

_BASIN = "bench-basin"
#: Records of one append, and bytes of a small one and of a large one.
_RECORDS, _SMALL, _LARGE = 500, 400, 64 << 10


def _body(source: random.Random, size: int) -> bytes:
    fields = {f"field-{number}": source.random() for number in range(size // 32)}
    return json.dumps(fields).encode()


async def _write(folder: Path, mib: int) -> None:
    source = random.Random(1)
    small = [Record(_body(source, _SMALL)) for _ in range(_RECORDS)]
    large = [Record(_body(source, _LARGE)) for _ in range(8)]
    async with open_store(folder.as_uri(), StoreSettings(fsync=False)) as store:
        await store.create_basin(_BASIN)
        for name in ("small", "large"):
            await store.create_stream(_BASIN, name)
        for name, batch in (("small", small), ("large", large)):
            size = sum(len(record.body) for record in batch)
            for _ in range(mib * (1 << 19) // size):
                await store.append(_BASIN, name, batch)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _read(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                while file.read(4 << 20):
                    pass


async def _measure(folder: Path, mib: int) -> None:
    store = folder / "store"
    await _write(store, mib)
    size = _size(store)
    records = (await check_store(str(store))).counts.records  # loads the compiled code
    print(
        f"a store of {size / 2**20:.0f} MiB with {records:,} records ({mib} MiB before compression)"
    )

    async def timed(step: str, work: object) -> None:
        began = time.perf_counter()
        if asyncio.iscoroutine(work):
            await work
        elif callable(work):
            work()
        seconds = time.perf_counter() - began
        rates = f"{size / 2**20 / seconds:8.0f} MiB/s {records / seconds:12,.0f} records/s"
        print(f"{step:<28}{seconds:8.2f} s {rates}", flush=True)

    await timed("read every file", lambda: _read(store))
    await timed("cp -r", lambda: shutil.copytree(store, folder / "copy"))
    shutil.rmtree(folder / "copy")
    await timed("streamfold check", check_store(str(store)))
    await timed("streamfold backup, first", back_up(str(store), str(folder / "backups")))
    await timed("streamfold backup, again", back_up(str(store), str(folder / "backups")))
    await timed("streamfold restore", restore_backup(str(folder / "backups"), str(folder / "new")))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="streamfold-stores-", dir=arguments.folder))
    try:
        asyncio.run(_measure(folder, arguments.mib))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
