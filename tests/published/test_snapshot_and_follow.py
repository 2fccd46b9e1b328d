"""The published examples of snapshot and follow, as they are written, against a real server."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from s2_sdk import AppendInput, CommandRecord, Record, SeqNum, SeqNumMismatchError
from s2_sdk import S2Stream as Stream

from streamfold.follow import Outcome, SnapshotTaker, external, follow, in_stream
from streamfold.follow.clients.client import StreamRecord
from streamfold.server.config import Configuration
from streamfold.server.main import running_server
from tests.sdk import sdk_client

BASIN, STREAM = "orders-basin", "orders"


@pytest.fixture
async def stream() -> AsyncIterator[Stream]:
    """A stream with the records 0 to 999, on a server in memory."""
    configuration = Configuration(
        host="127.0.0.1", port=0, access_log=False, drain_timeout=1.0, linger=0.0
    )
    async with running_server(configuration) as server:
        endpoint = f"http://127.0.0.1:{server.port}"
        async with sdk_client(endpoint) as s2:
            await s2.create_basin(BASIN)
            await s2.basin(BASIN).create_stream(STREAM)
            stream = s2.basin(BASIN).stream(STREAM)
            await stream.append(AppendInput([change(n) for n in range(1000)]))
            yield stream


def change(number: int) -> Record:
    return Record(json.dumps({"item": f"item-{number % 10}", "count": number}).encode())


def fold(state: dict[str, int], record: StreamRecord) -> dict[str, int]:
    found = json.loads(record.body)
    state[found["item"]] = found["count"]
    return state


def folded(count: int) -> dict[str, int]:
    return {f"item-{n % 10}": n for n in range(count)}


def options(snapshots: Any) -> dict[str, Any]:
    return {"fold": fold, "initial": dict, "snapshots": snapshots, "progress": lambda _: None}


async def test_e15_a_plain_file_named_by_its_cursor_is_a_snapshot(
    stream: Stream, tmp_path: Path
) -> None:
    folder = tmp_path / "snapshots" / "orders"
    folder.mkdir(parents=True)
    (folder / "1000.json").write_text(json.dumps(folded(1000)))
    await stream.append(AppendInput([CommandRecord.trim(1000)]))
    await stream.append(AppendInput([change(1000)]))
    async with follow(stream, **options(external(folder.as_uri()))) as state:
        assert state.plan.snapshot is not None
        assert (state.plan.snapshot.cursor, state.plan.read_from) == (1000, 1000)
        assert state.value == folded(1001)
        await stream.append(AppendInput([change(1001)]))
        assert (await anext(state)).seq_num == 1002
        assert state.value == folded(1002)


async def test_e15_a_snapshot_is_written_as_a_plain_file(stream: Stream, tmp_path: Path) -> None:
    folder = tmp_path / "snapshots" / "orders"
    snapshots = external(folder.as_uri(), naming="plain")
    async with SnapshotTaker(stream, **options(snapshots)) as snapshotter:
        assert (await snapshotter.take()).outcome is Outcome.TAKEN
    assert [path.name for path in folder.glob("*.json")] == ["1000.json"]
    assert json.loads((folder / "1000.json").read_text()) == folded(1000)
    async with follow(stream, **options(external(folder.as_uri()))) as state:
        assert (state.value, state.plan.records) == (folded(1000), 0)


async def test_e15_a_file_that_looks_like_a_snapshot_and_is_not_understood_is_named(
    stream: Stream, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "1000.json.gz").write_bytes(b"what is this?")
    (tmp_path / "README").write_text("about this folder")
    with caplog.at_level(logging.WARNING):
        async with follow(stream, **options(external(tmp_path.as_uri()))) as state:
            assert state.value == folded(1000)
    # The server is in this process as well, and may have something to say.
    (message,) = [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("streamfold.follow")
    ]
    assert "1000.json.gz looks like a snapshot" in message
    assert "README" not in message


async def test_e16_a_snapshot_in_one_plain_record_is_restored_from(stream: Stream) -> None:
    snapshot = {"type": "snapshot", "covers_before": 1000, "state": folded(1000)}
    batch = [CommandRecord.trim(1001), Record(json.dumps(snapshot).encode())]
    ack = await stream.append(AppendInput(batch, match_seq_num=1000))
    assert (ack.start.seq_num, ack.end.seq_num) == (1000, 1002)
    await stream.append(AppendInput([change(1000)]))
    async with follow(stream, fold=fold, initial=dict, progress=lambda _: None) as state:
        assert state.plan.snapshot is not None
        assert state.plan.snapshot.cursor == 1000
        assert state.value == folded(1001)


async def test_e16_a_snapshot_is_written_as_one_plain_record(stream: Stream) -> None:
    async with SnapshotTaker(stream, **options(in_stream(shape="plain"))) as snapshotter:
        taken = await snapshotter.take()
    assert (taken.outcome, taken.cursor, taken.placement) == (Outcome.TAKEN, 1000, "record")
    (record,) = (await stream.read(start=SeqNum(1001))).records
    assert not record.headers
    assert json.loads(record.body) == {
        "type": "snapshot",
        "covers_before": 1000,
        "state": folded(1000),
    }
    async with follow(stream, fold=fold, initial=dict, progress=lambda _: None) as state:
        assert state.value == folded(1000)


async def test_e16_an_object_that_only_resembles_a_snapshot_is_a_change(stream: Stream) -> None:
    lookalike = {"type": "snapshot", "covers_before": 5, "item": "item-0", "count": -1}
    await stream.append(AppendInput([Record(json.dumps(lookalike).encode())]))
    async with follow(stream, fold=fold, initial=dict, progress=lambda _: None) as state:
        assert state.value["item-0"] == -1


async def test_e17_a_framed_snapshot_interleaves_with_changes(stream: Stream) -> None:
    padding = "x" * 1_200_000  # more than one record holds

    def padded(state: dict[str, Any], record: StreamRecord) -> dict[str, Any]:
        return {**fold(state, record), "padding": padding}

    busy: dict[str, Any] = {"fold": padded, "initial": dict, "progress": lambda _: None}
    async with SnapshotTaker(stream, **busy, snapshots=in_stream()) as snapshotter:
        taken = await snapshotter.take()
        assert (taken.outcome, taken.cursor, taken.placement) == (Outcome.TAKEN, 1000, "framed")
        await stream.append(AppendInput([change(1000)]))
    first = (await stream.read(start=SeqNum(1000))).records[0]
    assert dict(first.headers)[b"streamfold-covers-before"] == b"1000"
    async with follow(stream, **busy) as state:
        assert state.value == {**folded(1001), "padding": padding}


async def test_e18_a_stream_that_moved_on_makes_the_snapshot_try_again(stream: Stream) -> None:
    snapshot = {"type": "snapshot", "covers_before": 1000, "state": folded(1000)}
    await stream.append(AppendInput([change(1000)]))
    with pytest.raises(SeqNumMismatchError):
        await stream.append(
            AppendInput([Record(json.dumps(snapshot).encode())], match_seq_num=1000)
        )
    async with SnapshotTaker(stream, **options(in_stream(shape="plain"))) as snapshotter:
        await stream.append(AppendInput([change(1001)]))
        assert (await snapshotter.take()).cursor == 1002
    async with follow(stream, fold=fold, initial=dict, progress=lambda _: None) as state:
        assert state.value == folded(1002)
