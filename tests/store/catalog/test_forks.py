"""Forks share their source's records and retain them only as long as needed."""

from __future__ import annotations

import asyncio

import pytest

from streamfold.errors import (
    AlreadyExistsError,
    ContentTypeMismatchError,
    DataCorruptError,
    InvalidError,
    KeyRequiredError,
    PositionTrimmedError,
    StreamForkedError,
    StreamNotFoundError,
)
from streamfold.model.configs import BasinConfig, Cipher
from streamfold.model.records import trim_record
from streamfold.model.resources import Claim, Producer
from streamfold.records.batch import RecordBatch
from streamfold.store import keys
from streamfold.store.log.sealing import SealingKey
from streamfold.store.read.requests import ReadRequest, from_seq_num, from_tail, from_timestamp
from streamfold.store.read.seek import FORK_DEPTH_MAX
from streamfold.store.settings import StoreSettings
from streamfold.store.store import StreamStore
from tests.store.conftest import BASIN, PATIENCE, STREAM, Bench, Clock
from tests.store.durable_streams import (
    append,
    append_to,
    batches,
    create,
    fork_of,
    read,
    spec,
    stamps,
)


async def settle(store: StreamStore) -> None:
    """Background work until nothing is left of it."""
    for _ in range(4):
        await store.upkeep()


async def chunks_of(bench: Bench, stream_id: int) -> list[int]:
    """Last sequence numbers of the chunks that storage has of a stream."""
    span = keys.chunks_start(stream_id), keys.chunks_end(stream_id)
    return [
        keys.chunk_last_seq_num(key) async for page in bench.engine.scan(*span) for key, _ in page
    ]


async def test_a_fork_continues_independently(store: StreamStore) -> None:
    await create(store, "a", b"0", b"1")
    await append(store, "a", b"2")
    status, _ = await create(store, "b", b"own", fork=fork_of("a", 2))
    assert (status.first, status.tail) == (0, 3)
    await append(store, "a", b"3")
    await append(store, "b", b"more")
    assert await read(store, "a") == [b"0", b"1", b"2", b"3"]
    assert await read(store, "b") == [b"0", b"1", b"own", b"more"]
    assert await read(store, "b", 1) == [b"1", b"own", b"more"]


async def test_a_chain_of_three_survives_restarts(bench: Bench) -> None:
    async with bench.store() as store:
        await store.create_basin(BASIN)
        await create(store, "a", b"a0", b"a1", b"a2")
        await create(store, "b", b"b3", fork=fork_of("a"))
        await append(store, "b", b"b4")
        await create(store, "c", b"c4", fork=fork_of("b", 4))
        await create(store, "d", b"d2", fork=fork_of("c", 2))
        await create(store, "e", fork=fork_of("d", 0))
    async with bench.store() as store:
        assert await read(store, "b") == [b"a0", b"a1", b"a2", b"b3", b"b4"]
        assert await read(store, "c") == [b"a0", b"a1", b"a2", b"b3", b"c4"]
        assert await read(store, "d") == [b"a0", b"a1", b"d2"]
        assert await read(store, "e") == []
        for start in range(5):
            assert await read(store, "c", start) == [b"a0", b"a1", b"a2", b"b3", b"c4"][start:]


async def test_sub_offsets_count_bytes_or_records_of_the_next_append(store: StreamStore) -> None:
    await create(store, "a", b"0123", b"45", b"6789")
    await append(store, "a", b"other")
    for sub_offset, expected in ((0, []), (4, [b"0123"]), (5, [b"0123", b"4"])):
        await create(store, f"b{sub_offset}", fork=fork_of("a", 0, sub_offset))
        assert await read(store, f"b{sub_offset}") == expected
    await create(store, "whole", fork=fork_of("a", 0, 10))
    assert await read(store, "whole") == [b"0123", b"45", b"6789"]
    await create(store, "two", fork=fork_of("a", 0, 2, in_records=True))
    assert await read(store, "two") == [b"0123", b"45"]
    for bad in (fork_of("a", 0, 11), fork_of("a", 0, 4, in_records=True), fork_of("a", None, 1)):
        with pytest.raises(InvalidError):
            await create(store, "bad", fork=bad)
    with pytest.raises(StreamNotFoundError):
        await store.stream(BASIN, "bad").status()


