"""A store read alongside its server omits only records trimmed meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from streamfold.errors import DataCorruptError, StreamNotFoundError
from streamfold.model.records import Record, trim_record
from streamfold.store import read_only
from streamfold.store.read_only import StoredStreams, open_read_only
from streamfold.store.settings import StoreSettings
from streamfold.store.store import StreamStore, open_store
from tests.store.conftest import BASIN, STREAM, incompressible
from tests.store.upkeep.test_upkeep import first_seq_num

SETTINGS = StoreSettings(trim_grace=0, chunk_file_bytes=50_000)
LARGE = incompressible(60_000)


@pytest.fixture(autouse=True)
def renewal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reopened readers see new state within 0.1 s, not a minute."""
    monkeypatch.setattr(read_only, "_RENEWAL", 100)


async def read_into(found: list[int], stored: StoredStreams) -> None:
    async for batch in stored.batches(BASIN, STREAM, 0, 10, None):
        found += [int(record.seq_num) for record in batch.records()]


async def seq_nums(stored: StoredStreams) -> list[int]:
    found: list[int] = []
    await read_into(found, stored)
    return found


async def prepare(store: StreamStore, body: bytes) -> None:
    await store.create_basin(BASIN)
    await store.create_stream(BASIN, STREAM)
    for _ in range(10):
        await store.append(BASIN, STREAM, [Record(body)])


async def trim(store: StreamStore, seq_num: int) -> None:
    await store.append(BASIN, STREAM, [trim_record(seq_num)])
    await store.upkeep()
    assert await first_seq_num(store, STREAM) == seq_num


@pytest.mark.parametrize("body", [b"row", LARGE], ids=["rows", "files"])
async def test_a_read_continues_after_records_that_were_trimmed_meanwhile(
    tmp_path: Path, body: bytes
) -> None:
    url = tmp_path.as_uri()
    async with open_store(url, SETTINGS) as store:
        await prepare(store, body)
        async with open_read_only(url) as stored:
            assert (await stored.tail(BASIN, STREAM)).seq_num == 10
            await trim(store, 8)
            async with asyncio.timeout(60):
                # Until a renewal of the reader; nothing announces it.
                while len(found := await seq_nums(stored)) == 10:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            assert found == [8, 9]
            assert await stored.first(BASIN, STREAM, 0) == 8


async def test_no_record_before_those_that_are_gone_is_left_out(tmp_path: Path) -> None:
    url = tmp_path.as_uri()
    async with open_store(url, SETTINGS) as store:
        await prepare(store, LARGE)
        files = sorted((tmp_path / "chunks").glob("*/*/*-*"))
        async with open_read_only(url) as stored:
            files[3].unlink()
            found: list[int] = []
            with pytest.raises(DataCorruptError):
                await read_into(found, stored)
            assert found == [0, 1, 2]


async def test_a_read_of_a_stream_that_was_deleted_meanwhile_finds_none(tmp_path: Path) -> None:
    url = tmp_path.as_uri()
    async with open_store(url, SETTINGS) as store:
        await prepare(store, LARGE)
        async with open_read_only(url) as stored:
            assert (await stored.tail(BASIN, STREAM)).seq_num == 10
            await store.delete_stream(BASIN, STREAM)
            await store.upkeep()
            with pytest.raises(StreamNotFoundError):
                await seq_nums(stored)
