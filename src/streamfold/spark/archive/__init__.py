"""Archives as Spark tables: `format("streamfold-archive")`, once `register` has run."""

from streamfold.spark.archive.source import StreamfoldArchiveSource
from streamfold.spark.errors import FilesGoneError

__all__ = ["FilesGoneError", "StreamfoldArchiveSource"]
