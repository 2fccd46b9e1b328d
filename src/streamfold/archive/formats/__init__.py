"""The formats of an archive's files."""

from streamfold.archive.formats.compression import Compression
from streamfold.archive.formats.conforming import conform
from streamfold.archive.formats.format import Format
from streamfold.archive.formats.jsonl.jsonl import JsonlFormat
from streamfold.archive.formats.parquet import ParquetFormat
from streamfold.archive.formats.protobuf.published import ProtobufFormat
from streamfold.archive.formats.protobuf.typed import TypedProtobufFormat
from streamfold.archive.formats.registry import FORMAT_IDS, format_of

__all__ = [
    "Format",
    "format_of",
    "FORMAT_IDS",
    "JsonlFormat",
    "Compression",
    "ProtobufFormat",
    "TypedProtobufFormat",
    "ParquetFormat",
    "conform",
]
