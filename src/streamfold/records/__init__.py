"""The one byte form of records from wire to storage: AppendRecords in, SequencedRecords out."""

from streamfold.records.append_input import AppendInput, parse_append_input
from streamfold.records.batch import RecordBatch
from streamfold.records.compiler_pages import release_compiler
from streamfold.records.kernels import warm_up
from streamfold.records.payload import Cut, Index, decode, encode_records, measure
from streamfold.records.rules import Command, Fence, Sequenced, Trim

__all__ = [
    "AppendInput",
    "Command",
    "Cut",
    "Fence",
    "Index",
    "RecordBatch",
    "Sequenced",
    "Trim",
    "decode",
    "encode_records",
    "measure",
    "parse_append_input",
    "release_compiler",
    "warm_up",
]
