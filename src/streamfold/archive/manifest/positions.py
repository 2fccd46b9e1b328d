"""Positions and times in a manifest: text with a defined order.

A custom source brings its own `PositionOrder`. The name of the order goes into the manifest, and
readers of that archive need the same order.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from streamfold.archive.errors import PositionInvalidError
from streamfold.errors import InvalidError

#: Digits of the largest 64-bit number, so that all positions in names have the same length.
SEQ_NUM_DIGITS = 20
#: The number of fractional digits varies between writers. Python keeps six.
_PATTERN = re.compile(r"(\d{4}-\d\d-\d\dT(?:[01]\d|2[0-3]):\d\d:\d\d)(\.\d{1,9})?(Z|[+-]\d\d:\d\d)")


class PositionOrder(Protocol):
    """Defines how the positions of one kind of source compare. Stateless and picklable."""

    @property
    def name(self) -> str:
        """The order's name in manifests."""
        ...

    def rank(self, position: str) -> int:
        """Return a number that grows with the position. Raises if the text is not a position."""
        ...

    def sortable(self, position: str) -> str:
        """Return the position for use in an object key, where keys sort in position order."""
        ...


@dataclass(frozen=True, slots=True)
class SeqNumOrder:
    """Decimal sequence numbers. "-1" is before the first record."""

    name: str = "seq_num"

    def rank(self, position: str) -> int:
        # Not all callers are type-checked, and a record without a position must not get through.
        if not isinstance(position, str) or not re.fullmatch(r"-1|0|[1-9][0-9]{0,19}", position):
            raise PositionInvalidError(
                f"position {position!r} is not a sequence number: use decimal digits without leading "
                "zeros, or -1 for before the first record"
            )
        return int(position)

    def sortable(self, position: str) -> str:
        return f"{self.rank(position):0{SEQ_NUM_DIGITS}d}"


@dataclass(frozen=True, slots=True)
class LsnOrder:
    """PostgreSQL log sequence numbers, `X/X` in hexadecimal. "" is before all of them.

    Laredo writes "" for a table that it loaded before any change arrived.
    """

    name: str = "lsn"

    def rank(self, position: str) -> int:
        if position == "":
            return -1
        match = isinstance(position, str) and re.fullmatch(
            r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})", position
        )
        if not match:
            raise PositionInvalidError(
                f"position {position!r} is not an LSN: use two hexadecimal numbers, as in 0/1A2B"
            )
        return int(match[1], 16) << 32 | int(match[2], 16)

    def sortable(self, position: str) -> str:
        rank = self.rank(position)
        if rank < 0:
            raise PositionInvalidError(
                "an empty position cannot be part of a file name: begin at 0/0"
            )
        return f"{rank >> 32:08X}_{rank & 0xFFFFFFFF:08X}"

    def position(self, rank: int) -> str:
        """Return the position with this rank."""
        return f"{rank >> 32:X}/{rank & 0xFFFFFFFF:X}"


SEQ_NUM = SeqNumOrder()
LSN = LsnOrder()
#: Built-in orders.
KNOWN_ORDERS: dict[str, PositionOrder] = {SEQ_NUM.name: SEQ_NUM, LSN.name: LSN}


def format_time(moment: datetime) -> str:
    """Return a time as text for the manifest. Raises InvalidError for a time without a zone."""
    if moment.tzinfo is None:
        raise InvalidError(f"time {moment.isoformat()} has no zone: give it in UTC")
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def parse_time(text: str) -> datetime:
    """Return the time in the text, truncated to microseconds."""
    match = _PATTERN.fullmatch(text)
    try:
        if match:
            zone = "+00:00" if match[3] == "Z" else match[3]
            return datetime.fromisoformat(match[1] + (match[2] or "")[:7] + zone).astimezone(UTC)
    except (ValueError, OverflowError):
        pass  # no such day, hour or year: rejected below, like any other text
    raise InvalidError(f"time {text!r} is not RFC 3339 with a zone, as 2026-06-03T12:00:00.5Z")
