"""The byte form of records from wire to storage: AppendRecords in, SequencedRecords out.

Clients encode with plain Python (`protobuf`). Everything else is native and loaded on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamfold.records.batch import AppendInput, RecordBatch, parse_append_input
    from streamfold.records.payload import Index, decode, measure
    from streamfold.records.rules import Command, Fence, Sequenced, Trim

__all__ = [
    "AppendInput",
    "Command",
    "Fence",
    "Index",
    "RecordBatch",
    "Sequenced",
    "Trim",
    "decode",
    "measure",
    "parse_append_input",
]

_SOURCES = {
    "AppendInput": "batch",
    "parse_append_input": "batch",
    "RecordBatch": "batch",
    "Command": "rules",
    "Fence": "rules",
    "Sequenced": "rules",
    "Trim": "rules",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'streamfold.records' has no attribute {name!r}")
    module = import_module(f"streamfold.records.{_SOURCES.get(name, 'payload')}")
    value = globals()[name] = getattr(module, name)
    return value
