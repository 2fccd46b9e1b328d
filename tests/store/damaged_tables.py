"""Flips bytes at chosen places of a table of SlateDB."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamfold.store.engine import table_check
from streamfold.store.engine.location import open_location
from streamfold.store.engine.slatedb import open_admin
from streamfold.store.engine.slatedb_binding import read_manifest
from streamfold.store.engine.slatedb_tables import table_views

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
    info: Any
    #: Offset and first key of each block.
    blocks: list[tuple[int, bytes]]

    @property
    def name(self) -> str:
        """As messages name the file."""
        return f"db/compacted/{self.path.name}"

    def flip(self, place: Place) -> None:
        """Damage one part of the table."""
        info, blocks = self.info, self.blocks
        self.flip_at(
            {
                Place.FIRST_BLOCK: 10,
                Place.RECORDS: blocks[len(blocks) // 2][0] + 100,
                Place.LAST_BLOCK: blocks[-1][0] + 10,
                Place.FILTER: info.filter_offset + 10,
                Place.INDEX: info.index_offset + 10,
                Place.STATISTICS: info.stats_offset + 10,
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
    [view] = table_views(await read_manifest(open_admin(location)))
    path = root / "db" / "compacted" / f"{view.sst.id.value}.sst"
    info, data = view.sst.info, path.read_bytes()
    index = data[info.index_offset : info.index_offset + info.index_len - 4]
    return Table(path, info, table_check._blocks(index))
