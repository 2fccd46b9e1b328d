"""Database positions in archives and in the status."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from datetime import UTC, datetime
from pathlib import Path

import pytest
import s2_sdk

from streamfold.snapshotter.decoding import EnvelopeDecoder
from streamfold.snapshotter.spark.driver_loop import DriverLoop
from streamfold.snapshotter.spark.tasks import intake as intakes
from streamfold.snapshotter.status.metrics import render_metrics
from streamfold.snapshotter.status.table_status import ArtifactStatus, SparkCounts, TableStatus
from tests.spark.server import Server
from tests.spark.snapshotter.feeding import envelope
from tests.spark.snapshotter.stepping import Table
from tests.spark.snapshotter.tables import manifest_of, state_of, table_job

#: Milliseconds since 1970 of the first commit.
START = 1_700_000_000_000


def copied(lsn: str, number: int) -> s2_sdk.Record:
    headers = [(b"lsn", lsn.encode()), (b"copy", b"%d" % number)]
    body = envelope("r", after={"id": number, "name": "copied"})
    return s2_sdk.Record(body, headers, timestamp=START)


def copy_end(lsn: str) -> s2_sdk.Record:
    headers = [(b"lsn", lsn.encode()), (b"copy", b"end")]
    return s2_sdk.Record(envelope("e", txn=f"copy {lsn}"), headers, timestamp=START)


def changed(lsn: str, number: int, index: int = 0, *, last: bool = True) -> s2_sdk.Record:
    body = envelope("u", after={"id": number, "name": lsn}, txn={"id": lsn, "last": last})
    headers = [(b"lsn", lsn.encode()), (b"index", b"%d" % index)]
    return s2_sdk.Record(body, headers, timestamp=START + int(lsn[2:], 16))


class Updating(Table):
    """A table whose stream is taken in step by step."""

    def __init__(self, server: Server, stream: str, folder: Path, loop: DriverLoop) -> None:
        self.folder, self._server = folder, server
        self.job = table_job(
            server, stream, folder, decoder=EnvelopeDecoder(("id",), table="public.items")
        )
        super().__init__(
            self.job, loop, now=lambda: datetime.fromtimestamp(START / 1000 + 100, UTC)
        )

    def append(self, *records: s2_sdk.Record) -> TableStatus:
        self._server.append(self.job.stream, records)
        return self.advance()


@pytest.fixture
def table(server: Server, fresh: Callable[[], str], tmp_path: Path, loop: DriverLoop) -> Updating:
    opened = Updating(server, fresh(), tmp_path / "archive", loop)
    opened.open()
    return opened


def test_every_artifact_says_which_commits_of_the_database_it_holds(table: Updating) -> None:
    table.append(copied("0/10", 1), copied("0/10", 2))
    table.append(copy_end("0/10"))  # holds no change, and makes the copy complete
    table.append(changed("0/20", 1), changed("0/30", 3, last=False))
    table.append(changed("0/30", 4, 1))  # the fourth diff, which a base follows
    table.append(changed("0/40", 5))
    found = [
        (a.kind, r.first, r.last, r.copying) if (r := a.source_range) else (a.kind, None)
        for a in manifest_of(table.folder).artifacts
    ]
    assert found == [
        ("snapshot", None),
        ("diff", "0/10", "0/10", True),
        ("diff", "0/10", "0/10", False),
        ("diff", "0/20", "0/20", False),
        ("diff", "0/30", "0/30", False),
        ("snapshot", None, "0/30", False),
        ("diff", "0/40", "0/40", False),
    ]
    assert set(state_of(table.folder, at_source="0/1F")) == {1, 2}
    assert set(state_of(table.folder, at_source="0/2F")) == {1, 2}
    assert state_of(table.folder, at_source="0/2F")[1]["name"] == "0/20"
    assert set(state_of(table.folder, at_source="0/3F")) == {1, 2, 3, 4}


def test_the_status_tells_the_lag_to_the_database(table: Updating) -> None:
    assert table.append().source_head is None
    done = table.append(copied("0/10", 1), copy_end("0/10"), changed("0/20", 1))
    assert (done.source_position, done.source_head) == ("0/20", "0/20")
    assert (done.source_lag_bytes, done.source_lag_seconds) == (0, 0.0)
    # An open transaction waits for its end: the archive lacks it.
    waiting = table.append(changed("0/30", 3, last=False))
    assert (waiting.source_position, waiting.source_head) == ("0/30", "0/20")
    assert waiting.source_lag_bytes == 0x10
    assert waiting.source_lag_seconds == pytest.approx(100 - 0.032)

    class Writers:
        def statuses(self) -> dict[str, TableStatus]:
            return {"public.items": waiting}

        def spark(self) -> SparkCounts:
            return SparkCounts()

        def request_snapshot(self, table: str) -> Future[ArtifactStatus]:
            raise NotImplementedError

    shown = render_metrics(Writers()).decode()
    assert 'snapshotter_source_lag_bytes{table="public.items"} 16.0' in shown
    assert 'snapshotter_source_head_position{table="public.items"} 32.0' in shown


def test_many_records_of_other_tables_move_the_head_without_a_change(
    table: Updating, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intakes, "HEAD_RECORDS", 10)
    table.append(copied("0/10", 1), copy_end("0/10"))
    other = envelope("c", after={"id": 9}, table="public.other")
    few = table.append(*(s2_sdk.Record(other) for _ in range(9)))
    assert (few.manifest_head, few.source_head) == ("1", "0/10")
    many = table.append(s2_sdk.Record(other))
    assert (many.manifest_head, many.source_head, many.churn_records) == ("11", "0/10", 1)
    assert set(state_of(table.folder, at_source="0/10")) == {1}


def test_a_backlog_is_measured_up_to_the_newest_commit_in_the_stream(
    table: Updating, server: Server
) -> None:
    table.append(copied("0/10", 1), copy_end("0/10"), changed("0/20", 1))
    unread = [changed(f"0/{lsn:X}", 1) for lsn in range(0x30, 0x80, 0x10)]
    server.append(table.job.stream, [*unread, s2_sdk.Record(b"token", [(b"", b"fence")])])
    behind = table.open()
    assert (behind.lag_records, behind.source_lag_bytes) == (6, 0x50)
    assert (behind.source_position, behind.source_head) == ("0/70", "0/20")
    done = table.append()
    assert (done.lag_records, done.source_head, done.source_lag_bytes) == (0, "0/70", 0)
