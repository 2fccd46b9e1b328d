"""Linearizability of a real server: clients and faults make histories, and two judges decide them.

    python -m streamfold.testing.linearizability run --operations 20000 --seed 7
    python -m streamfold.testing.linearizability check HISTORY.jsonl

A `campaign` kills, stops, pauses and replaces a server while `clients` append, read and check tails
(`writers` decide what). Each client records its requests and the answers in a `history`. A history is
linearizable if some order of its operations explains every answer, where each operation takes effect
once, between its request and its answer. `checker` decides that: `log_order` finds the place of each
append, `schedule` checks the times. `porcupine` runs S2's public checker on the same histories. A
violation is reported as a `contradiction`: the few operations that cannot all be true.
"""

from streamfold.testing.linearizability.checker import Judgement, Verdict, check
from streamfold.testing.linearizability.contradiction import Contradiction, report
from streamfold.testing.linearizability.history import (
    OperationHistory,
    OperationKind,
    OperationResult,
    ProducerNumber,
    StreamOperation,
    chain_hash,
    parse_history,
    read_history,
    record_hash,
    write_history,
)

__all__ = [
    "Contradiction",
    "Judgement",
    "OperationHistory",
    "OperationKind",
    "OperationResult",
    "ProducerNumber",
    "StreamOperation",
    "Verdict",
    "chain_hash",
    "check",
    "parse_history",
    "read_history",
    "record_hash",
    "report",
    "write_history",
]
