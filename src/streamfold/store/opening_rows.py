"""The rows that an opening of the store starts from.

A row that cannot be read never counts as missing: it costs what depends on it, and nothing else.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, field

from streamfold.errors import DataCorruptError
from streamfold.store import keys, rows
from streamfold.store.damage import KnownDamage
from streamfold.store.engine.engine import Engine, TableDamagedError
from streamfold.store.rows import BasinRow, CounterRow, Row, SpaceRow
from streamfold.store.upkeep.live_bytes import LiveBytes


@dataclass(slots=True)
class DeletingBasins:
    """Basins that are deleted but still have rows: their streams take no appends and reads."""

    names: set[str] = field(default_factory=set)
    #: Where rows of basins cannot be read: some of these may be deleted, too.
    unknown: list[TableDamagedError] = field(default_factory=list)

    def damage_of(self, name: str) -> TableDamagedError | None:
        """Why it is unknown whether this basin is deleted; None if that is known."""
        if not self.unknown:
            return None
        key = keys.basin(name)
        spans = ((damage.span, damage) for damage in self.unknown)
        return next((damage for span, damage in spans if span.start <= key < span.end), None)


async def own_row(engine: Engine, key: bytes, kind: type[Row]) -> Row | DataCorruptError | None:
    """A row; None if there is none, an error if it cannot be read."""
    try:
        value = await engine.get(key)
        return None if value is None else rows.decode(value, kind)
    except DataCorruptError as error:
        return error


async def next_stream_id(engine: Engine, damage: KnownDamage) -> int | DataCorruptError:
    """The id of the next stream; an error if nobody knows which ids streams have had."""
    counter = await own_row(engine, keys.STREAM_IDS, CounterRow)
    if isinstance(counter, DataCorruptError):
        effect = "streams cannot be created: the next stream id is unknown"
        return damage.note_row(effect, counter)
    return 1 if counter is None else counter.following


async def live_bytes(engine: Engine) -> LiveBytes:
    """The live bytes of the store.

    A store without a stream holds nothing. One of an earlier version was never counted, and one whose
    count cannot be read is counted again.
    """
    space = await own_row(engine, keys.SPACE, SpaceRow)
    if isinstance(space, SpaceRow):
        return LiveBytes(space.live, space.deleted)
    counter = await own_row(engine, keys.STREAM_IDS, CounterRow)
    return LiveBytes(0, 0) if space is None and counter is None else LiveBytes(None)


async def deleting_basins(engine: Engine) -> DeletingBasins:
    """The basins whose deletion is not finished."""
    basins = DeletingBasins()
    start, end = keys.basins_from("", after=False), keys.BASINS_END
    while start < end:
        try:
            async with aclosing(engine.scan(start, end)) as pages:
                async for page in pages:
                    for key, value in page:
                        if rows.decode(value, BasinRow).deleted_at is not None:
                            basins.names.add(keys.basin_name(key))
            break
        except TableDamagedError as error:
            basins.unknown.append(error)
            start = error.span.end
    return basins