async def test_sub_offsets_compose_over_forks_of_forks(store: StreamStore) -> None:
    await create(store, "a", b"01", b"23", b"45")
    await create(store, "b", fork=fork_of("a", 0, 3))
    await append(store, "b", b"own")
    assert await read(store, "b") == [b"01", b"2", b"own"]
    await create(store, "c", fork=fork_of("b", 0, 3))
    assert await read(store, "c") == [b"01", b"2"]
    # What the fork has of the append ends where the fork left: what follows is another append.
    with pytest.raises(InvalidError):
        await create(store, "d", fork=fork_of("b", 0, 4))


async def test_an_append_that_was_cut_between_records_ends_there(store: StreamStore) -> None:
    await create(store, "a", b"01", b"23", b"45")
    await create(store, "b", fork=fork_of("a", 0, 2, in_records=True))
    await append(store, "b", b"own")
    with pytest.raises(InvalidError):
        await create(store, "c", fork=fork_of("b", 0, 3, in_records=True))
    await create(store, "c", fork=fork_of("b", 0, 2, in_records=True))
    assert await read(store, "c") == [b"01", b"23"]


async def test_terms_are_not_inherited_but_type_and_lifetime_are(
    store: StreamStore, clock: Clock
) -> None:
    await create(store, "a", b"0", content_type="application/x", ttl=100)
    claim = Claim("application/x", Producer("p", 3, 0), "z", close=True)
    await append_to(store, "a", claim, batches(b"1"))
    status, _ = await create(store, "b", fork=fork_of("a"))
    assert (status.closed, status.traits.content_type, status.traits.ttl) == (
        False,
        "application/x",
        100,
    )
    claim = Claim("application/x", Producer("p", 0, 0), "a")
    assert not (await append_to(store, "b", claim, batches(b"2"))).repeated
    with pytest.raises(ContentTypeMismatchError):
        await create(store, "c", content_type="text/plain", fork=fork_of("a"))
    explicit, _ = await create(store, "d", ttl=5, fork=fork_of("a"))
    assert explicit.traits.ttl == 5


async def test_a_repeated_fork_is_the_same_and_another_is_refused(store: StreamStore) -> None:
    await create(store, "a", b"0", b"1")
    await create(store, "b", fork=fork_of("a", 1))
    for same in (fork_of("a", 1), fork_of("a")):
        assert (await create(store, "b", fork=same))[1] is False
    for other in (fork_of("a", 2), fork_of("a", 1, 1), None):
        with pytest.raises(AlreadyExistsError):
            await create(store, "b", fork=other)


async def test_a_fork_whose_start_is_trimmed_while_it_is_created_is_refused(
    store: StreamStore,
) -> None:
    await create(store, "a", *[b"%d" % number for number in range(10)])
    begun, trimmed = asyncio.Event(), asyncio.Event()

    async def slow_content(content_type: str) -> list[RecordBatch]:
        begun.set()
        await trimmed.wait()
        return []

    task = asyncio.create_task(create(store, "b", fork=fork_of("a", 5), content=slow_content))
    await begun.wait()
    await store.append(BASIN, "a", [trim_record(9)])
    trimmed.set()
    with pytest.raises(PositionTrimmedError):
        await task
    await create(store, "b", fork=fork_of("a", 9))
    await append(store, "b", b"own")
    assert await read(store, "b", 9) == [b"own"]


async def test_a_fork_whose_source_lost_records_is_reported_as_corrupt(bench: Bench) -> None:
    settings = StoreSettings(trim_grace=0, recent_bytes=0)
    async with bench.store(settings) as store:
        await store.create_basin(BASIN)
        source, _ = await create(store, "a")
        for number in range(4):
            await append(store, "a", b"%d" % number)
        await create(store, "b", b"own", fork=fork_of("a", 2))
        lost = bench.engine.prepare([(keys.chunk(source.id, number), None) for number in (0, 1)])
        await bench.engine.commit(lost)
        with pytest.raises(DataCorruptError, match=r"records 0 to 1 .* missing"):
            async with asyncio.timeout(PATIENCE):  # it must not look for them without end
                await read(store, "b")


