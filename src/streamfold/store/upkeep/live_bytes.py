"""Counts the bytes of live rows as chunks of records are added and deleted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streamfold.store import keys, rows
from streamfold.store.engine.engine import Op, Row
from streamfold.store.rows import SpaceRow

#: Bytes of a chunk's row besides its value: the key, and a table's overhead per row.
_ROW_BYTES = 17 + 16


def stored_size(page: Sequence[Row]) -> int:
    """Return the bytes that the chunks of `page` take in a table."""
    return sum(len(value) + _ROW_BYTES for _, value in page)


@dataclass(slots=True)
class LiveBytes:
    """The bytes that a store's chunks take in its tables.

    Other rows are few and small. `Reclaimer` corrects the total after merging all tables.
    """

    #: None while unknown; negative if too little was counted before.
    total: int | None
    #: Bytes deleted but still in tables; None while unknown. The total is exact only to about a
    #: percent, and without this count its error would look like deleted rows.
    deleted: int | None = None
    #: Bytes written, and bytes deleted, since the store was opened.
    added: int = 0
    removed: int = 0
    #: Commits of any rows since then.
    commits: int = 0

    @property
    def balance(self) -> int:
        """Bytes written since the store was opened, minus those deleted."""
        return self.added - self.removed

    @property
    def changed(self) -> int:
        """A number that grows with everything written or deleted."""
        return self.added + self.removed

    def add(self, chunks: int, value_bytes: int) -> None:
        """Count durable chunks whose values have `value_bytes` in all."""
        size = value_bytes + chunks * _ROW_BYTES
        self.added += size
        if self.total is not None:
            self.total += size

    def remove(self, size: int) -> None:
        """Count deleted chunks of `size` bytes, as measured by `stored_size`."""
        self.removed += size
        if self.total is not None:
            self.total -= size
        if self.deleted is not None:
            self.deleted += size

    def drop(self, size: int) -> None:
        """Count `size` bytes of deleted rows that merges have dropped."""
        if self.deleted is not None:
            self.deleted = max(0, self.deleted - size)

    def dead_of(self, stored: int) -> int:
        """Return the bytes of dead rows in tables with `stored` bytes in total."""
        if self.total is None:
            return 0
        return min(stored, stored - self.total if self.deleted is None else self.deleted)

    @property
    def row(self) -> Op | None:
        """The row to commit so that a restart begins with these counts."""
        return self._row(0)

    def row_without(self, size: int) -> list[Op]:
        """Return the row to commit together with the deletion of `size` bytes.

        Without it, a crash after the deletion would leave a total that hides the deleted bytes. A
        total without the latest appends is harmless: at worst, a merge finds nothing to drop.
        """
        row = self._row(size)
        return [] if row is None else [row]

    def _row(self, removed: int) -> Op | None:
        if self.total is None:
            return None
        deleted = None if self.deleted is None else self.deleted + removed
        return keys.SPACE, rows.encode(SpaceRow(max(0, self.total - removed), deleted))
