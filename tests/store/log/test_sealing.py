from __future__ import annotations

import asyncio

import pytest

from streamfold.errors import DecryptionFailedError, InvalidError, KeyRequiredError
from streamfold.model.configs import BasinConfig, Cipher
from streamfold.model.records import Header, Record, trim_record
from streamfold.store import ReadRequest, SealingKey, StoreSettings, from_seq_num, from_timestamp
from streamfold.store.store import StreamStore
from tests.store.conftest import BASIN, EPOCH, Bench, bodies

KEY = SealingKey(b"k" * 32)
OTHER = SealingKey(b"o" * 32)
EVERYTHING = ReadRequest(from_seq_num(0))

ciphers = pytest.mark.parametrize("cipher", list(Cipher))


async def create(store: StreamStore, cipher: Cipher) -> None:
    await store.create_basin(BASIN, BasinConfig(stream_cipher=cipher))
    await store.create_stream(BASIN, "secret")


@ciphers
async def test_sealed_records_are_read_back_with_their_key_from_memory_and_from_storage(
    bench: Bench, cipher: Cipher
) -> None:
    async with bench.store() as store:
        await create(store, cipher)
        record = Record(b"top secret", (Header(b"name", b"classified"),))
        await store.append(BASIN, "secret", [record], key=KEY)
        assert (await store.read(BASIN, "secret", EVERYTHING, key=KEY)).records()[0].body == (
            b"top secret"
        )
    async with bench.store(StoreSettings(recent_bytes=0)) as store:
        found = (await store.read(BASIN, "secret", EVERYTHING, key=KEY)).records()[0]
        assert (found.body, found.headers) == (record.body, record.headers)
        assert (await store.check_tail(BASIN, "secret")).seq_num == 1
        request = ReadRequest(from_timestamp(EPOCH))
        assert (await store.read(BASIN, "secret", request, key=KEY)).count == 1


@ciphers
async def test_nothing_of_sealed_records_is_in_storage(bench: Bench, cipher: Cipher) -> None:
    async with bench.store() as store:
        await create(store, cipher)
        record = Record(b"top secret", (Header(b"name", b"classified"),))
        await store.append(BASIN, "secret", [record], key=KEY)
        rows = [row async for page in bench.engine.scan(b"\x00", b"\xff") for row in page]
        stored = b"".join(value for _, value in rows)
        for part in (b"top secret", b"classified", b"k" * 32):
            assert part not in stored


@ciphers
async def test_a_missing_key_is_asked_for_by_the_cipher_s_name_and_a_wrong_one_opens_nothing(
    bench: Bench, cipher: Cipher
) -> None:
    async with bench.store() as store:
        await create(store, cipher)
        with pytest.raises(KeyRequiredError, match=cipher.value):
            await store.append(BASIN, "secret", bodies("a"))
        await store.append(BASIN, "secret", bodies("a"), key=KEY)
        with pytest.raises(KeyRequiredError, match=cipher.value):
            await store.read(BASIN, "secret", EVERYTHING)
        with pytest.raises(DecryptionFailedError):
            await store.read(BASIN, "secret", EVERYTHING, key=OTHER)


async def test_batches_with_different_keys_stay_apart(bench: Bench) -> None:
    async with bench.store() as store:
        await create(store, Cipher.AEGIS_256)
        await asyncio.gather(
            *(
                store.append(BASIN, "secret", bodies(str(number)), key=KEY if number < 3 else OTHER)
                for number in range(6)
            )
        )
        batch = await store.read(BASIN, "secret", ReadRequest(from_seq_num(0), count=3), key=KEY)
        assert [record.body for record in batch.records()] == [b"0", b"1", b"2"]
        batch = await store.read(BASIN, "secret", ReadRequest(from_seq_num(3)), key=OTHER)
        assert [record.body for record in batch.records()] == [b"3", b"4", b"5"]


async def test_commands_and_limits_work_on_sealed_streams(bench: Bench) -> None:
    async with bench.store() as store:
        await create(store, Cipher.AES_256_GCM)
        await store.append(BASIN, "secret", bodies("a", "b", "c"), key=KEY)
        await store.append(BASIN, "secret", [trim_record(1)], key=KEY)
        request = ReadRequest(from_seq_num(0), count=2)
        batch = await store.read(BASIN, "secret", request, key=KEY)
        assert [record.body for record in batch.records()] == [b"b", b"c"]


async def test_a_stream_without_a_cipher_ignores_keys(store: StreamStore) -> None:
    await store.append(BASIN, "orders", bodies("a"), key=KEY)
    assert (await store.read(BASIN, "orders", EVERYTHING)).count == 1


def test_a_key_shows_nothing_of_itself_and_has_the_right_size() -> None:
    assert repr(KEY) == "SealingKey(...)"
    with pytest.raises(InvalidError, match="has 5 bytes"):
        SealingKey(b"short")
