"""A program with its own Spark session: its Python workers and output."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pyspark
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

def package(batches):
    import pyspark
    for batch in batches:
        yield batch.from_pydict({"path": [pyspark.__path__[0]]})

(row,) = spark.range(0, 1, 1, 1).mapInArrow(package, "path string").collect()
print("workers import", row.path)
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
    # Not Spark's zip of it, which Python would compile in each process.
    assert f"workers import {pyspark.__path__[0]}" in done.stdout
    assert "Traceback" not in done.stderr
