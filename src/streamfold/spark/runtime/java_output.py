"""What Spark prints, kept from the terminal and at hand when its Java process ends.

Spark prints a banner before any setting can stop it, and its workers print tracebacks when they are
stopped in the middle of something, which is how every query ends.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Mapping

from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkRuntimeError
from pyspark.java_gateway import launch_gateway

from streamfold.spark.errors import JavaEndedError

logger = logging.getLogger(__name__)

#: Lines that are kept for whoever asks why Java ended.
LINES_KEPT = 40
_last: deque[str] = deque(maxlen=LINES_KEPT)


def start_quietly(settings: Mapping[str, str]) -> None:
    """Start Spark's Java process with these settings; what it prints is logged at level DEBUG."""
    if SparkContext._gateway is not None:
        return  # a process has one, and it has begun to print elsewhere
    reading, writing = os.pipe()
    threading.Thread(target=_read, args=(reading,), name="output of Java", daemon=True).start()
    conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
    try:
        gateway = launch_gateway(conf, {"stdout": writing, "stderr": writing})
    except PySparkRuntimeError:
        raise JavaEndedError from None
    finally:
        os.close(writing)
    SparkContext._ensure_initialized(gateway=gateway)


def last_lines() -> list[str]:
    """What was printed last."""
    return list(_last)


def _read(descriptor: int) -> None:
    with os.fdopen(descriptor, errors="replace") as output:
        for line in output:
            _last.append(line.rstrip())
            logger.debug("%s", line.rstrip())
