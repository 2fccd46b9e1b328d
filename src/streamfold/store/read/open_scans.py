"""The scans that readers have open, and how much memory these may take together."""

from __future__ import annotations

import asyncio
from typing import Protocol

#: Bytes for what all readers of one store have read ahead and not yet taken.
_BYTES_MAX = 128 << 20
#: Bytes that storage itself holds for an open scan, measured with SlateDB: with an eager one, which
#: fetches several blocks of each table at once, and with one that is not.
_EAGER_BYTES = 40 << 20
_LEAN_BYTES = 8 << 20
#: Pages that are fetched at the same time; one that is being fetched cannot be given up.
_FETCHES_MAX = 16


class ReadsAhead(Protocol):
    """A reader with an open scan."""

    def give_up(self) -> None:
        """Close the scan and forget what was read ahead; a later read begins where this one stopped."""
        ...


class OpenScans:
    """Bounds what readers hold: beyond the limit, those that have waited longest lose their scans.

    A client that takes its answer slowly keeps nothing but its position; to open its scan once more
    takes about a millisecond on local disk.
    """

    def __init__(self) -> None:
        self.fetching = asyncio.Semaphore(_FETCHES_MAX)
        #: Longest unused first.
        self._held: dict[ReadsAhead, int] = {}
        self._total = 0

    @property
    def room_for_eager(self) -> bool:
        """Whether one more reader may fetch far ahead, which is fast and takes much memory."""
        return self._total + _EAGER_BYTES <= _BYTES_MAX

    def hold(self, reader: ReadsAhead, eager: bool, read_ahead: int) -> None:
        """Count what `reader` has now; others may lose theirs for it."""
        self.release(reader)
        size = (_EAGER_BYTES if eager else _LEAN_BYTES) + read_ahead
        while self._held and self._total + size > _BYTES_MAX:
            oldest = next(iter(self._held))
            self.release(oldest)
            oldest.give_up()
        self._held[reader] = size
        self._total += size

    def release(self, reader: ReadsAhead) -> None:
        """Count nothing for `reader`, which cannot lose its scan from here on."""
        self._total -= self._held.pop(reader, 0)
