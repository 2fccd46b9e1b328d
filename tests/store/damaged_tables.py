"""Flips bytes at chosen places of a table of SlateDB."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

from streamfold.store.engine import table_check
from streamfold.store.engine.location import open_location
from streamfold.store.engine.native import TableView
from streamfold.store.engine.slatedb import open_admin

_FLIPPED = 8


class Place(enum.Enum):
    """A part of a table."""

    #: The block with the first rows: format, counters, basins, streams.
    FIRST_BLOCK = "first block"
    #: A block of records only.
    RECORDS = "block of records"
    #: The block with the last rows.
    LAST_BLOCK = "last block"
    FILTER = "filter"
    INDEX = "index"
    #: Statistics, which nothing reads.
    STATISTICS = "statistics"
    FOOTER = "footer"


@dataclass(frozen=True, slots=True)
class Table:
    """The file of a table, and where its parts are."""

    path: Path
    view: TableView
    #: Offset and first key of each block.
    blocks: list[tuple[int, bytes]]

    @property
    def name(self) -> str:
        """As messages name the file."""
        return f"db/compacted/{self.path.name}"

    def flip(self, place: Place) -> None:
        """Damage one part of the table."""
        view, blocks = self.view, self.blocks
        self.flip_at(
            {
                Place.FIRST_BLOCK: 10,
                Place.RECORDS: blocks[len(blocks) // 2][0] + 100,
                Place.LAST_BLOCK: blocks[-1][0] + 10,
                Place.FILTER: view.filter_offset + 10,
                Place.INDEX: view.index_offset + 10,
                Place.STATISTICS: view.index_offset + view.index_length + 10,
                Place.FOOTER: self.path.stat().st_size - _FLIPPED,
            }[place]
        )

    def flip_at(self, offset: int) -> None:
        data = bytearray(self.path.read_bytes())
        for at in range(offset, offset + _FLIPPED):
            data[at] ^= 0xFF
        self.path.write_bytes(data)

    def block_of(self, key: bytes) -> int:
        """The number of the block that has the row `key`."""
        return max(number for number, (_, first) in enumerate(self.blocks) if first <= key)


async def only_table(root: Path) -> Table:
    """The one table of the closed store in `root`."""
    location = open_location(root.as_uri())
    manifest = await open_admin(location).read_manifest()
    assert manifest is not None
    [view] = manifest.views
    path = root / "db" / "compacted" / view.file
    data = path.read_bytes()
    index = data[view.index_offset : view.index_offset + view.index_length - 4]
    return Table(path, view, table_check._blocks(index))
