"""Bytes of rows that can be read: counted as chunks of records come and go."""

from __future__ import annotations

from dataclasses import dataclass

#: Bytes of a chunk besides its value: the key, and what a table keeps of a row.
_ROW_BYTES = 17 + 16
#: Bytes of a chunk's header, which is part of the value.
_HEADER_BYTES = 40


@dataclass(slots=True)
class LiveBytes:
    """Bytes that the chunks of a store take in its tables.

    Other rows are few and small. `Reclaimer` sets the total right when a merge of all tables has
    shown what is there.
    """

    #: None as long as nobody knows.
    total: int | None
    #: Bytes written and bytes deleted since the store was opened.
    added: int = 0
    removed: int = 0
    #: Commits since then, of whatever rows.
    commits: int = 0

    @property
    def changed(self) -> int:
        """Grows with everything that is written or deleted."""
        return self.added + self.removed

    def add(self, payload_bytes: int) -> None:
        """A chunk with so many bytes of payload has become durable."""
        size = payload_bytes + _HEADER_BYTES + _ROW_BYTES
        self.added += size
        self._change(size)

    def remove(self, value_bytes: int) -> None:
        """A stored chunk of so many bytes was deleted."""
        size = value_bytes + _ROW_BYTES
        self.removed += size
        self._change(-size)

    def _change(self, size: int) -> None:
        if self.total is not None:
            self.total = max(0, self.total + size)
