from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from streamfold.blob import BlobStore, open_blob_store
from streamfold.errors import InvalidError, StreamfoldError, UnauthenticatedError
from streamfold.follow import (
    HistoryTrimmedError,
    MemoryStream,
    MsgpackCodec,
    Placement,
    SnapshotAheadError,
    SnapshotCorruptError,
    SnapshotUnsupportedError,
    auto,
    external,
    follow,
    in_stream,
)
from streamfold.follow.clients.client import StreamRecord
from streamfold.follow.encoding.container import BLOCK_BYTES, Description, pack
from streamfold.follow.follower import Follower
from streamfold.follow.restore.replay import FoldSpec
from streamfold.follow.snapshots.taker import Outcome, RetentionRules
from streamfold.model.records import Header, Record, trim_record
from tests.follow.ledger import EAGER, SMALL, Ledger, State, Watched, fold, initial


async def test_an_empty_stream_restores_to_the_initial_state(ledger: Ledger) -> None:
    assert await ledger.restored() == []


async def test_a_record_nested_too_deeply_to_be_a_snapshot_is_given_to_the_fold(
    ledger: Ledger,
) -> None:
    deep = b'{"type":"snapshot","covers_before":0,"state":%b}' % (b"[" * 100_000 + b"]" * 100_000)
    await ledger.stream.append([Record(deep)])
    assert await ledger.restored() == [deep.decode()]


async def test_without_a_snapshot_everything_is_replayed(ledger: Ledger) -> None:
    await ledger.add(1000)
    await ledger.add(500)
    async with ledger.follow() as state:
        assert state.value["seen"] == ledger.expected
        assert (state.cursor, state.plan.records) == (1500, 1500)


async def test_an_external_snapshot_is_loaded_and_read_on_from(
    ledger: Ledger, blobs: BlobStore
) -> None:
    await ledger.add(100)
    snapshots = external(blobs, prefix="orders")
    async with ledger.taker(snapshots) as taker:
        taken = await taker.take()
    assert (taken.outcome, taken.cursor, taken.placement) == (
        Outcome.TAKEN,
        100,
        Placement.EXTERNAL,
    )
    assert [meta.key async for meta in blobs.list()] == ["orders/00000000000000000100.json"]
    await ledger.add(5)
    async with ledger.follow(snapshots) as state:
        assert state.value["seen"] == ledger.expected
        assert (state.plan.read_from, state.plan.records) == (100, 5)
        assert "load    external snapshot orders/00000000000000000100.json" in str(state.plan)
        assert "replay  5 records from 100" in str(state.plan)


async def test_a_single_record_snapshot_becomes_the_head(ledger: Ledger) -> None:
    await ledger.add(10)
    async with ledger.taker(in_stream()) as taker:
        assert (await taker.take()).placement is Placement.RECORD
    assert [record.seq_num for record in await ledger.stream.peek(0, 10)] == [11]
    await ledger.add(2)
    async with ledger.follow() as state:
        assert state.value["seen"] == ledger.expected
        assert state.plan.snapshot is not None
        assert (state.plan.snapshot.placement, state.plan.snapshot.cursor) == (Placement.RECORD, 10)
        assert state.cursor == 14


async def test_a_framed_snapshot_restores_with_the_deltas_between_its_frames() -> None:
    ledger = Ledger()
    await ledger.add(30)
    watched = Watched(ledger.stream)

    async def interleave(number: int) -> None:
        if number:
            await ledger.add(2)

    watched.before = interleave
    async with ledger.taker(in_stream(), watched, sizes=SMALL) as taker:
        assert (await taker.take()).placement is Placement.FRAMED
    head = (await ledger.stream.peek(0, 1))[0]
    assert head.seq_num == 30
    assert len(ledger.expected) > 36
    async with ledger.follow() as state:
        assert state.value["seen"] == ledger.expected
        assert state.plan.snapshot is not None
        assert state.plan.snapshot.placement is Placement.FRAMED


async def test_deltas_between_frames_beyond_the_buffer_are_read_again() -> None:
    ledger = Ledger()
    await ledger.add(30)
    watched = Watched(ledger.stream)
    watched.before = lambda number: ledger.add(3) if number else asyncio.sleep(0)
    async with ledger.taker(in_stream(), watched, sizes=SMALL) as taker:
        await taker.take()
    await ledger.add(3)
    tiny = Follower(
        ledger.stream, FoldSpec(fold, initial), in_stream(), backoff=EAGER, buffer_bytes=4
    )
    async with tiny as state:
        assert state.value["seen"] == ledger.expected


