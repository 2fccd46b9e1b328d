"""Streams as Spark tables: `register(spark)`, then `format("streamfold")`. Needs the extra `spark`."""

from streamfold.spark.failures import (
    DataLossError,
    EndpointUnavailableError,
    JavaMissingError,
    OptionError,
    ReplayChangedError,
    StreamGoneError,
)
from streamfold.spark.java import Java, find_java, use_java
from streamfold.spark.session import local_session, register
from streamfold.spark.source import StreamfoldSource

__all__ = [
    "DataLossError",
    "EndpointUnavailableError",
    "Java",
    "JavaMissingError",
    "OptionError",
    "ReplayChangedError",
    "StreamGoneError",
    "StreamfoldSource",
    "find_java",
    "local_session",
    "register",
    "use_java",
]
