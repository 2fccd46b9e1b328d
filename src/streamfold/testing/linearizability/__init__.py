"""Linearizability tests of a real server: clients record histories under faults, two checkers judge.

    python -m streamfold.testing.linearizability run --operations 20000 --seed 7
    python -m streamfold.testing.linearizability check HISTORY.jsonl

A `campaign` kills, stops, pauses and replaces a server while `clients` append, read and check tails.
`writers` choose what to append. Each client records its requests and answers in a `history`. A history
is linearizable if some order of its operations explains every answer, with each operation taking effect
once between its request and its answer. `check` decides this: `log_order` places each append in the
log, and `schedule` checks the times. `porcupine` runs S2's public checker on the same histories. A
violation is reported as a `contradiction`: the few operations that cannot all be true.
"""

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
from streamfold.testing.linearizability.log_order import Judgement, Verdict, check

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
