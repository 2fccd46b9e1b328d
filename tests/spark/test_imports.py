"""Spark is an extra: nothing loads it that does not need it."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module", ["streamfold", "streamfold.server.main", "streamfold.records.columns"]
)
def test_importing_it_does_not_load_spark(module: str) -> None:
    code = f"import sys, {module}; print({{'pyspark', 'pyarrow'}} & set(sys.modules) or 'neither')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "neither", done.stderr


def test_a_process_that_plans_for_the_query_of_a_snapshotter_does_not_load_arrow() -> None:
    code = "import sys, streamfold.snapshotter.spark.plans; print('pyarrow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr
