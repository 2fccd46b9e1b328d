"""Formats by the ids that configurations and manifests use."""

from __future__ import annotations

from collections.abc import Iterator

from streamfold.archive.formats.compression import Compression
from streamfold.archive.formats.format import Format, FormatType
from streamfold.errors import InvalidError
from streamfold.extensions import Registry

_FORMATS = "streamfold.archive.formats"

#: Every format that `format_of` knows.
FORMATS = Registry(
    "streamfold.formats",
    "format",
    FormatType,
    {
        "jsonl": f"{_FORMATS}.jsonl.jsonl:JSONL",
        "parquet": f"{_FORMATS}.parquet:PARQUET",
        "protobuf": f"{_FORMATS}.protobuf.published:PROTOBUF",
        "protobuf-typed": f"{_FORMATS}.protobuf.typed:TYPED_PROTOBUF",
    },
)


def format_of(format_id: str, compression: str = "none") -> Format:
    """The format of this id; InvalidError when it is unknown, or cannot be compressed that way."""
    if format_id in FORMATS:
        kind = FORMATS.get(format_id)
        if compression in kind.compressions:
            return kind.open(Compression(compression))
    raise InvalidError(
        f"format {format_id!r} with compression {compression!r} is unknown: formats are "
        f"{', '.join(format_names())}"
    )


def format_names() -> Iterator[str]:
    """What configurations call formats: their ids, then those that are compressed as a whole."""
    yield from FORMATS.ids()
    for kind in FORMATS:
        yield from (kind.id + c.extension for c in kind.compressions if c is not Compression.NONE)


def parse_format_name(name: str) -> tuple[str, str]:
    """The id and the compression of `jsonl.gz` and the like; any other name is an id."""
    for compression in Compression:
        format_id = name.removesuffix(compression.extension)
        if compression.extension and format_id != name and format_id in FORMATS:
            return format_id, compression.value
    return name, Compression.NONE.value
