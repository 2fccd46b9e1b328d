"""A snapshot writer running alongside a test, with its HTTP endpoints."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from streamfold.archive.events import Backoff
from streamfold.snapshotter.spark.service import Snapshotter
from streamfold.snapshotter.spark.table_job import TableJob
from streamfold.snapshotter.status.http_server import StatusServer
from streamfold.snapshotter.status.table_status import State, TableStatus
from tests.spark.snapshotter.waiting import TIMEOUT, wait_for


class Running:
    """A writer and its HTTP side."""

    def __init__(self, writer: Snapshotter, port: int) -> None:
        self.writer = writer
        self._port = port

    def ask(self, method: str, path: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT)
        try:
            connection.request(method, path)
            response = connection.getresponse()
            body = response.read()
            kind = response.headers["Content-Type"]
            return response.status, json.loads(body) if "json" in kind else body.decode()
        finally:
            connection.close()

    def status(self, table: str) -> TableStatus:
        return self.writer.statuses()[table]

    def wait_for_head(self, table: str, position: int) -> TableStatus:
        return wait_for(
            lambda: self.status(table), lambda found: found.manifest_head == str(position)
        )

    def wait_for_state(self, table: str, state: State) -> TableStatus:
        return wait_for(lambda: self.status(table), lambda found: found.state is state)

    def wait_for_error(self, table: str, *codes: str) -> TableStatus:
        """Wait until one of these errors is retried; a slow server may cause others before it."""
        return wait_for(
            lambda: self.status(table),
            lambda found: (
                found.state is State.RETRYING
                and found.last_error is not None
                and found.last_error.code in codes
            ),
        )


@contextmanager
def running(spark: SparkSession, scratch: Path, *jobs: TableJob) -> Iterator[Running]:
    writer = Snapshotter(jobs, scratch=scratch, backoff=Backoff(0.2, 1.0))
    with writer, StatusServer(writer, "127.0.0.1", 0) as served, writer.publishing(spark):
        yield Running(writer, served.port)
