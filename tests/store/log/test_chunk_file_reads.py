"""Readers get the records in chunk files, whatever happens to the files meanwhile."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest

from streamfold.blob import BlobStore, open_blob_store
from streamfold.errors import (
    DataCorruptError,
    DecryptionFailedError,
    StreamDeletingError,
    StreamNotFoundError,
)
from streamfold.model.configs import BasinConfig, Cipher
from streamfold.model.records import Record, trim_record
from streamfold.store.log import chunks
from streamfold.store.log.sealing import SealingKey
from streamfold.store.read.requests import ReadRequest, from_seq_num, from_timestamp
from streamfold.store.read_only import open_read_only
from streamfold.store.settings import StoreSettings
from streamfold.store.store import open_store
from streamfold.testing.blob_faults import FaultyBlobStore
from streamfold.testing.faults import ScriptedFaults
from tests.store.conftest import BASIN, EPOCH, STREAM, Bench
from tests.store.durable_streams import append, create, fork_of, read
from tests.store.log.large_records import LARGE, SETTINGS, bodies, names, prepare


@pytest.mark.parametrize("damage", ["flipped", "short", "gone"])
async def test_a_damaged_file_is_reported_and_other_streams_continue(
    bench: Bench, damage: str
) -> None:
    async with bench.store(SETTINGS) as store:
        await prepare(store)
        await store.create_stream(BASIN, "other")
        await store.append(BASIN, STREAM, [Record(LARGE)])
        await store.append(BASIN, "other", [Record(LARGE)])
        blobs, (name, *_) = bench.location.chunks, await names(bench)
        assert blobs is not None
        data = bytearray(await blobs.get(name))
        data[-1] ^= 1
        if damage == "gone":
            await blobs.delete(name)
        else:
            await blobs.put(name, bytes(data if damage == "flipped" else data[:-7]))
        with pytest.raises(DataCorruptError, match=name.rpartition("/")[2]):
            await bodies(store)
        assert await bodies(store, "other") == [LARGE]


async def test_sealed_records_are_sealed_in_their_file(bench: Bench) -> None:
    key, other = SealingKey(b"k" * 32), SealingKey(b"o" * 32)
    async with bench.store(SETTINGS) as store:
        await store.create_basin(BASIN, BasinConfig(stream_cipher=Cipher.AES_256_GCM))
        await store.create_stream(BASIN, STREAM)
        await store.append(BASIN, STREAM, [Record(LARGE)], key=key)
        (name,) = await names(bench)
        assert bench.location.chunks is not None
        assert LARGE[:64] not in await bench.location.chunks.get(name)
        request = ReadRequest(from_seq_num(0))
        batch = await store.read(BASIN, STREAM, request, key=key)
        assert [record.body for record in batch.records()] == [LARGE]
        with pytest.raises(DecryptionFailedError):
            await store.read(BASIN, STREAM, request, key=other)


async def test_a_fork_reads_the_files_of_its_source_and_keeps_them(bench: Bench) -> None:
    async with bench.store(SETTINGS) as store:
        await store.create_basin(BASIN)
        await create(store, "source", LARGE, LARGE + b"1")
        await append(store, "source", LARGE + b"2")
        await create(store, "fork", b"own", fork=fork_of("source", 1))
        await store.append(BASIN, "source", [trim_record(3)])
        for _ in range(3):
            await store.upkeep()
        assert await read(store, "fork") == [LARGE, b"own"]
        await store.delete_stream(BASIN, "fork")
        for _ in range(4):
            await store.upkeep()
        assert await names(bench) == []


async def test_a_read_by_timestamp_finds_its_record_in_a_file(bench: Bench) -> None:
    async with bench.store(SETTINGS) as store:
        await prepare(store)
        for number in range(4):
            await store.append(BASIN, STREAM, [Record(LARGE + b"%d" % number)] * 2)
            bench.clock.pass_seconds(1)
        batch = await store.read(BASIN, STREAM, ReadRequest(from_timestamp(EPOCH + 2000)))
        assert batch.first_seq_num == 4


async def test_a_reader_whose_records_are_trimmed_meanwhile_continues_after_them(
    bench: Bench,
) -> None:
    async with bench.store(SETTINGS) as store:
        await prepare(store)
        for number in range(6):
            await store.append(BASIN, STREAM, [Record(random.Random(number).randbytes(300 << 10))])
        async with store.follow(BASIN, STREAM, ReadRequest(from_seq_num(0), count=100)) as reader:
            first = await reader.read()
            assert first is not None
            await store.append(BASIN, STREAM, [trim_record(5)])
            await store.upkeep()
            assert len(await names(bench)) == 1
            batch = await reader.read()
            assert batch is not None
            assert batch.first_seq_num == 5


async def test_a_read_by_timestamp_whose_records_are_trimmed_meanwhile_starts_after_them(
    bench: Bench,
) -> None:
    blobs = HeldReads(open_blob_store("memory:"))
    bench.location = replace(bench.location, chunks=blobs)
    async with bench.store(SETTINGS) as store:
        await prepare(store)
        for _ in range(2):
            await store.append(BASIN, STREAM, [Record(LARGE)])
        blobs.open.clear()
        found = asyncio.create_task(
            store.read(BASIN, STREAM, ReadRequest(from_timestamp(EPOCH), count=1))
        )
        await blobs.reached.wait()
        await store.append(BASIN, STREAM, [trim_record(1)])
        await store.upkeep()
        blobs.open.set()
        assert (await found).first_seq_num == 1


async def test_a_reader_whose_stream_is_deleted_meanwhile_learns_that(bench: Bench) -> None:
    blobs = HeldReads(open_blob_store("memory:"))
    bench.location = replace(bench.location, chunks=blobs)
    async with bench.store(SETTINGS) as store:
        await prepare(store)
        await store.append(BASIN, STREAM, [Record(LARGE)])
        blobs.open.clear()
        reading = [
            asyncio.create_task(store.read(BASIN, STREAM, ReadRequest(start)))
            for start in (from_seq_num(0), from_timestamp(EPOCH))
        ]
        await blobs.reached.wait()
        await store.delete_stream(BASIN, STREAM)
        await store.upkeep()
        blobs.open.set()
        for read_ in reading:
            with pytest.raises((StreamDeletingError, StreamNotFoundError)):
                await read_


class HeldReads(FaultyBlobStore):
    """Holds reads back while `open` is not set."""

    def __init__(self, inner: BlobStore) -> None:
        super().__init__(inner, ScriptedFaults())
        self.open, self.reached = asyncio.Event(), asyncio.Event()

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        self.reached.set()
        await self.open.wait()
        return await super().get_range(key, start, length)


async def test_a_reader_far_behind_gets_everything_in_order(bench: Bench) -> None:
    """Far enough that it reads files ahead."""
    settings = StoreSettings(chunk_file_bytes=1, recent_bytes=0)
    expected = []
    async with bench.store(settings) as store:
        await prepare(store)
        for number in range(48):
            body = random.Random(number).randbytes(256 << 10)
            expected += [body] * 3
            await store.append(BASIN, STREAM, [Record(body)] * 3)
        assert await bodies(store) == expected


async def test_a_store_on_local_disk_and_its_reader_beside_it_find_the_files(
    tmp_path: Path,
) -> None:
    url = tmp_path.as_uri()
    async with open_store(url, SETTINGS) as store:
        await prepare(store)
        await store.append(BASIN, STREAM, [Record(LARGE), Record(b"small")])
        assert len(list((tmp_path / "chunks").glob("*/*/*-*"))) == 1
        async with open_read_only(url) as stored:
            batches = [batch async for batch in stored.batches(BASIN, STREAM, 0, 9, None)]
            assert [r.body for batch in batches for r in batch.records()] == [LARGE, b"small"]


@pytest.mark.parametrize("size", [40, 41, 56, 57])
def test_a_row_without_a_file_name_is_corrupt(size: int) -> None:
    with pytest.raises(DataCorruptError, match="names no file"):
        chunks.decode((b"\x02" + bytes(100))[:size])
