"""Chunks are compressed on their way to storage, and read as they were appended."""

from __future__ import annotations

import json
import os
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamfold.errors import DataCorruptError
from streamfold.model.configs import BasinConfig, Cipher
from streamfold.model.records import BATCH_BYTES_MAX, Record
from streamfold.store import (
    ReadRequest,
    SealingKey,
    StoreSettings,
    from_seq_num,
    from_timestamp,
    keys,
)
from streamfold.store.log import chunks, packing
from streamfold.store.log.packing import pack, unpack
from tests.store.conftest import EPOCH, STREAM, Bench
from tests.store.crash.verify import BASIN, read_all

FROM_STORAGE = StoreSettings(recent_bytes=0, trim_grace=0)


def orders(count: int, seed: int = 1, note: int = 20) -> list[Record]:
    """Changes of a table: a few columns, much of it alike."""
    source = random.Random(seed)
    return [
        Record(
            json.dumps(
                {"id": number, "amount": source.randrange(10**6), "note": "n" * note}
            ).encode()
        )
        for number in range(count)
    ]


@given(st.binary(max_size=64), st.integers(0, 4096), st.binary(max_size=8192))
def test_a_packed_payload_is_smaller_and_becomes_what_it_was(
    pattern: bytes, times: int, rest: bytes
) -> None:
    payload = pattern * times + rest
    packed = pack(payload)
    if packed is not None:
        assert len(packed) < len(payload)
        assert unpack(packed) == payload
        assert unpack(memoryview(packed)) == payload


def test_few_bytes_and_random_bytes_are_not_packed() -> None:
    assert pack(bytes(packing._PACK_FROM - 1)) is None
    assert pack(os.urandom(1 << 20)) is None
    assert pack(os.urandom(packing._PACK_FROM)) is None
    # The rest would shrink, but the sample does not.
    assert pack(os.urandom(packing._SAMPLE) + bytes(1 << 20)) is None
    assert pack(bytes(packing._SAMPLE) + os.urandom(1 << 20)) is None


def test_payloads_of_any_size_that_a_batch_may_have_are_read_back() -> None:
    for size in (packing._PACK_MAX, packing._PACK_MAX + 1):
        packed = pack(bytes(size))
        assert packed is None or unpack(packed) == bytes(size)
    assert pack(bytes(packing._PACK_MAX)) is not None
    assert pack(bytes(packing._PACK_MAX + 1)) is None


def too_large() -> bytes:
    return packing._compress(bytes(packing._PACK_MAX + 1))


def test_what_was_not_packed_is_corrupt() -> None:
    packed = pack(bytes(1 << 20))
    assert packed is not None
    for spoilt in (b"", b"nonsense", packed[:-1], packed + b"\x00", too_large()):
        with pytest.raises(DataCorruptError):
            unpack(spoilt)


async def stored(bench: Bench) -> list[bytes]:
    """The values of all chunks."""
    pages = bench.engine.scan(keys.chunk(0, 0), keys.chunk(2**63, 0))
    return [value async for page in pages for _, value in page]


@pytest.mark.parametrize(("count", "note"), [(400, 20), (900, 1000)], ids=["small", "large"])
async def test_compressed_records_are_read_from_storage_at_every_position(
    bench: Bench, count: int, note: int
) -> None:
    """The large ones are decompressed in a thread."""
    records = orders(count, note=note)
    async with bench.store() as store:
        await store.create_basin(BASIN)
        await store.create_stream(BASIN, STREAM)
        for first in range(0, count, 300):
            await store.append(BASIN, STREAM, records[first : first + 300])
            bench.clock.pass_seconds(1)
        values = await stored(bench)
        assert all(chunks.decode(value).packed for value in values)
        assert 3 * sum(map(len, values)) < sum(len(record.body) for record in records)
    async with bench.store(FROM_STORAGE) as store:
        everything = [record.body for record in records]
        assert [record.body for record in await read_all(store, STREAM)] == everything
        for start in (0, 1, 299, 300, 301, count - 1):
            request = ReadRequest(from_seq_num(start), count=2)
            batch = await store.read(BASIN, STREAM, request)
            assert [record.body for record in batch.records()] == everything[start : start + 2]
        second = await store.read(BASIN, STREAM, ReadRequest(from_timestamp(EPOCH + 1000), count=1))
        assert [record.seq_num for record in second.records()] == [300]


async def test_sealed_records_are_not_compressed(bench: Bench) -> None:
    key = SealingKey(b"k" * 32)
    records = orders(400)
    async with bench.store() as store:
        await store.create_basin(BASIN, BasinConfig(stream_cipher=Cipher.AEGIS_256))
        await store.create_stream(BASIN, STREAM)
        await store.append(BASIN, STREAM, records, key=key)
        (value,) = await stored(bench)
        assert not chunks.decode(value).packed
        assert len(value) > sum(len(record.body) for record in records)


async def test_live_bytes_are_those_of_the_compressed_chunks(bench: Bench) -> None:
    async with bench.store() as store:
        await store.create_basin(BASIN)
        await store.create_stream(BASIN, STREAM)
        await store.append(BASIN, STREAM, orders(900))
        await store.append(BASIN, STREAM, [Record(os.urandom(BATCH_BYTES_MAX // 2))])
        assert store._supervisor.current is not None
        live = store._supervisor.current.mount.live
        sizes = [len(value) for value in await stored(bench)]
        assert live.added - sum(sizes) == 33 * len(sizes)
