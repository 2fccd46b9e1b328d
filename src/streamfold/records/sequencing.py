"""How records get their timestamps when they get their slot in a stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from streamfold.errors import InvalidError
from streamfold.model.configs import TimestampMode


class Slot(NamedTuple):
    """The seq_nums of a batch, and the rules for its timestamps."""

    first: int
    mode: TimestampMode
    #: Whether timestamps may be in the future.
    uncapped: bool
    now: int
    #: Timestamp of the record before the batch: none may be lower.
    floor: int


class Sequenced(NamedTuple):
    """A batch with its seq_nums and timestamps, in the form in which it is stored and read."""

    payload: bytes
    first_timestamp: int
    last_timestamp: int


def assign_timestamps(given: Iterable[int | None], slot: Slot) -> list[int]:
    """One timestamp per record, never decreasing."""
    _, mode, uncapped, now, latest = slot
    ignored = mode is TimestampMode.ARRIVAL
    out: list[int] = []
    for index, stamp in enumerate(given):
        if stamp is None and mode is TimestampMode.CLIENT_REQUIRE:
            raise missing_timestamp(index)
        value: int = now if ignored or stamp is None else stamp
        if value > now and not uncapped:
            value = now
        if value > latest:
            latest = value
        out.append(latest)
    return out


def missing_timestamp(index: int) -> InvalidError:
    return InvalidError(
        f"record {index} has no timestamp: this stream requires one from the client "
        "(timestamp mode client-require)"
    )
