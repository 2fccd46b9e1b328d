"""Formats by the ids that configurations and manifests use."""

from __future__ import annotations

from streamfold.archive.formats.compression import Compression
from streamfold.archive.formats.format import Format
from streamfold.archive.formats.jsonl.jsonl import JsonlFormat
from streamfold.archive.formats.parquet import ParquetFormat
from streamfold.archive.formats.protobuf.published import ProtobufFormat
from streamfold.archive.formats.protobuf.typed import TypedProtobufFormat
from streamfold.errors import InvalidError

_UNPACKED: dict[str, Format] = {
    "parquet": ParquetFormat(),
    "protobuf": ProtobufFormat(),
    "protobuf-typed": TypedProtobufFormat(),
}

#: Every id that `format_of` knows.
FORMAT_IDS = ("jsonl", *_UNPACKED)


def format_of(format_id: str, compression: str = "none") -> Format:
    """The format of this id; InvalidError when it is unknown, or cannot be compressed that way."""
    if format_id == "jsonl" and compression in list(Compression):
        return JsonlFormat(Compression(compression))
    if format_id in _UNPACKED and compression == "none":
        return _UNPACKED[format_id]
    raise InvalidError(
        f"format {format_id!r} with compression {compression!r} is unknown: formats are "
        f"{', '.join(FORMAT_IDS)}, and jsonl may be compressed with gzip or zstd"
    )
