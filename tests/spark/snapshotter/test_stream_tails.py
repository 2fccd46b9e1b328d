"""Requests for tails end with the snapshotter, and leave no connection."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from pathlib import Path

from streamfold.snapshotter.spark.table.edges import StreamTails
from tests.spark.server import Server
from tests.spark.snapshotter.feeding import Feed, feed
from tests.spark.snapshotter.tables import table_job


def test_a_request_that_outlives_the_snapshotter_closes_its_connection(
    server: Server, fresh: Callable[[], str], tmp_path: Path
) -> None:
    """An open one would be a ResourceWarning when it is collected, which is an error here."""
    stream = fresh()
    feed(server, stream, list(Feed(1).changes(3)))
    tails = StreamTails()
    tails.close()
    assert asyncio.run(tails.tail(table_job(server, stream, tmp_path))) == 3
    del tails
    gc.collect()
