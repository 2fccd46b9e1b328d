"""Records one call at a time, through the official Python client."""

from __future__ import annotations

import time

import pytest
from s2_sdk import (
    S2,
    AppendInput,
    BasinConfig,
    CommandRecord,
    Compression,
    Encryption,
    FencingTokenMismatchError,
    ReadLimit,
    ReadUnwrittenError,
    Record,
    S2Basin,
    S2ServerError,
    S2Stream,
    SeqNum,
    SeqNumMismatchError,
    StreamConfig,
    TailOffset,
    Timestamp,
)

from streamfold.server.main import Server, running_server
from streamfold.store.settings import StoreSettings
from tests.server.conftest import BASIN, STREAM, configuration, sdk


async def test_what_is_appended_is_read_back(stream: S2Stream) -> None:
    records = [
        Record(body=b"first", headers=[(b"kind", b"a"), (b"empty", b"")]),
        Record(body=b""),
        Record(body=bytes(range(256))),
    ]
    ack = await stream.append(AppendInput(records=records))
    assert (ack.start.seq_num, ack.end.seq_num, ack.tail.seq_num) == (0, 3, 3)
    batch = await stream.read(start=SeqNum(0))
    assert [(each.seq_num, each.body) for each in batch.records] == [
        (number, record.body) for number, record in enumerate(records)
    ]
    assert batch.records[0].headers == records[0].headers
    assert await stream.check_tail() == ack.tail


async def test_a_full_batch_goes_through(stream: S2Stream) -> None:
    ack = await stream.append(AppendInput(records=[Record(body=b"x")] * 1000))
    assert ack.end.seq_num == 1000
    assert len((await stream.read(start=SeqNum(0))).records) == 1000


@pytest.mark.parametrize("compression", Compression)
async def test_large_records_survive_every_compression(
    server: Server, compression: Compression
) -> None:
    body = b"repetition and " * 45_000
    async with sdk(server, compression=compression) as client:
        stream = client.basin(BASIN).stream(STREAM)
        await stream.append(AppendInput(records=[Record(body=body)]))
        batch = await stream.read(start=SeqNum(0))
    assert batch.records[0].body == body


async def test_an_append_that_expects_another_seq_num_is_refused(stream: S2Stream) -> None:
    await stream.append(AppendInput(records=[Record(body=b"one")], match_seq_num=0))
    with pytest.raises(SeqNumMismatchError) as refused:
        await stream.append(AppendInput(records=[Record(body=b"two")], match_seq_num=5))
    assert refused.value.expected_seq_num == 1
    assert (await stream.check_tail()).seq_num == 1


async def test_a_fence_keeps_writers_with_another_token_out(stream: S2Stream) -> None:
    await stream.append(AppendInput(records=[CommandRecord.fence("mine")], fencing_token=""))
    with pytest.raises(FencingTokenMismatchError) as refused:
        await stream.append(AppendInput(records=[Record(body=b"x")], fencing_token="yours"))
    assert refused.value.expected_fencing_token == "mine"
    await stream.append(AppendInput(records=[Record(body=b"x")], fencing_token="mine"))
    await stream.append(AppendInput(records=[CommandRecord.fence("")], fencing_token="mine"))
    await stream.append(AppendInput(records=[Record(body=b"x")], fencing_token=""))


async def test_a_trim_hides_what_is_below_when_its_grace_is_over() -> None:
    settings = configuration(store=StoreSettings(trim_grace=0))
    async with running_server(settings) as server, sdk(server) as client:
        await server.store.create_basin(BASIN)
        await server.store.create_stream(BASIN, STREAM)
        stream = client.basin(BASIN).stream(STREAM)
        await stream.append(AppendInput(records=[Record(body=b"x")] * 5))
        await stream.append(AppendInput(records=[CommandRecord.trim(3)]))
        batch = await stream.read(start=SeqNum(0), ignore_command_records=True)
        assert [record.seq_num for record in batch.records] == [3, 4]


async def test_a_follower_gets_the_records_that_one_append_writes_and_trims() -> None:
    got: list[int] = []
    settings = configuration(store=StoreSettings(trim_grace=600))
    async with running_server(settings) as server, sdk(server) as client:
        await server.store.create_basin(BASIN)
        await server.store.create_stream(BASIN, STREAM)
        stream = client.basin(BASIN).stream(STREAM)
        async with stream.read_session(start=TailOffset(0)) as reading:
            assert (await reading.caught_up()).seq_num == 0
            batch = [Record(body=b"a"), Record(body=b"b"), CommandRecord.trim(2)]
            await stream.append(AppendInput(records=batch))
            async for part in reading:
                got.extend(record.seq_num for record in part.records)
                if got[-1] == 2:
                    break
        # As one does that connects again right after.
        resumed = await stream.read(start=SeqNum(0))
    assert got == [0, 1, 2]
    assert [record.seq_num for record in resumed.records] == [0, 1, 2]


