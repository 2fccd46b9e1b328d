"""A store inside this process: append, read, follow, fence, trim, and open it again."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

from streamfold import StoreSettings
from streamfold.errors import FencingTokenMismatchError
from streamfold.model.records import Record, fence_record, trim_record
from streamfold.store import ReadRequest, StreamStore, from_seq_num, from_tail, open_store

BASIN, STREAM = "demo-basin", "orders"


async def show_append_and_read(store: StreamStore) -> None:
    await store.create_basin(BASIN)
    await store.create_stream(BASIN, STREAM)
    began = time.perf_counter()
    ack = await store.append(BASIN, STREAM, [Record(b"order 1: 2 apples"), Record(b"order 2: tea")])
    spent = (time.perf_counter() - began) * 1000
    print(f"appended seq_num {ack.start.seq_num} to {ack.end.seq_num - 1} as one batch;")
    print(f"  it was on the device {spent:.1f} ms later, and only then acknowledged")
    batch = await store.read(BASIN, STREAM, ReadRequest(from_seq_num(0)))
    for record in batch.records():
        print(f"read {record.seq_num}: {record.body.decode()}")


async def show_follow(store: StreamStore) -> None:
    async with store.follow(BASIN, STREAM, ReadRequest(from_tail())) as session:
        await session.next()  # the session has reached the tail
        await store.append(BASIN, STREAM, [Record(b"order 3: bread")])
        batch = await session.next()
        assert batch is not None
        print(f"a follower at the tail got: {batch.records()[0].body.decode()}")


async def show_fence_and_trim(store: StreamStore) -> None:
    await store.append(BASIN, STREAM, [fence_record("writer-2")])
    try:
        await store.append(BASIN, STREAM, [Record(b"late")], fencing_token="writer-1")
    except FencingTokenMismatchError as error:
        print(f"writer-1 was refused: {error}")
    await store.append(BASIN, STREAM, [trim_record(2)], fencing_token="writer-2")
    batch = await store.read(BASIN, STREAM, ReadRequest(from_seq_num(0)))
    print(f"after the trim the stream begins at seq_num {batch.first_seq_num}")


async def main() -> None:
    with tempfile.TemporaryDirectory(prefix="streamfold-demo-") as folder:
        url = Path(folder).as_uri()
        # By default, readers still get records trimmed in the last ten seconds.
        async with open_store(url, StoreSettings(trim_grace=0)) as store:
            await show_append_and_read(store)
            await show_follow(store)
            await show_fence_and_trim(store)
        async with open_store(url) as store:
            tail = await store.check_tail(BASIN, STREAM)
            print(f"opened again: the tail is seq_num {tail.seq_num}")
        print(f"all of it was {size_of(Path(folder))} bytes of files in {folder}")


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    asyncio.run(main())
