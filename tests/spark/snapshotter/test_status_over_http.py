"""Status, metrics and requests for snapshots over HTTP, without Spark."""

from __future__ import annotations

import http.client
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from streamfold.errors import ConflictError, NotFoundError
from streamfold.snapshotter.config.tables import read_configuration
from streamfold.snapshotter.errors import AddressUnavailableError
from streamfold.snapshotter.spark import Snapshotter, table_jobs
from streamfold.snapshotter.spark.table.requests import Request, SnapshotRequests
from streamfold.snapshotter.status.http_server import StatusServer
from streamfold.snapshotter.status.metrics import render_metrics
from streamfold.snapshotter.status.table_status import (
    ArtifactStatus,
    Counts,
    SparkCounts,
    State,
    TableFailure,
    TableStatus,
)
from tests.spark.snapshotter.waiting import TIMEOUT, wait_for


class _Tables:
    """Two tables in known states."""

    def statuses(self) -> dict[str, TableStatus]:
        failure = TableFailure("schema_incompatible", "column 'a'", "2026-06-03T12:00:00Z")
        counts = Counts(bases=1, diffs=2, destination_errors={"s3://b/": 3})
        spark = SparkCounts(jobs=2, tasks=3, rows=40, bytes=2000)
        fine = TableStatus(
            table="a", stream="s", state=State.RUNNING, ready=True, counts=counts, spark=spark
        )
        stopped = TableStatus(table="b", stream="t", state=State.STOPPED, last_error=failure)
        return {"a": fine, "b": stopped}

    def __init__(self) -> None:
        self.requests = SnapshotRequests()

    def spark(self) -> SparkCounts:
        return SparkCounts(jobs=7, tasks=9, rows=100, bytes=5000)

    def request_snapshot(self, table: str) -> Request:
        if table not in self.statuses():
            raise NotFoundError("no such table")
        if table == "b":
            raise ConflictError("it stopped")
        return self.requests.add()


BASE = ArtifactStatus("99", "2026-06-03T12:00:00Z", 2, 1234, 100, "requested")


def test_the_status_of_every_table_is_served() -> None:
    with StatusServer(_Tables(), "127.0.0.1", 0) as served:

        def ask(method: str, path: str) -> tuple[int, bytes]:
            connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=TIMEOUT)
            connection.request(method, path, body=b"ignored" if method == "POST" else None)
            answer = connection.getresponse()
            found = answer.status, answer.read()
            connection.close()
            return found

        status, body = ask("GET", "/status")
        shown = json.loads(body)["tables"]
        assert (status, shown["b"]["last_error"]["code"]) == (200, "schema_incompatible")
        assert json.loads(body)["spark"] == {"jobs": 7, "tasks": 9, "rows": 100, "bytes": 5000}
        assert shown["a"]["spark"] == {"jobs": 2, "tasks": 3, "rows": 40, "bytes": 2000}
        assert ask("GET", "/health/live")[0] == 200
        assert ask("GET", "/health/ready")[0] == 503
        posts = {
            path: ask("POST", f"/snapshot{path}")[0]
            for path in ("?table=a", "?table=b", "?table=c", "")
        }
        assert posts == {"?table=a": 202, "?table=b": 409, "?table=c": 404, "": 202}
        assert ask("POST", "/status")[0] == ask("GET", "/snapshot")[0] == 404
        metrics = ask("GET", "/metrics")[1].decode()
    assert 'snapshotter_artifacts_written_total{kind="diff",table="a"} 2.0' in metrics
    assert 'snapshotter_destination_errors_total{dest="s3://b/",table="a"} 3.0' in metrics
    assert 'snapshotter_up{table="b"} 0.0' in metrics
    assert 'snapshotter_table_spark_jobs_total{table="a"} 2.0' in metrics
    assert "snapshotter_spark_tasks_total 9.0" in metrics


def post(port: int, path: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
    connection.request("POST", path)
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read())
    connection.close()
    return found


