"""Bounds the memory that the open scans of all readers take together."""

from __future__ import annotations

import asyncio
from typing import Protocol

#: Bytes that all readers of one store may have read ahead.
_BYTES_MAX = 128 << 20
#: Bytes that SlateDB itself holds for an open scan, measured: for an eager one, which fetches several
#: blocks of each table at once, and for any other.
_EAGER_BYTES = 40 << 20
_LEAN_BYTES = 8 << 20
#: Pages fetched at the same time; their scans cannot be closed meanwhile.
_FETCHES_MAX = 16


class ReadsAhead(Protocol):
    """A reader with an open scan."""

    def give_up(self) -> None:
        """Close the scan and drop what was read ahead; a later read continues from the position."""
        ...


class OpenScans:
    """Bounds what readers hold: beyond the limit, those idle longest lose their scans.

    A slow client then keeps only its position; reopening its scan takes about a millisecond on local
    disk.
    """

    def __init__(self) -> None:
        self.fetching = asyncio.Semaphore(_FETCHES_MAX)
        #: Longest unused first.
        self._held: dict[ReadsAhead, int] = {}
        self._total = 0

    @property
    def room_for_eager(self) -> bool:
        """Whether one more reader may fetch far ahead, which is fast but takes much memory."""
        return self._total + _EAGER_BYTES <= _BYTES_MAX

    def hold(self, reader: ReadsAhead, eager: bool, read_ahead: int) -> None:
        """Count the scan of `reader`; other readers may lose theirs for it."""
        self.release(reader)
        size = (_EAGER_BYTES if eager else _LEAN_BYTES) + read_ahead
        while self._held and self._total + size > _BYTES_MAX:
            oldest = next(iter(self._held))
            self.release(oldest)
            oldest.give_up()
        self._held[reader] = size
        self._total += size

    def release(self, reader: ReadsAhead) -> None:
        """Stop counting `reader`, which cannot lose its scan from here on."""
        self._total -= self._held.pop(reader, 0)
