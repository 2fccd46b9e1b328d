"""Streams and archives as Spark tables: `register(spark)`, then `format("streamfold")` for streams and
`format("streamfold-archive")` for archives. Needs the extra `spark`.
"""

from streamfold.extras import needing_extra

with needing_extra("spark"):
    from streamfold.spark.archive import (
        ArchiveReplacedError,
        FilesGoneError,
        StreamfoldArchiveSource,
    )
    from streamfold.spark.errors import (
        ColumnsChangedError,
        DataLossError,
        EndpointUnavailableError,
        JavaMissingError,
        OptionError,
        ReplayChangedError,
        StreamGoneError,
        error_behind,
    )
    from streamfold.spark.java import Java, find_java, use_java
    from streamfold.spark.session import local_session, register
    from streamfold.spark.stream.source import StreamfoldSource

__all__ = [
    "ArchiveReplacedError",
    "ColumnsChangedError",
    "DataLossError",
    "EndpointUnavailableError",
    "FilesGoneError",
    "Java",
    "JavaMissingError",
    "OptionError",
    "ReplayChangedError",
    "StreamGoneError",
    "StreamfoldArchiveSource",
    "StreamfoldSource",
    "error_behind",
    "find_java",
    "local_session",
    "register",
    "use_java",
]