async def test_a_trimmed_stream_without_a_snapshot_says_so(ledger: Ledger) -> None:
    await ledger.add(5)
    await ledger.stream.append([trim_record(3)])
    with pytest.raises(HistoryTrimmedError, match="before 3 are gone, trimmed or older"):
        await ledger.restored()


async def test_a_reader_that_meets_a_trimmed_start_switches_to_the_snapshot(
    ledger: Ledger, blobs: BlobStore
) -> None:
    await ledger.add(20)
    async with ledger.taker(external(blobs), keeping=RetentionRules(trim=True)) as taker:
        await taker.take()
    assert (await ledger.stream.peek(0, 1))[0].seq_num == 20
    await ledger.add(3)
    assert await ledger.restored(external(blobs)) == ledger.expected


@pytest.mark.parametrize("kind", ["external", "record", "framed"])
async def test_a_follower_that_is_overtaken_by_a_trim_jumps_to_the_snapshot(
    ledger: Ledger, blobs: BlobStore, kind: str
) -> None:
    snapshots = external(blobs) if kind == "external" else in_stream()
    sizes = SMALL if kind == "framed" else None
    await ledger.add(5)
    async with ledger.follow(snapshots) as state:
        await ledger.add(20)
        keeping = RetentionRules(trim=True)
        async with ledger.taker(snapshots, keeping=keeping, sizes=sizes) as taker:
            await taker.take()
        await ledger.add(1)
        change = await anext(state)
        assert change.restored
        assert state.value["seen"] == ledger.expected
        await ledger.add(1)
        assert (await anext(state)).body == ledger.expected[-1].encode()


async def test_a_follower_whose_restore_after_a_trim_was_cancelled_restores_again(
    ledger: Ledger, blobs: BlobStore
) -> None:
    class Slow(Watched):
        slow = False

        async def check_tail(self) -> Any:
            if self.slow:
                reached.set()
                await asyncio.Event().wait()
            return await super().check_tail()

    reached = asyncio.Event()
    await ledger.add(5)
    stream = Slow(ledger.stream)
    async with ledger.follow(external(blobs), stream) as state:
        await ledger.add(20)
        async with ledger.taker(external(blobs), keeping=RetentionRules(trim=True)) as taker:
            await taker.take()
        stream.slow = True
        waiting = asyncio.ensure_future(anext(state))
        async with asyncio.timeout(60):
            await reached.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        stream.slow = False
        assert (await anext(state)).restored
        assert state.value["seen"] == ledger.expected


async def test_a_snapshot_newer_than_the_tail_is_refused(ledger: Ledger, blobs: BlobStore) -> None:
    await ledger.add(50)
    async with ledger.taker(external(blobs)) as taker:
        await taker.take()
    again = Ledger(MemoryStream())
    await again.add(3)
    with pytest.raises(SnapshotAheadError, match=r"50.*tail is 3.*created again"):
        await again.restored(external(blobs))


async def test_a_follower_of_a_stream_that_was_recreated_gets_an_error(ledger: Ledger) -> None:
    await ledger.add(50)
    watched = Watched(ledger.stream)
    async with ledger.follow(stream=watched) as state:
        watched.inner = MemoryStream()
        assert state._feed is not None
        await state._feed.seek(state.cursor)  # as after a disconnect
        with pytest.raises(SnapshotAheadError, match="tail is 0"):
            await anext(state)


async def test_a_follower_that_failed_does_not_end_silently_when_it_is_asked_again(
    ledger: Ledger,
) -> None:
    watched = Watched(ledger.stream)
    async with ledger.follow(stream=watched) as state:

        async def refuse(seq_num: int) -> AsyncGenerator[Sequence[StreamRecord]]:
            raise UnauthenticatedError("the token is revoked")
            yield []

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(watched, "read", refuse)
            for _ in range(2):
                with pytest.raises(UnauthenticatedError):
                    async for _change in state:
                        pass
        await ledger.add(1)
        assert (await anext(state)).body == b"0"


def corrupt(blob: bytes) -> bytes:
    return blob[:-1] + b"?"


def truncate(blob: bytes) -> bytes:
    return blob[:-3]


def behead(blob: bytes) -> bytes:
    return blob[: BLOCK_BYTES - 5]


def garble(blob: bytes) -> bytes:
    return b"\xff" * len(blob)


def blot(blob: bytes) -> bytes:
    return blob.replace(b'"id":"', b'"id":"\xff')[: len(blob)]


def age(blob: bytes) -> bytes:
    return blob.replace(b'"version":1', b'"version":9')


def mislabel(blob: bytes) -> bytes:
    return pack([b"{}"], Description.of("x", 3, "json", 0))


def undecodable(blob: bytes) -> bytes:
    return pack([b"{nonsense"], Description.of("x", 20, "json", 0))