def test_a_snapshot_is_asked_for_all_tables_and_those_that_refuse_are_named() -> None:
    with StatusServer(_Tables(), "127.0.0.1", 0) as served:
        assert post(served.port, "/snapshot") == (
            202,
            {
                "accepted": True,
                "tables": ["a"],
                "table": "a",
                "refused": {"b": {"code": "conflict", "message": "it stopped"}},
            },
        )


def test_a_request_for_a_snapshot_waits_for_its_commit() -> None:
    tables = _Tables()
    with StatusServer(tables, "127.0.0.1", 0) as served, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(post, served.port, "/snapshot?table=a&wait=200s")
        wait_for(tables.requests.begin, bool)
        tables.requests.answer(BASE)
        status, answer = waiting.result(TIMEOUT)
        assert (status, answer["committed"], answer["bases"]["a"]["epoch"]) == (200, True, 2)
        late, answer = post(served.port, "/snapshot?table=a&wait=10ms")
        assert (late, answer["code"], answer["waiting"]) == (504, "snapshot_timeout", ["a"])
        tables.requests.answer(BASE)  # the late one has left
        waiting = pool.submit(post, served.port, "/snapshot?table=a&wait=200")
        wait_for(tables.requests.begin, bool)
        tables.requests.close(ConflictError("it stopped meanwhile"))
        status, answer = waiting.result(TIMEOUT)
        assert (status, answer["message"]) == (409, "it stopped meanwhile")


@pytest.mark.parametrize("query", ["wait=soon", "wait=0", "wait=1d", "wait=1s&wait=2s", "tabel=a"])
def test_a_request_for_a_snapshot_that_cannot_be_understood_is_refused(query: str) -> None:
    with StatusServer(_Tables(), "127.0.0.1", 0) as served:
        status, answer = post(served.port, f"/snapshot?{query}")
    assert (status, answer["code"]) == (400, "invalid")


def test_requests_share_a_base_that_has_not_begun_and_never_one_that_has() -> None:
    requests = SnapshotRequests()
    early = [requests.add(), requests.add()]
    assert requests.begin()
    late = requests.add()
    # That try failed: all wait for the next.
    assert requests.begin()
    later = requests.add()
    requests.answer(BASE)
    assert [request.result(0) for request in (*early, late)] == [BASE] * 3
    assert not later.done()
    assert requests.begin()
    requests.answer(BASE)
    assert later.result(0) == BASE
    assert not requests.begin()
    requests.close(ConflictError("closed"))
    with pytest.raises(ConflictError, match="closed"):
        requests.add()


def test_a_port_that_is_taken_is_reported_in_the_words_of_the_configuration() -> None:
    with (
        StatusServer(_Tables(), "127.0.0.1", 0) as served,
        pytest.raises(AddressUnavailableError, match=f"http.port {served.port} on 127.0.0.1"),
    ):
        StatusServer(_Tables(), "127.0.0.1", served.port)


def test_every_error_series_is_there_from_the_start(tmp_path: Path) -> None:
    [job] = table_jobs(
        read_configuration(
            {
                "source": {"server": "h:1", "table": "t"},
                "destinations": [
                    {"type": "local", "path": str(tmp_path)},
                    {"type": "s3", "bucket": "archive"},
                ],
                "events": [{"type": "webhook", "url": "http://127.0.0.1:1/hook"}],
                "dead_letters": {"folder": str(tmp_path / "letters")},
            }
        ),
        {},
    )
    with Snapshotter([job], scratch=tmp_path / "scratch") as writer:
        metrics = render_metrics(writer).decode()
    for uri in ("s3://archive/t/", f"{tmp_path.as_uri()}/t/", f"{tmp_path.as_uri()}/letters/t/"):
        assert f'destination_errors_total{{dest="{uri}",table="t"}} 0.0' in metrics
    [sink] = job.events
    assert f'event_errors_total{{sink="{sink}",table="t"}} 0.0' in metrics
    assert 'snapshotter_failures_total{table="t"} 0.0' in metrics
