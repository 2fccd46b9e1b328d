"""After storage failures, errors are accurate and the store recovers."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from streamfold._native import FaultyDisk
from streamfold.errors import (
    DeviceFailedError,
    OutcomeUnknownError,
    SeqNumMismatchError,
    StorageError,
    StorageFullError,
    StoreClosingError,
    StoreRecoveringError,
    StreamfoldError,
    WriterFencedError,
)
from streamfold.model.names import StreamRef
from streamfold.model.records import Record
from streamfold.records.batch import RecordBatch
from streamfold.store import supervisor
from streamfold.store.engine.location import open_location
from streamfold.store.engine.slatedb import SlateEngine
from streamfold.store.log.admission import AppendRequest
from streamfold.store.log.shares import AppendAck
from streamfold.store.read.requests import ReadRequest, from_seq_num
from streamfold.store.settings import StoreSettings
from streamfold.store.store import StreamStore, open_store
from streamfold.testing.engine_faults import CommitFault, FaultyEngine
from tests.store.conftest import BASIN, PATIENCE, STREAM, Bench, bodies, submit, until
from tests.store.many_streams import mount_of

EVERYTHING = ReadRequest(from_seq_num(0))


async def read_bodies(store: StreamStore) -> list[bytes]:
    return [record.body for record in (await store.read(BASIN, STREAM, EVERYTHING)).records()]


@pytest.mark.parametrize(
    ("fault", "survives"), [(CommitFault.BEFORE, False), (CommitFault.AFTER, True)]
)
async def test_a_failed_commit_is_reported_as_unknown_and_the_store_continues(
    store: StreamStore, bench: Bench, fault: CommitFault, survives: bool
) -> None:
    await store.append(BASIN, STREAM, bodies("a"))
    bench.engine.fail_next(fault)
    with pytest.raises(OutcomeUnknownError) as caught:
        await store.append(BASIN, STREAM, bodies("b"))
    assert not caught.value.definite
    ack = await store.append(BASIN, STREAM, bodies("c"))
    expected = [b"a", b"b", b"c"] if survives else [b"a", b"c"]
    assert await read_bodies(store) == expected
    assert ack.end.seq_num == len(expected)
    assert len(bench.engines) == 2


@pytest.mark.parametrize("where", ["memory", "local"])
async def test_a_store_whose_storage_fails_again_while_it_is_opened_was_not_taken_over(
    where: str, tmp_path: Path
) -> None:
    """An opening that fails halfway has fenced the one before it, as another process would."""
    location = open_location("memory:" if where == "memory" else tmp_path.as_uri())
    engines: list[FaultyEngine] = []
    failing = 0

    async def opener() -> FaultyEngine:
        nonlocal failing
        engine = FaultyEngine(await SlateEngine.open(location))
        if failing:
            failing -= 1
            await engine.close(flush=False)
            raise StorageError("injected: failed after the opening")
        engines.append(engine)
        return engine

    settings = StoreSettings(fsync=False, recovery_timeout=PATIENCE)
    async with open_store(location, settings, opener=opener) as store:
        await store.create_basin(BASIN)
        await store.create_stream(BASIN, STREAM)
        for _ in range(2):
            failing = 2
            engines[-1].fail_next(CommitFault.BEFORE)
            with pytest.raises(OutcomeUnknownError):
                await store.append(BASIN, STREAM, bodies("a"))
            await store.append(BASIN, STREAM, bodies("b"))
        assert await read_bodies(store) == [b"b", b"b"]


async def test_failures_of_storage_are_counted(store: StreamStore, bench: Bench) -> None:
    assert (store.storage_open, store.storage_failures) == (True, 0)
    bench.engine.fail_next(CommitFault.BEFORE)
    with pytest.raises(OutcomeUnknownError):
        await store.append(BASIN, STREAM, bodies("a"))
    await store.append(BASIN, STREAM, bodies("b"))
    assert (store.storage_open, store.storage_failures) == (True, 1)


async def test_a_commit_without_an_answer_fails_after_its_time(bench: Bench) -> None:
    async with bench.store() as store:
        await store.create_basin(BASIN)
        await store.create_stream(BASIN, STREAM)
        committer = mount_of(store).committer  # every other commit has the time that it needs
        committer._settings = replace(committer._settings, commit_timeout=0.2)
        bench.engine.fail_next(CommitFault.SILENCE)
        with pytest.raises(OutcomeUnknownError, match=r"0\.2 s"):
            await store.append(BASIN, STREAM, bodies("a"))
        await store.append(BASIN, STREAM, bodies("b"))
        assert await read_bodies(store) == [b"b"]


async def test_what_was_never_sent_fails_as_not_done(store: StreamStore, bench: Bench) -> None:
    await store.append(BASIN, STREAM, bodies("a"))
    bench.engine.hold()
    outcomes: list[asyncio.Future[object]] = []
    for text in "bcde":
        outcomes.append(asyncio.ensure_future(await submit(store, bodies(text))))
        for _ in range(5):
            await asyncio.sleep(0)
    bench.engine.fail_next(CommitFault.BEFORE)
    bench.engine.resume()
    results = await asyncio.gather(*outcomes, return_exceptions=True)
    kinds = [type(result) for result in results]
    assert kinds == [OutcomeUnknownError] * 2 + [StoreRecoveringError] * 2  # two were under way
    assert await read_bodies(store) == [b"a"]


async def test_a_refusal_that_rested_on_a_lost_append_becomes_unknown(
    store: StreamStore, bench: Bench
) -> None:
    await store.append(BASIN, STREAM, bodies("a"))
    bench.engine.hold()
    ticket = asyncio.ensure_future(await submit(store, bodies("b")))
    refused = asyncio.create_task(store.append(BASIN, STREAM, bodies("c"), match_seq_num=1))
    for _ in range(5):
        await asyncio.sleep(0)
    bench.engine.fail_next(CommitFault.BEFORE)
    bench.engine.resume()
    results = await asyncio.gather(ticket, refused, return_exceptions=True)
    assert [type(result) for result in results] == [OutcomeUnknownError] * 2
    # And the position that was never durable is free for the next append.
    await store.append(BASIN, STREAM, bodies("c"), match_seq_num=1)
    with pytest.raises(SeqNumMismatchError):
        await store.append(BASIN, STREAM, bodies("d"), match_seq_num=1)


async def test_followers_get_an_error_when_the_mount_they_read_from_is_gone(
    store: StreamStore, bench: Bench
) -> None:
    async with store.follow(BASIN, STREAM, EVERYTHING) as session:
        await session.next()
        following = asyncio.create_task(session.next())
        await asyncio.sleep(0)
        bench.engine.fail_next(CommitFault.BEFORE)
        with pytest.raises(OutcomeUnknownError):
            await store.append(BASIN, STREAM, bodies("a"))
        with pytest.raises(StoreRecoveringError):
            await following
    await store.append(BASIN, STREAM, bodies("b"))
    assert await read_bodies(store) == [b"b"]


async def test_reads_of_storage_that_was_closed_meanwhile_may_be_repeated(tmp_path: Path) -> None:
    """As by a call that took the mount before its storage failed, and reads after it was closed."""
    engine = await SlateEngine.open(open_location(tmp_path.as_uri()))
    await engine.close()
    with pytest.raises(StoreRecoveringError):
        await engine.get(b"key")
    with pytest.raises(StoreRecoveringError):
        await engine.get_many([b"a", b"b"])
    with pytest.raises(StoreRecoveringError):
        await anext(engine.scan(b"a", b"b"))


async def test_a_failed_creation_is_unknown_and_can_be_repeated(
    store: StreamStore, bench: Bench
) -> None:
    for fault in (CommitFault.BEFORE, CommitFault.AFTER):
        bench.engine.fail_next(fault)
        with pytest.raises(OutcomeUnknownError):
            await store.create_stream(BASIN, fault.value, request_token="t")
        await store.create_stream(BASIN, fault.value, request_token="t")
        assert (await store.append(BASIN, fault.value, bodies("a"))).start.seq_num == 0


async def test_closing_waits_until_everything_accepted_is_acknowledged(bench: Bench) -> None:
    async with bench.store() as store:
        await store.create_basin(BASIN)
        await store.create_stream(BASIN, STREAM)
        tickets = [
            asyncio.ensure_future(await submit(store, bodies(str(number)))) for number in range(50)
        ]
    assert all(ticket.done() and ticket.exception() is None for ticket in tickets)
    with pytest.raises(StoreClosingError):
        await store.append(BASIN, STREAM, bodies("late"))
    async with bench.store() as store:
        assert len(await read_bodies(store)) == 50


async def test_a_store_whose_closing_is_given_up_leaves_nothing_running(bench: Bench) -> None:
    closing = asyncio.Event()

    async def use() -> None:
        async with bench.store() as store:
            await store.create_basin(BASIN)
            bench.engine.hold()
            creation = asyncio.create_task(store.create_stream(BASIN, STREAM))
            creation.add_done_callback(lambda done: done.exception())
            await until(bench.engine._order.locked)
            closing.set()

    before = asyncio.all_tasks()
    using = asyncio.create_task(use())
    await closing.wait()
    await asyncio.sleep(0.1)  # it waits for the commit
    using.cancel()
    with pytest.raises(asyncio.CancelledError):
        await using
    await until(lambda: asyncio.all_tasks() == before)
    async with bench.store() as store:
        await store.create_stream(BASIN, STREAM)


async def test_closing_ends_although_storage_is_silent(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_answer(*, flush: bool = True) -> None:
        await asyncio.Event().wait()

    async with asyncio.timeout(60) as limit:
        async with bench.store() as store:
            await store.create_basin(BASIN)
            await store.create_stream(BASIN, STREAM)
            await store.append(BASIN, STREAM, bodies("a"))
            supervisor, engine = store._supervisor, bench.engine
            supervisor._settings = replace(supervisor._settings, commit_timeout=0.2)
            monkeypatch.setattr(engine, "close", no_answer)
    assert not limit.expired()
    async with bench.store() as store:
        assert await read_bodies(store) == [b"a"]
    await engine.inner.close(flush=False)


async def test_closing_lets_go_of_followers(bench: Bench) -> None:
    async with bench.store() as store:
        await store.create_basin(BASIN)
        await store.create_stream(BASIN, STREAM)
        context = store.follow(BASIN, STREAM, EVERYTHING)
        session = await context.__aenter__()
        await session.next()
        following = asyncio.create_task(session.next())
        await asyncio.sleep(0)
    with pytest.raises(StoreClosingError):
        await following
    await context.__aexit__(None, None, None)


async def test_an_exception_in_the_body_comes_out_as_it_is_and_what_was_accepted_is_kept(
    bench: Bench,
) -> None:
    async def fail_in_the_body() -> None:
        async with bench.store() as store:
            await store.create_basin(BASIN)
            await store.create_stream(BASIN, STREAM)
            await submit(store, bodies("a"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail_in_the_body()
    async with bench.store() as store:
        assert await read_bodies(store) == [b"a"]


async def test_every_failure_is_one_of_our_errors(store: StreamStore, bench: Bench) -> None:
    """Under a storm of faults a caller sees StreamfoldErrors alone, and no ack is ever lost."""
    acked: list[bytes] = []

    async def writer(name: str) -> None:
        for number in range(40):
            body = f"{name}-{number}"
            try:
                await store.append(BASIN, STREAM, bodies(body))
            except StreamfoldError:
                continue
            acked.append(body.encode())

    async def saboteur() -> None:
        for fault in (CommitFault.BEFORE, CommitFault.AFTER) * 3:
            await asyncio.sleep(0.01)
            bench.engine.fail_next(fault)

    await asyncio.gather(saboteur(), *(writer(name) for name in "abcd"))
    seen: list[bytes] = []
    async with store.follow(BASIN, STREAM, ReadRequest(from_seq_num(0), count=1000)) as session:
        async for batch in session:
            seen += [record.body for record in batch.records()]
    assert [body for body in seen if body in set(acked)] == acked
    assert len(seen) == len(set(seen))


async def test_a_device_that_fails_to_sync_stops_the_store_for_good(tmp_path: Path) -> None:
    faults = FaultyDisk(tmp_path, 1)
    try:
        async with open_store(tmp_path.as_uri()) as store:
            await store.create_basin(BASIN)
            await store.create_stream(BASIN, STREAM)
            await store.append(BASIN, STREAM, bodies("a"))
            faults.turn(steps=8, number=errno.EIO)
            with pytest.raises(DeviceFailedError, match="cannot sync"):
                await store.append(BASIN, STREAM, bodies("b"))
            faults.turn()  # the device may claim to be well again: it is not believed
            with pytest.raises(DeviceFailedError):
                await store.append(BASIN, STREAM, bodies("c"))
            with pytest.raises(DeviceFailedError):
                await store.read(BASIN, STREAM, EVERYTHING)
    finally:
        faults.close()


async def test_work_that_comes_after_a_session_was_given_up_is_refused_not_left_waiting(
    store: StreamStore,
) -> None:
    mounted = store._supervisor.current
    assert mounted is not None
    mount = mounted.mount
    ref = StreamRef.parse(BASIN, STREAM)
    log = (await mount.lease(ref)).log
    mount.committer.fail(StoreClosingError())
    ack: asyncio.Future[AppendAck] = asyncio.get_running_loop().create_future()
    log.accept(AppendRequest((RecordBatch.of(bodies("late")),)), 0, ack)
    mount.committer.touch(log)
    async with asyncio.timeout(60):
        with pytest.raises(StoreClosingError):
            await ack
        with pytest.raises(StoreClosingError):
            await mount.committer.write([(b"late", b"row")])


async def test_an_error_that_refuses_many_calls_remembers_only_the_last(bench: Bench) -> None:
    """Otherwise all records that were refused would stay in memory with it."""
    async with bench.store() as replaced:
        await replaced.create_basin(BASIN)
        await replaced.create_stream(BASIN, STREAM)
        async with bench.store():
            with pytest.raises(WriterFencedError):
                await replaced.append(BASIN, STREAM, bodies("a"))
            async with asyncio.timeout(60):
                assert isinstance(await replaced.stopped(), WriterFencedError)
            frames = set()
            for _ in range(3):
                with pytest.raises(WriterFencedError) as refused:
                    await replaced.append(BASIN, STREAM, bodies("b"))
                frames.add(len(refused.traceback))
    assert len(frames) == 1


async def test_records_that_a_replaced_writer_could_not_append_leave_memory(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    size = 4 << 20
    # What is logged is the error itself, and pytest would keep it, with all that it is about.
    caplog.set_level(logging.ERROR, "streamfold.store.supervisor")
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        await _replace_while_appending(bench, size)
        async with asyncio.timeout(60):
            while tracemalloc.get_traced_memory()[0] - before >= size:
                await asyncio.sleep(0.05)  # a stream that was just opened is held for a second
                gc.collect()
    finally:
        tracemalloc.stop()


async def _replace_while_appending(bench: Bench, size: int) -> None:
    async with bench.store() as replaced:
        await replaced.create_basin(BASIN)
        await replaced.create_stream(BASIN, STREAM)
        await replaced.append(BASIN, STREAM, bodies("a"))
        async with bench.store():
            each = 1 << 19
            appends = [
                replaced.append(BASIN, STREAM, [Record(bytes(each))]) for _ in range(size // each)
            ]
            outcomes = await asyncio.gather(*appends, return_exceptions=True)
            # A commit that was under way may be of unknown outcome.
            assert {type(o) for o in outcomes} <= {WriterFencedError, OutcomeUnknownError}
    bench.engines.clear()


def test_the_first_of_several_failures_is_the_cause() -> None:
    """Later ones are mostly its consequences: commits behind a failed one fail, too."""
    full = StorageFullError("the disk is full")
    commits = ExceptionGroup("", [full, StorageError("an earlier commit failed")])
    assert supervisor._cause(ExceptionGroup("", [commits, StorageError("upkeep")])) is full