async def test_a_future_timestamp_is_capped_and_a_past_one_raised(stream: S2Stream) -> None:
    far = int(time.time() * 1000) + 10_000_000
    first = await stream.append(AppendInput(records=[Record(body=b"x", timestamp=far)]))
    assert first.start.timestamp < far
    second = await stream.append(AppendInput(records=[Record(body=b"x", timestamp=1)]))
    assert second.start.timestamp >= first.start.timestamp


async def test_reads_begin_and_end_where_the_request_says(stream: S2Stream) -> None:
    records = [Record(body=b"x" * 92, timestamp=1000 + number) for number in range(10)]
    await stream.append(AppendInput(records=records))

    async def seq_nums(**how: object) -> list[int]:
        return [record.seq_num for record in (await stream.read(**how)).records]

    assert await seq_nums(start=SeqNum(7)) == [7, 8, 9]
    assert await seq_nums(start=TailOffset(2)) == [8, 9]
    assert await seq_nums(start=Timestamp(1004), until_timestamp=1006) == [4, 5]
    assert await seq_nums(start=SeqNum(2), limit=ReadLimit(count=3)) == [2, 3, 4]
    assert await seq_nums(start=SeqNum(0), limit=ReadLimit(bytes=250)) == [0, 1]
    assert await seq_nums(start=SeqNum(0), limit=ReadLimit(bytes=99)) == []
    assert await seq_nums(start=SeqNum(0), limit=ReadLimit(count=0)) == []


async def test_a_read_at_the_tail_returns_the_tail(stream: S2Stream) -> None:
    await stream.append(AppendInput(records=[Record(body=b"x")]))
    for start in (SeqNum(1), SeqNum(9), TailOffset(0)):
        with pytest.raises(ReadUnwrittenError) as refused:
            await stream.read(start=start)
        assert refused.value.tail.seq_num == 1
    with pytest.raises(ReadUnwrittenError):
        await stream.read(start=SeqNum(9), clamp_to_tail=True)


async def test_a_read_that_waits_in_vain_is_empty(stream: S2Stream) -> None:
    batch = await stream.read(start=SeqNum(9), clamp_to_tail=True, wait=1)
    assert batch.records == []
    assert batch.tail is not None


@pytest.mark.parametrize(
    ("stream_name", "basin_name", "code"),
    [("missing", BASIN, "stream_not_found"), (STREAM, "missing-basin", "basin_not_found")],
)
async def test_what_does_not_exist_is_not_found(
    s2: S2, stream_name: str, basin_name: str, code: str
) -> None:
    stream = s2.basin(basin_name).stream(stream_name)
    for call in (
        stream.append(AppendInput(records=[Record(body=b"x")])),
        stream.read(start=SeqNum(0)),
        stream.check_tail(),
    ):
        with pytest.raises(S2ServerError) as missing:
            await call
        assert (missing.value.status_code, missing.value.code) == (404, code)


async def test_a_basin_may_create_streams_on_append_with_the_config_of_the_request(
    s2: S2, basin: S2Basin
) -> None:
    await s2.reconfigure_basin(BASIN, config=BasinConfig(create_stream_on_append=True))
    config = StreamConfig(retention_policy=123)
    records = [Record(body=b"x")]
    await basin.stream("made").append(AppendInput(records=records, stream_config=config))
    assert (await basin.get_stream_config("made")).retention_policy == 123
    later = StreamConfig(retention_policy=456)
    await basin.stream("made").append(AppendInput(records=records, stream_config=later))
    assert (await basin.get_stream_config("made")).retention_policy == 123


async def test_a_basin_may_create_streams_on_read_and_on_tail_check(s2: S2, basin: S2Basin) -> None:
    await s2.reconfigure_basin(BASIN, config=BasinConfig(create_stream_on_read=True))
    assert (await basin.stream("by-tail").check_tail()).seq_num == 0
    with pytest.raises(ReadUnwrittenError):
        await basin.stream("by-read").read(start=SeqNum(0))
    assert len((await basin.list_streams(prefix="by-")).items) == 2


async def test_an_invalid_read_creates_nothing(s2: S2, basin: S2Basin) -> None:
    await s2.reconfigure_basin(BASIN, config=BasinConfig(create_stream_on_read=True))
    with pytest.raises(S2ServerError) as refused:
        await basin.stream("never").read(start=Timestamp(5), until_timestamp=5)
    assert refused.value.code == "invalid"
    assert (await basin.list_streams(prefix="never")).items == []


@pytest.mark.parametrize("cipher", [Encryption.AEGIS_256, Encryption.AES_256_GCM])
async def test_an_encrypted_stream_wants_its_key(
    s2: S2, basin: S2Basin, cipher: Encryption
) -> None:
    await s2.reconfigure_basin(BASIN, config=BasinConfig(stream_cipher=cipher))
    info = await basin.create_stream("sealed")
    assert info.cipher is cipher
    with pytest.raises(S2ServerError) as refused:
        await basin.stream("sealed").append(AppendInput(records=[Record(body=b"x")]))
    assert refused.value.code == "bad_header"
    assert cipher.value in refused.value.message
