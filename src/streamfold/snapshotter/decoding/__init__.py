"""Decodes the records of a stream into changes of a table."""

from streamfold.snapshotter.decoding.arrow_rows import ABSENT, RowReading
from streamfold.snapshotter.decoding.assembly import DEAD_LETTER, STOP, Assembly
from streamfold.snapshotter.decoding.ddl import parse_ddl
from streamfold.snapshotter.decoding.debezium import DebeziumDecoder
from streamfold.snapshotter.decoding.decoder import (
    DEAD_LETTERS,
    DECODERS,
    OPS,
    ChangeDecoder,
    Decoded,
    DecoderOptions,
    DecoderType,
    decoded_schema,
    under_schema,
)
from streamfold.snapshotter.decoding.envelope import EnvelopeDecoder
from streamfold.snapshotter.decoding.records import RawChanges, RecordIntake
from streamfold.snapshotter.decoding.upserts import UpsertDecoder

__all__ = [
    "ChangeDecoder",
    "Decoded",
    "DecoderType",
    "DecoderOptions",
    "DECODERS",
    "OPS",
    "DEAD_LETTERS",
    "decoded_schema",
    "under_schema",
    "EnvelopeDecoder",
    "DebeziumDecoder",
    "UpsertDecoder",
    "STOP",
    "DEAD_LETTER",
    "RecordIntake",
    "RawChanges",
    "RowReading",
    "ABSENT",
    "Assembly",
    "parse_ddl",
]
