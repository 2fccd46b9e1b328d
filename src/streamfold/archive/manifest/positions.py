"""The order of a source's positions: text in the manifest, compared by rank.

A source of your own brings a `PositionOrder`; its name goes into the manifest, and readers of that
archive need the same order.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from streamfold.archive.errors import PositionInvalidError


class PositionOrder(Protocol):
    """How positions of one kind of source compare; stateless and picklable."""

    @property
    def name(self) -> str:
        """What the manifest calls it."""
        ...

    def rank(self, position: str) -> int:
        """Return a number that grows with the position; refuse text that is not a position."""
        ...

    def sortable(self, position: str) -> str:
        """Return the position as part of an object key, so that keys sort as positions do."""
        ...


#: Digits of the largest 64-bit number, so that names of any two positions have one length.
SEQ_NUM_DIGITS = 20


@dataclass(frozen=True, slots=True)
class SeqNumOrder:
    """Decimal sequence numbers; "-1" is before the first record."""

    name: str = "seq_num"

    def rank(self, position: str) -> int:
        # Callers are not all type-checked, and a record without a position must not get through.
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
    """Log sequence numbers of Postgres, `X/X` in hexadecimal."""

    name: str = "lsn"

    def rank(self, position: str) -> int:
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
        return f"{rank >> 32:08X}_{rank & 0xFFFFFFFF:08X}"


SEQ_NUM = SeqNumOrder()
LSN = LsnOrder()
#: Orders that are built in.
KNOWN_ORDERS: dict[str, PositionOrder] = {SEQ_NUM.name: SEQ_NUM, LSN.name: LSN}
