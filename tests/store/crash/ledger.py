"""Appends that a writer reported, and so the records that storage must have."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TypeAlias

import msgspec

from streamfold.model.records import Header, Record, fence_record, trim_record

#: Names of the headers with a record's batch, and its index in the batch.
BATCH, INDEX = b"batch", b"index"


class Plan(msgspec.Struct, frozen=True, omit_defaults=True):
    """One append, from which all its records follow."""

    batch: str
    stream: str
    #: Data records; a command comes between the first and the second of them.
    count: int
    #: Bytes of each body.
    size: int
    match_seq_num: int | None = None
    fencing_token: str | None = None
    fence: str | None = None
    trim: int | None = None

    def records(self) -> list[Record]:
        content = random.Random(self.batch)
        made = [
            Record(
                content.randbytes(self.size),
                (Header(BATCH, self.batch.encode()), Header(INDEX, b"%d" % self._index(index))),
            )
            for index in range(self.count)
        ]
        if self.fence is not None:
            made.insert(1, fence_record(self.fence))
        if self.trim is not None:
            made.insert(1, trim_record(self.trim))
        return made

    def _index(self, index: int) -> int:
        commands = (self.fence is not None) + (self.trim is not None)
        return index + (commands if index else 0)

    def trim_point(self, start: int) -> int:
        """Where the stream begins once this batch is in it at `start`, by its own trim command."""
        return 0 if self.trim is None else min(self.trim, start + 2)

    @property
    def writer(self) -> tuple[str, int]:
        """Who made this batch, and as its how manyeth: batches are named so."""
        name, _, number = self.batch.rpartition(".")
        return name, int(number)


class Tried(msgspec.Struct, frozen=True, tag=True):
    """An append is about to be made: from now on it may or may not be there."""

    plan: Plan


class Stored(msgspec.Struct, frozen=True, tag=True):
    """The batch is in its stream for good: acknowledged, or found there after a restart."""

    stream: str
    batch: str
    start: int
    end: int
    first_timestamp: int
    last_timestamp: int
    acknowledged: bool = True


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The append failed in a way that says that nothing happened."""

    stream: str
    batch: str


class OutcomeUnknown(msgspec.Struct, frozen=True, tag=True):
    """The append failed in a way that leaves open what happened."""

    stream: str
    batch: str


class Verified(msgspec.Struct, frozen=True, tag=True):
    """Storage was compared with the ledger; what was not found until now is lost for good."""

    #: First seq_num that each stream still has.
    heads: dict[str, int]
    #: The fencing token in force in each, and the seq_num of the latest command known to have set one.
    fences: dict[str, tuple[int, str]]


Event: TypeAlias = Tried | Stored | Refused | OutcomeUnknown | Verified


class StreamLedger(msgspec.Struct):
    """What must be true of one stream."""

    #: Batches that may be there, by name.
    unknown: dict[str, Plan] = {}
    #: Batches that are there, with where they are.
    stored: dict[str, tuple[Plan, Stored]] = {}
    #: Batches that are not there.
    refused: set[str] = set()
    trim_point: int = 0
    tail: int = 0
    #: The fencing token and the seq_num of the command that set it.
    fence: tuple[int, str] = (-1, "")


class Ledger(msgspec.Struct):
    """What must be true of a store, by all that its writers reported."""

    streams: dict[str, StreamLedger] = {}

    def apply(self, event: Event) -> None:
        if isinstance(event, Tried):
            stream = self.streams.setdefault(event.plan.stream, StreamLedger())
            stream.unknown[event.plan.batch] = event.plan
        elif isinstance(event, Stored):
            self._note_stored(self.streams[event.stream], event)
        elif isinstance(event, Refused):
            stream = self.streams[event.stream]
            del stream.unknown[event.batch]
            stream.refused.add(event.batch)
        elif isinstance(event, Verified):
            for name, stream in self.streams.items():
                _forget(stream, event.heads[name])
                stream.fence = event.fences[name]

    def _note_stored(self, stream: StreamLedger, event: Stored) -> None:
        plan = stream.unknown.pop(event.batch)
        stream.stored[event.batch] = plan, event
        stream.tail = max(stream.tail, event.end)
        stream.trim_point = max(stream.trim_point, plan.trim_point(event.start))
        if plan.fence is not None:
            stream.fence = max(stream.fence, (event.start + 1, plan.fence))

    def unsettled(self) -> Iterator[Plan]:
        for stream in self.streams.values():
            yield from stream.unknown.values()


def _forget(stream: StreamLedger, head: int) -> None:
    """Drop what was checked and cannot be checked again: a batch without an entry is an error."""
    stream.unknown.clear()
    stream.refused.clear()
    for batch, (_, stored) in list(stream.stored.items()):
        if stored.end <= head:
            del stream.stored[batch]
