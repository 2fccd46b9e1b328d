"""The books of `bench.soak`: a checksum per seq_num, as acknowledged and as read back."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from zlib import crc32

#: Stands for a seq_num of which nothing is known; the checksum of no body that is used here.
_NOTHING = 0


@dataclass
class StreamLedger:
    """What one stream must hold, and what it was seen to hold."""

    name: str
    #: Whether appends go through Durable Streams, and whether its messages are JSON.
    durable: bool = False
    json: bool = False
    #: Whether the soak trims it; others have retention by age.
    trimming: bool = True
    acked: array[int] = field(default_factory=lambda: array("I"))
    seen: array[int] = field(default_factory=lambda: array("I"))
    #: Checksums of records without an answer: they may be there or not.
    doubtful: set[int] = field(default_factory=set)
    #: The first seq_num that was not read back yet.
    audited: int = 0
    #: Everything before is trimmed.
    trimmed: int = 0
    #: Violations, in words.
    wrong: list[str] = field(default_factory=list)

    @property
    def path(self) -> str:
        return f"/v1/streams/{self.name}"

    def acknowledge(self, first: int, bodies: Sequence[bytes]) -> None:
        for seq_num, body in enumerate(bodies, first):
            if _put(self.acked, seq_num, crc32(body)):
                self.wrong.append(f"seq_num {seq_num} was acknowledged twice")

    def doubt(self, bodies: Sequence[bytes]) -> None:
        self.doubtful.update(crc32(body) for body in bodies)

    def audit(self, seq_num: int, body: bytes) -> None:
        """Note a record that a reader got; they come in order, without gaps."""
        if seq_num != self.audited:
            self.wrong.append(f"seq_num {seq_num} was read where {self.audited} was due")
        _put(self.seen, seq_num, crc32(body))
        self.audited = seq_num + 1

    def judge(self) -> list[str]:
        """What is wrong: lost, changed or moved records, and records that nobody sent."""
        wrong = self.wrong.copy()
        lost = sum(seq_num >= len(self.seen) for seq_num in range(len(self.acked)))
        if lost:
            wrong.append(f"{lost} acknowledged records are missing at the end")
        for seq_num, checksum in enumerate(self.seen):
            acked = self.acked[seq_num] if seq_num < len(self.acked) else _NOTHING
            if acked not in (_NOTHING, checksum):
                wrong.append(f"seq_num {seq_num} has other bytes than were acknowledged")
            elif acked == _NOTHING and checksum not in self.doubtful:
                wrong.append(f"seq_num {seq_num} was never acknowledged, and refused or not sent")
        return [f"{self.name}: {one}" for one in wrong[:5]]


def _put(column: array[int], seq_num: int, checksum: int) -> bool:
    """Write one cell; returns whether something was there."""
    while len(column) <= seq_num:
        column.append(_NOTHING)
    before, column[seq_num] = column[seq_num], checksum or 1
    return before != _NOTHING


class Ledger:
    """All streams."""

    def __init__(self, streams: Sequence[StreamLedger]) -> None:
        self.streams = list(streams)
        self._number = 0

    def next_number(self) -> int:
        self._number += 1
        return self._number

    @property
    def acknowledged(self) -> int:
        return sum(one != _NOTHING for stream in self.streams for one in stream.acked)

    @property
    def doubtful(self) -> int:
        return sum(len(stream.doubtful) for stream in self.streams)

    def judge(self) -> list[str]:
        return [line for stream in self.streams for line in stream.judge()]