async def test_a_trim_of_the_source_keeps_what_forks_need(bench: Bench) -> None:
    async with bench.store() as store:
        await store.create_basin(BASIN)
        source, _ = await create(store, "a", b"0")
        for number in range(1, 6):
            await append(store, "a", b"%d" % number)
        await create(store, "b", b"own", fork=fork_of("a", 3))
        await store.append(BASIN, "a", [trim_record(6)])
        await settle(store)
        with pytest.raises(PositionTrimmedError):
            await read(store, "a")
        assert await read(store, "b") == [b"0", b"1", b"2", b"own"]
    async with bench.store() as store:
        await settle(store)
        assert await read(store, "b") == [b"0", b"1", b"2", b"own"]
        with pytest.raises(PositionTrimmedError):  # nor can what is trimmed be forked
            await create(store, "c", fork=fork_of("a", 2))
        await store.append(BASIN, "b", [trim_record(2)])
        await settle(store)
        assert (await chunks_of(bench, source.id))[0] == 2
        await store.stream(BASIN, "b").delete()
        await settle(store)
        assert await chunks_of(bench, source.id) == [6]  # the trim itself


async def test_a_fork_of_a_trimmed_stream_begins_where_that_does(store: StreamStore) -> None:
    await create(store, "a", b"0")
    await append(store, "a", b"1")
    await store.append(BASIN, "a", [trim_record(1)])
    status, _ = await create(store, "b", fork=fork_of("a", 2))
    assert (status.first, status.tail) == (1, 2)
    assert await read(store, "b", 1) == [b"1"]
    with pytest.raises(PositionTrimmedError):
        await read(store, "b", 0)


async def test_deletion_cascades_once_the_last_fork_is_gone(bench: Bench) -> None:
    async with bench.store() as store:
        await store.create_basin(BASIN)
        ids = {}
        for name, source in (("a", None), ("b", "a"), ("c", "b"), ("d", "c")):
            fork = fork_of(source) if source else None
            status, _ = await create(store, name, name.encode(), fork=fork)
            ids[name] = status.id
        for name in "bac":
            await store.stream(BASIN, name).delete()
            await settle(store)
            with pytest.raises(StreamForkedError):
                await store.stream(BASIN, name).status()
            with pytest.raises(StreamForkedError):
                await create(store, name)
            with pytest.raises(StreamForkedError):
                await create(store, "new", fork=fork_of(name))
    async with bench.store() as store:
        assert await read(store, "d") == [b"a", b"b", b"c", b"d"]
        await store.stream(BASIN, "d").delete()
        await settle(store)
        for name, stream_id in ids.items():
            with pytest.raises(StreamNotFoundError):
                await store.stream(BASIN, name).status()
            assert await chunks_of(bench, stream_id) == []
        assert (await store.list_streams(BASIN)).items == ()
        rows = [key async for page in bench.engine.scan(b"\x0b", b"\x0e") for key, _ in page]
        assert rows == []


async def test_a_source_that_was_never_deleted_outlives_its_forks(store: StreamStore) -> None:
    await create(store, "a", b"0")
    await create(store, "b", fork=fork_of("a"))
    await store.stream(BASIN, "b").delete()
    await settle(store)
    assert await read(store, "a") == [b"0"]


async def test_an_expired_source_is_kept_for_its_forks(store: StreamStore, clock: Clock) -> None:
    await create(store, "a", b"0", ttl=10)
    await create(store, "b", b"1", ttl=1000, fork=fork_of("a"))
    clock.pass_seconds(11)
    await settle(store)
    with pytest.raises((StreamForkedError, StreamNotFoundError)):
        await store.stream(BASIN, "a").status()
    assert await read(store, "b") == [b"0", b"1"]
    clock.pass_seconds(1000)
    await settle(store)
    for name in "ab":
        with pytest.raises(StreamNotFoundError):
            await store.stream(BASIN, name).status()
    assert {item.name for item in (await store.list_streams(BASIN)).items} == {STREAM}


async def test_timestamps_never_decrease_in_a_fork(bench: Bench, clock: Clock) -> None:
    async with bench.store() as store:
        await store.create_basin(BASIN)
        await create(store, "a", b"0")
        clock.pass_seconds(10)
        await append(store, "a", b"1", b"2")
        clock.now -= 60_000  # a clock that goes back
        await create(store, "b", b"own", fork=fork_of("a", 1, 1))
        await create(store, "c", b"own", fork=fork_of("a"))
    async with bench.store() as store:
        for name in "bc":
            await append(store, name, b"later")
            found = list(await stamps(store, name))
            assert found == sorted(found)


