"""Reads the stream of one table, as a continuous query or as ranges."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from streamfold.snapshotter.spark.errors_from_spark import ServerUnreachableError
from streamfold.snapshotter.spark.jobs import TableJob
from streamfold.spark.errors import EndpointUnavailableError
from streamfold.spark.stream.client import Streams
from streamfold.spark.stream.connection import Connection, answer_timeout
from streamfold.spark.stream.options import EARLIEST, LATEST, parse_source

#: Seconds for which a short request is retried; a server that is silent for longer gets one.
RETRY_SECONDS = 1.0


@dataclass
class StreamEdges:
    """Where the stream of a job starts and ends, as its server says; needs no Spark."""

    job: TableJob
    _start: int | None = None

    def tail(self) -> int:
        """Return the position after the last record."""
        with self._streams() as streams:
            return int(streams.tail(self.job.stream).seq_num)

    def start(self) -> int:
        """Where a table without an archive starts; fetched once, so that it stays the same."""
        if self._start is None:
            with self._streams() as streams:
                if self.job.start == LATEST:
                    self._start = int(streams.tail(self.job.stream).seq_num)
                elif self.job.start == EARLIEST:
                    self._start = streams.first(self.job.stream)
                else:
                    self._start = int(self.job.start)
        return self._start

    @contextmanager
    def _streams(self) -> Iterator[Streams]:
        """Connect to the server, which has to answer soon: the caller reports failures and retries."""
        given = parse_source({**self.job.source, "stream": self.job.stream}).endpoint
        endpoint = replace(given, retry_timeout=min(given.retry_timeout, RETRY_SECONDS))
        try:
            with Connection(endpoint, answer_timeout(endpoint)) as connection:
                yield Streams(connection)
        except EndpointUnavailableError as error:
            raise ServerUnreachableError(endpoint.origin, error.cause) from error


class TableStream(StreamEdges):
    """Reads for one job; positions come from the archive, never from a checkpoint."""

    def __init__(self, spark: SparkSession, job: TableJob) -> None:
        super().__init__(job)
        self.spark = spark

    def records(self, start: int, end: int) -> DataFrame:
        """Read the records from `start` up to, not including, `end`."""
        edges = {"startingOffsets": self._offset(start), "endingOffsets": self._offset(end)}
        return self.spark.read.format("streamfold").options(**self._options(), **edges).load()

    def follow(
        self, start: int, on_batch: Any, *, name: str, interval: timedelta, checkpoint: Path
    ) -> StreamingQuery:
        """Start a query that processes new records every interval; `checkpoint` is a new folder."""
        options = {
            **self._options(),
            "startingOffsets": self._offset(start),
            "maxRecordsPerTrigger": str(self.job.max_records),
        }
        records = self.spark.readStream.format("streamfold").options(**options).load()
        milliseconds = max(1, round(interval.total_seconds() * 1000))
        return (
            records.writeStream.foreachBatch(on_batch)
            .queryName(name)
            .option("checkpointLocation", checkpoint.resolve().as_uri())
            .trigger(processingTime=f"{milliseconds} milliseconds")
            .start()
        )

    def _options(self) -> dict[str, str]:
        return {**self.job.source, "stream": self.job.stream}

    def _offset(self, position: int) -> str:
        return json.dumps({self.job.stream: position})
