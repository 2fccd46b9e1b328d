"""Plans, tasks and lanes of the query, without Spark: hanging work delays nobody else."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from streamfold.snapshotter.spark.driver_loop import DriverLoop
from streamfold.snapshotter.spark.lanes import Lane
from streamfold.snapshotter.spark.plans import Plan, PlanReader, PlanServer, TaskPartition
from streamfold.snapshotter.spark.query import _Ticket, first_that_fit, pack
from streamfold.snapshotter.spark.tasks.batch import (
    _AT_ONCE,
    STALL_SECONDS,
    TableSlowError,
    TableWork,
    _side_by_side,
)
from streamfold.snapshotter.spark.tasks.intake import ReadPosition, TableState
from streamfold.snapshotter.transactions import TransactionLimits, TransactionWait
from streamfold.spark.errors import StreamReplacedError
from tests.spark.server import Server
from tests.spark.snapshotter.feeding import envelope, feed
from tests.spark.snapshotter.stepping import Table
from tests.spark.snapshotter.tables import table_job, table_schema
from tests.spark.snapshotter.waiting import TIMEOUT


@pytest.fixture
def work(server: Server, tmp_path: Path) -> Callable[[str, int, int], TableWork]:
    def make(table: str, start: int, end: int) -> TableWork:
        job = table_job(server, f"stream-{table}", tmp_path / table, table=table)
        read = ReadPosition(TransactionWait(TransactionLimits()))
        return TableWork(TableState(job, table_schema(), read, now=0.0), start, end)

    return make


Work = Callable[[str, int, int], TableWork]


def sizes(tasks: Sequence[Sequence[object]]) -> list[int]:
    return [len(task) for task in tasks]


def test_small_ranges_of_several_tables_share_one_task(work: Work) -> None:
    works = [work(f"t{n}", 0, 100) for n in range(20)]
    assert sizes(pack(works, 4)) == [20]


def test_large_ranges_get_tasks_of_similar_size(work: Work) -> None:
    works = [work("a", 0, 60_000), work("b", 0, 30_000), work("c", 0, 30_000), work("d", 0, 10)]
    tasks = pack(works, 2)
    assert sizes(tasks) == [2, 2]
    assert {TableWork.unpack(task[0]).table for task in tasks} == {"a", "b"}


def test_a_task_has_room_for_so_many_tables(work: Work) -> None:
    assert sizes(pack([work(f"t{n}", 0, 1) for n in range(40)], 4)) == [20, 20]


def test_every_task_of_a_batch_may_have_one_large_range(work: Work) -> None:
    works = [work(f"t{n}", 0, 100_000) for n in range(5)]
    chosen = [ticket.work for ticket in first_that_fit([_Ticket(work) for work in works], 2)]
    assert chosen == works[:2]
    assert sizes(pack(chosen, 2)) == [1, 1]


def test_a_plan_reaches_the_source_and_becomes_its_partitions_and_offsets(work: Work) -> None:
    works = [work("a", 5, 9), work("b", 0, 3)]
    plan = Plan(1, pack(works, 1), {"a": 9, "b": 3}, {"a": 12, "b": 3})
    asked: list[int] = []

    def next_plan(number: int) -> Plan | None:
        asked.append(number)
        return plan if number == 0 else None

    server = PlanServer(next_plan)
    options = server.__enter__()
    reader = PlanReader(options["socket"])
    try:
        start = reader.initialOffset()
        end = reader.latestOffset(start, None)
        assert end == {"plan": 1, "records": {"a": 9, "b": 3}}
        assert reader.reportLatestOffset() == {"plan": 1, "records": {"a": 12, "b": 3}}
        (partition,) = reader.partitions(start, end)
        assert isinstance(partition, TaskPartition)
        arrived = map(TableWork.unpack, partition.works)
        assert {w.table: (w.start, w.end) for w in arrived} == {"a": (5, 9), "b": (0, 3)}
        assert reader.latestOffset(end, None) == end
        assert asked == [0, 1]
        assert pickle.dumps(reader)  # as for a task
    finally:
        reader.stop()
        server.__exit__()


def test_the_socket_for_plans_is_its_user_s_alone_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("long" * 20)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    server = PlanServer(lambda number: Plan(number + 1, ()))
    folder = Path(server.__enter__()["socket"]).parent
    try:
        assert folder.stat().st_mode & 0o077 == 0
        reader = PlanReader(f"{folder}/plans")
        assert reader.latestOffset(reader.initialOffset(), None)["plan"] == 1
        reader.stop()
    finally:
        server.__exit__()
    assert not folder.exists()


def test_a_table_that_hangs_in_a_task_leaves_it_and_the_others_have_their_results() -> None:
    gate = threading.Event()
    hanging = {f"hanging-{n}": lambda: gate.wait(TIMEOUT) for n in range(_AT_ONCE)}
    calls: dict[str, Callable[[], object]] = {**hanging, **{f"t{n}": lambda: 7 for n in range(9)}}
    try:
        results = dict(_side_by_side(calls))
    finally:
        gate.set()
    assert {name for name, result in results.items() if result == 7} == {f"t{n}" for n in range(9)}
    assert all(isinstance(results[name], TableSlowError) for name in hanging)


def test_a_task_that_computes_is_waited_for() -> None:
    def compute() -> int:
        end = time.monotonic() + STALL_SECONDS * 1.2
        while time.monotonic() < end:
            pass
        return 7

    assert dict(_side_by_side({"busy": compute})) == {"busy": 7}


def test_one_destination_that_hangs_never_has_all_places_of_a_lane() -> None:
    gate = threading.Event()

    async def run() -> None:
        lane = Lane(2, "test")
        try:
            assert await lane.run("fine", lambda: 1) == 1
            hanging = [asyncio.create_task(lane.run("hangs", gate.wait)) for _ in range(3)]
            async with asyncio.timeout(TIMEOUT):
                assert await lane.run("fine", lambda: 2) == 2
            gate.set()
            assert await asyncio.gather(*hanging) == [True] * 3
        finally:
            gate.set()
            lane.close()

    asyncio.run(run())


def test_a_released_transaction_is_read_whole_and_other_ranges_as_much_as_fits(
    server: Server, fresh: Callable[[], str], tmp_path: Path
) -> None:
    stream, name = fresh(), "x" * 900_000
    for number in range(10):
        feed(server, stream, [envelope("c", after={"id": number, "name": name})])
    job = table_job(server, stream, tmp_path)
    read = ReadPosition(TransactionWait(TransactionLimits()))
    work = TableWork(TableState(job, table_schema(), read, now=0.0), 0, 10)
    assert sum(map(len, work.read(most_bytes=1))) < 10
    released = replace(work, state=replace(work.state, releases=True))
    assert sum(map(len, released.read(most_bytes=1))) == 10


def test_records_are_read_only_from_the_stream_that_the_archive_was_made_from(
    server: Server, fresh: Callable[[], str], tmp_path: Path, loop: DriverLoop
) -> None:
    stream, other, large = fresh(), fresh(), "x" * 900_000
    first = [envelope("c", after={"id": 0, "name": large}), envelope("d", {"id": 0})]
    feed(server, stream, first)
    table = Table(table_job(server, stream, tmp_path), loop)
    table.take_in()
    feed(server, stream, [envelope("c", after={"id": number}) for number in range(3)])
    feed(server, other, [envelope("c", after={"id": number}) for number in range(5)])

    def numbers(work: TableWork) -> list[int]:
        return [n for batch in work.read(most_bytes=1) for n in batch["seq_num"].to_pylist()]

    work = table.work(2, 5)
    assert numbers(work) == [2, 3, 4]
    job = replace(work.state.job, stream=other)
    with pytest.raises(StreamReplacedError, match="created anew"):
        numbers(replace(work, state=replace(work.state, job=job)))
    server.trim(stream, 2)  # which proves nothing about the stream
    assert numbers(work) == [2, 3, 4]
