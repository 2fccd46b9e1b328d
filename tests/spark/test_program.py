"""A program with a Spark session of its own: what it leaves on the terminal."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import s2_sdk

from .server import Server

#: Shows the first of many batches, which leaves its Python worker with the others, and ends without
#: stopping Spark.
_PROGRAM = """
import sys
from streamfold.spark import local_session

spark = local_session(quick=True, settings={"spark.sql.execution.arrow.maxRecordsPerBatch": "100"})
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
records = spark.read.format("streamfold").options(**options).load()
records.select("seq_num", "body").show(1)
"""


# Upstream defect 11.
def test_python_workers_that_spark_no_longer_needs_end_without_a_traceback(
    server: Server, fresh: Callable[[], str]
) -> None:
    stream = fresh()
    server.append(stream, [s2_sdk.Record(bytes(1000))] * 10_000)
    options = {**server.options, "stream": stream}
    words = [word for option in options.items() for word in option]
    # Ends when Java has ended too, which copies what workers print: nothing later is missed.
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *words], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "only showing top 1 row" in done.stdout
    assert "Traceback" not in done.stderr