SPOILT = [
    (corrupt, SnapshotCorruptError, "digest"),
    (truncate, SnapshotCorruptError, "should have"),
    (behead, SnapshotCorruptError, "ends after 507 bytes"),
    (garble, SnapshotCorruptError, "does not begin with a description"),
    (blot, SnapshotCorruptError, "description is incomplete"),
    (age, SnapshotUnsupportedError, "version is 9"),
    (mislabel, SnapshotCorruptError, "cursor is 3"),
    (undecodable, SnapshotCorruptError, "cannot decode"),
]


async def test_snapshots_are_outside_in_a_folder_named_by_its_path(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    await ledger.add(10)
    async with ledger.taker(external("snapshots/orders")) as taker:
        await taker.take()
    assert (tmp_path / "snapshots/orders/00000000000000000010.json").is_file()
    for place in (Path("snapshots/orders"), (tmp_path / "snapshots/orders").as_uri()):
        async with ledger.follow(external(place)) as state:
            assert (state.value["seen"], state.plan.records) == (ledger.expected, 0)


async def test_an_error_of_a_fold_names_the_stream_and_the_record(ledger: Ledger) -> None:
    await ledger.add(10)

    def fail(state: State, record: StreamRecord) -> State:
        if record.seq_num == 7:
            raise KeyError("colour")
        return fold(state, record)

    def fail_together(state: State, records: Sequence[StreamRecord]) -> State:
        raise KeyError("colour")

    def forget(state: State, record: StreamRecord) -> State:
        fold(state, record)
        return None  # type: ignore[return-value]  # as folds without annotations may

    name = ledger.stream.name
    together = follow(ledger.stream, fold=fold, initial=initial, fold_batch=fail_together)
    for follower, kind, note in (
        (follow(ledger.stream, fold=fail, initial=initial), KeyError, f"record 7 of {name}"),
        (together, KeyError, f"records 0 to 9 of {name}"),
        (follow(ledger.stream, fold=forget, initial=initial), InvalidError, f"record 0 of {name}"),
    ):
        with pytest.raises(kind) as failure:
            async with follower:
                pass
        assert failure.value.__notes__ == [f"while folding {note}"]


async def test_a_fold_whose_state_begins_as_none_may_return_none(ledger: Ledger) -> None:
    await ledger.add(3)

    def nothing(state: str | None, record: StreamRecord) -> str | None:
        return None if record.seq_num == 2 else "something"

    def no_state() -> str | None:
        return None

    async with follow(ledger.stream, fold=nothing, initial=no_state) as state:
        assert (state.value, state.cursor) == (None, 3)


async def test_a_plan_says_why_it_looks_for_no_snapshot_in_the_stream(ledger: Ledger) -> None:
    reason = "replaying 900 records is cheaper than searching them"
    await ledger.add(900)
    async with ledger.follow(in_stream(trim=False)) as state:
        assert reason in str(state.plan)
    async with ledger.follow(external("memory:")) as state:
        assert "cheaper" not in str(state.plan)
    await ledger.add(600)
    async with ledger.follow(in_stream(trim=False)) as state:
        assert "cheaper" not in str(state.plan)


@pytest.mark.parametrize(("spoil", "error", "text"), SPOILT)
async def test_an_unusable_snapshot_is_named_and_the_previous_one_used(
    ledger: Ledger,
    blobs: BlobStore,
    spoil: Callable[[bytes], bytes],
    error: type[StreamfoldError],
    text: str,
) -> None:
    snapshots = external(blobs)
    for _ in range(2):
        await ledger.add(10)
        async with ledger.taker(snapshots) as taker:
            await taker.take()
    await ledger.add(1)
    newest = "00000000000000000020.json"
    await blobs.put(newest, spoil(await blobs.get(newest)))
    async with ledger.follow(snapshots) as state:
        assert state.value["seen"] == ledger.expected
        assert state.plan.read_from == 10
        (skipped,) = state.plan.skipped
        assert isinstance(skipped.error, error)
        assert newest in str(skipped.error)
        assert text in str(skipped.error)
        assert f"skipped snapshot {newest}" in str(state.plan)


@pytest.mark.parametrize(("spoil", "error", "text"), SPOILT)
async def test_an_unusable_snapshot_without_another_is_an_error_that_names_it(
    ledger: Ledger,
    blobs: BlobStore,
    spoil: Callable[[bytes], bytes],
    error: type[StreamfoldError],
    text: str,
) -> None:
    await ledger.add(20)
    async with ledger.taker(external(blobs), keeping=RetentionRules(trim=True)) as taker:
        await taker.take()
    newest = "00000000000000000020.json"
    await blobs.put(newest, spoil(await blobs.get(newest)))
    with pytest.raises(error, match=text) as caught:
        await ledger.restored(external(blobs))
    assert newest in str(caught.value)


async def test_a_snapshot_of_another_codec_is_not_misread(ledger: Ledger, blobs: BlobStore) -> None:
    await ledger.add(20)
    async with ledger.taker(
        external(blobs, codec=MsgpackCodec()), keeping=RetentionRules(trim=True)
    ) as taker:
        await taker.take()
    with pytest.raises(SnapshotUnsupportedError, match="codec msgpack, this reader has json"):
        await ledger.restored(external(blobs))


HEADERS = {
    "version": (b"streamfold-version", b"7", SnapshotUnsupportedError, "version is 7"),
    "digest": (b"streamfold-sha256", b"0" * 64, SnapshotCorruptError, "digest"),
    "bytes": (b"streamfold-bytes", b"5", SnapshotCorruptError, "should have"),
    "index": (b"streamfold-index", b"-1", SnapshotCorruptError, "not a number"),
    "cursor": (b"streamfold-covers-before", b"4", SnapshotCorruptError, "covers records before 4"),
    "codec": (b"streamfold-codec", b"avro", SnapshotUnsupportedError, "codec avro"),
}


@pytest.mark.parametrize("what", HEADERS)
async def test_an_unusable_snapshot_in_the_stream_is_an_error_that_names_it(
    ledger: Ledger, what: str
) -> None:
    name, value, error, text = HEADERS[what]
    await ledger.add(10)
    scratch = Ledger()
    await scratch.add(10)
    async with scratch.taker(in_stream(), new_id=lambda: "the-id") as taker:
        await taker.take()
    (good,) = await scratch.stream.peek(0, 1)
    headers = tuple(Header(key, value if key == name else old) for key, old in good.headers)
    await ledger.stream.append([trim_record(11), Record(good.body, headers)])
    await ledger.add(3)
    with pytest.raises(error, match=text) as caught:
        await ledger.restored()
    assert "the-id in the stream at 11" in str(caught.value)
    # An external snapshot still has the records before it, so the reader continues from there.
    blobs = open_blob_store("memory:")
    state = b'{"seen":[%s]}' % b",".join(b'"%d"' % number for number in range(10))
    old = pack([state], Description.of("old", 11, "json", 0))
    await blobs.put("00000000000000000011.json", old)
    assert await ledger.restored(auto(blobs)) == ledger.expected


async def test_the_newer_of_two_snapshot_stores_wins(ledger: Ledger, blobs: BlobStore) -> None:
    await ledger.add(10)
    async with ledger.taker(in_stream()) as taker:
        await taker.take()
    await ledger.add(10)
    async with ledger.taker(external(blobs)) as taker:
        await taker.take()
    async with ledger.follow(external(blobs)) as state:
        assert state.value["seen"] == ledger.expected
        assert state.plan.snapshot is not None
        assert state.plan.snapshot.placement is Placement.EXTERNAL
    await ledger.add(10)
    async with ledger.taker(in_stream()) as taker:
        await taker.take()
    async with ledger.follow(external(blobs)) as state:
        assert state.value["seen"] == ledger.expected
        assert state.plan.snapshot is not None
        assert state.plan.snapshot.placement is Placement.RECORD


async def test_a_follower_at_the_tail_does_not_jump_when_a_snapshot_is_taken(
    ledger: Ledger,
) -> None:
    await ledger.add(5)
    async with ledger.follow() as state:
        async with ledger.taker(in_stream()) as taker:
            await taker.take()
        await ledger.add(1)
        change = await anext(state)
        assert (change.restored, change.body) == (False, b"5")
        assert state.value["seen"] == ledger.expected


async def test_first_records_that_come_while_it_looks_are_not_taken_for_the_rest_of_a_trim() -> (
    None
):
    class Late(MemoryStream):
        """A stream that gets its first records just after it was found empty."""

        async def peek(self, seq_num: int, count: int) -> Sequence[StreamRecord]:
            found = await super().peek(seq_num, count)
            if not found:
                await self.append([Record(b"0"), Record(b"1")])
            return found

    assert await Ledger(Late()).restored() == ["0", "1"]


async def test_a_previous_snapshot_that_the_stream_does_not_continue_is_not_used(
    ledger: Ledger, blobs: BlobStore
) -> None:
    snapshots = external(blobs)
    for _ in range(2):
        await ledger.add(10)
        async with ledger.taker(snapshots, keeping=RetentionRules(trim=True)) as taker:
            await taker.take()
    newest = "00000000000000000021.json"
    await blobs.put(newest, corrupt(await blobs.get(newest)))
    with pytest.raises(SnapshotCorruptError, match=newest):
        await ledger.restored(snapshots)
