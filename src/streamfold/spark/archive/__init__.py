"""Archives as Spark tables: `format("streamfold-archive")`, available in a session after `register`."""

from streamfold.spark.archive.source import StreamfoldArchiveSource
from streamfold.spark.errors import ArchiveReplacedError, FilesGoneError

__all__ = ["ArchiveReplacedError", "FilesGoneError", "StreamfoldArchiveSource"]