async def test_s2_reads_a_fork_by_time_and_from_its_tail(bench: Bench, clock: Clock) -> None:
    async with bench.store() as store:
        await store.create_basin(BASIN)
        began = clock.now
        await create(store, "a", b"0")
        for number in range(1, 6):
            clock.pass_seconds(10)
            await append(store, "a", b"%d" % number)
        await create(store, "b", fork=fork_of("a", 4))
        clock.pass_seconds(10)
        await append(store, "b", b"own")
    async with bench.store() as store:

        async def bodies(request: ReadRequest) -> list[bytes]:
            return [record.body for record in (await store.read(BASIN, "b", request)).records()]

        everything = [b"0", b"1", b"2", b"3", b"own"]
        for seq_num in range(5):
            assert await bodies(ReadRequest(from_seq_num(seq_num))) == everything[seq_num:]
            assert await bodies(ReadRequest(from_tail(5 - seq_num))) == everything[seq_num:]
        for seconds, expected in ((0, 0), (5, 1), (10, 1), (25, 3), (30, 3), (31, 4)):
            request = ReadRequest(from_timestamp(began + seconds * 1000))
            assert await bodies(request) == everything[expected:]


async def test_forks_in_an_encrypted_basin_need_the_key(bench: Bench) -> None:
    key, other = SealingKey(bytes(range(32))), SealingKey(bytes(32))
    async with bench.store() as store:
        await store.create_basin(BASIN, BasinConfig(stream_cipher=Cipher.AEGIS_256))
        await create(store, "a", b"0123", key=key)
        await append(store, "a", b"4567", key=key)
        with pytest.raises(KeyRequiredError):
            await create(store, "b", fork=fork_of("a", 1, 2))
        await create(store, "b", b"own", fork=fork_of("a", 1, 2), key=key)
        await create(store, "c", b"mine", fork=fork_of("a"), key=other)
    async with bench.store() as store:
        assert await read(store, "b", key=key) == [b"0123", b"45", b"own"]
        assert await read(store, "c", 2, key=other) == [b"mine"]


async def test_forks_and_deletions_of_their_source_do_not_race(bench: Bench) -> None:
    async with bench.store() as store:
        await store.create_basin(BASIN)
        for round_ in range(10):
            await create(store, f"a{round_}", b"0")
            outcomes = await asyncio.gather(
                store.stream(BASIN, f"b{round_}").create(spec(fork=fork_of(f"a{round_}"))),
                store.stream(BASIN, f"a{round_}").delete(),
                store.stream(BASIN, f"c{round_}").create(spec(fork=fork_of(f"a{round_}"))),
                return_exceptions=True,
            )
            await settle(store)
            for name, outcome in ((f"b{round_}", outcomes[0]), (f"c{round_}", outcomes[2])):
                if isinstance(outcome, BaseException):
                    assert isinstance(outcome, StreamNotFoundError | StreamForkedError), outcome
                else:
                    assert await read(store, name) == [b"0"]


async def test_a_chain_of_forks_has_an_end(store: StreamStore) -> None:
    """Each fork's row names all streams that it reads: without a limit, they grow with the square."""
    await create(store, "fork-0", b"0")
    for depth in range(1, FORK_DEPTH_MAX + 1):
        await create(store, f"fork-{depth}", b"%d" % depth, fork=fork_of(f"fork-{depth - 1}"))
    with pytest.raises(InvalidError, match=r"records of 65 streams.*64 is the most; copy"):
        await create(store, "too-deep", b"x", fork=fork_of(f"fork-{FORK_DEPTH_MAX}"))
    assert await read(store, f"fork-{FORK_DEPTH_MAX}") == [
        b"%d" % depth for depth in range(FORK_DEPTH_MAX + 1)
    ]
    await create(store, "beside", b"x", fork=fork_of(f"fork-{FORK_DEPTH_MAX}", 3))
    assert await read(store, "beside") == [b"0", b"1", b"2", b"x"]
