"""Archives as Spark tables: `format("streamfold-archive")`, available in a session after `register`."""

from streamfold.spark.archive.errors import ArchiveReplacedError, FilesGoneError
from streamfold.spark.archive.source import StreamfoldArchiveSource

__all__ = ["ArchiveReplacedError", "FilesGoneError", "StreamfoldArchiveSource"]
