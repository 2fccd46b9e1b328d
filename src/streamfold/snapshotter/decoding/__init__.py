"""Decodes records of a stream to changes of a table."""

from streamfold.snapshotter.decoding.assembly import DEAD_LETTER, MISMATCH, STOP
from streamfold.snapshotter.decoding.ddl import parse_ddl
from streamfold.snapshotter.decoding.debezium import DebeziumDecoder
from streamfold.snapshotter.decoding.decoder import (
    DEAD_LETTERS,
    OPS,
    ChangeDecoder,
    Decoded,
    decoded_schema,
    under_schema,
)
from streamfold.snapshotter.decoding.envelope import EnvelopeDecoder
from streamfold.snapshotter.decoding.upserts import UpsertDecoder

__all__ = [
    "ChangeDecoder",
    "Decoded",
    "OPS",
    "DEAD_LETTERS",
    "decoded_schema",
    "under_schema",
    "EnvelopeDecoder",
    "DebeziumDecoder",
    "UpsertDecoder",
    "STOP",
    "DEAD_LETTER",
    "MISMATCH",
    "parse_ddl",
]
