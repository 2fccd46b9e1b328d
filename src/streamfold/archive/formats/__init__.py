"""File formats of archives."""

from streamfold.archive.formats.admission import (
    admitted_changes,
    admitted_rows,
    verified,
    verified_rows,
)
from streamfold.archive.formats.conforming import conform
from streamfold.archive.formats.format import (
    FORMATS,
    FileCompression,
    Format,
    FormatType,
    format_of,
)
from streamfold.archive.formats.jsonl.jsonl import JsonlFormat
from streamfold.archive.formats.parquet import ParquetFormat
from streamfold.archive.formats.protobuf.published import ProtobufFormat
from streamfold.archive.formats.protobuf.typed import TypedProtobufFormat

__all__ = [
    "Format",
    "FormatType",
    "format_of",
    "FORMATS",
    "JsonlFormat",
    "FileCompression",
    "ProtobufFormat",
    "TypedProtobufFormat",
    "ParquetFormat",
    "conform",
    "admitted_rows",
    "admitted_changes",
    "verified_rows",
    "verified",
]
