"""Streams and archives as Spark tables: `register(spark)`, then `format("streamfold")` for streams and
`format("streamfold-archive")` for archives. Needs the extra `spark`.

Names are imported lazily, because every process in which Spark plans a query imports this package.
"""

from typing import TYPE_CHECKING

from streamfold.extras import check_installed, lazy_exports

for _package in ("pyspark", "pyarrow"):
    check_installed(_package, "spark")

if TYPE_CHECKING:
    from streamfold.spark.archive.source import StreamfoldArchiveSource
    from streamfold.spark.errors import (
        DataLossError,
        EndpointUnavailableError,
        FilesGoneError,
        JavaMissingError,
        OptionError,
        StreamGoneError,
        error_behind,
    )
    from streamfold.spark.java import Java, find_java, use_java
    from streamfold.spark.session import local_session, register
    from streamfold.spark.stream.source import StreamfoldSource
else:
    __getattr__ = lazy_exports(
        __name__,
        {
            "archive.source": ("StreamfoldArchiveSource",),
            "errors": (
                "DataLossError", "EndpointUnavailableError", "FilesGoneError", "JavaMissingError",
                "OptionError", "StreamGoneError", "error_behind",
            ),
            "java": ("Java", "find_java", "use_java"),
            "session": ("local_session", "register"),
            "stream.source": ("StreamfoldSource",),
        },
    )  # fmt: skip

__all__ = [
    "DataLossError",
    "EndpointUnavailableError",
    "FilesGoneError",
    "Java",
    "JavaMissingError",
    "OptionError",
    "StreamGoneError",
    "StreamfoldArchiveSource",
    "StreamfoldSource",
    "error_behind",
    "find_java",
    "local_session",
    "register",
    "use_java",
]
