"""Decides whether a history is linearizable: whether one order of operations explains all answers."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from streamfold.testing.linearizability.contradiction import Contradiction
from streamfold.testing.linearizability.history import OperationHistory, StreamOperation
from streamfold.testing.linearizability.log_order import LogSearch, UndecidedError
from streamfold.testing.linearizability.schedule import (
    contradiction_in_time,
    unjustified,
    went_back,
)


class Judgement(enum.StrEnum):
    LINEARIZABLE = "linearizable"
    VIOLATION = "violation"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A judgement, with what shows it."""

    judgement: Judgement
    #: The appends that took effect, in the order of the log, if it is linearizable.
    log: tuple[StreamOperation, ...] = ()
    contradiction: Contradiction | None = None


def check(history: OperationHistory) -> Verdict:
    """Judge a history of one stream, in near-linear time if a read in it has contents."""
    refusals = filter(None, map(unjustified, history.operations))
    contradiction = next(refusals, None) or went_back(history)
    if contradiction is not None:
        return Verdict(Judgement.VIOLATION, contradiction=contradiction)
    search = LogSearch(history)
    late: Contradiction | None = None
    try:
        for order in search.orders():
            contradiction = contradiction_in_time(history, order)
            if contradiction is None:
                return Verdict(Judgement.LINEARIZABLE, tuple(order))
            late = late or contradiction
    except UndecidedError:
        return Verdict(Judgement.UNDECIDED)
    return Verdict(Judgement.VIOLATION, contradiction=late or search.contradiction)
