"""The rows that the store needs when it opens.

An unreadable row never counts as missing: whatever depends on it fails, and nothing else.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, field

from streamfold.errors import DataCorruptError
from streamfold.store import keys, rows
from streamfold.store.damage import KnownDamage
from streamfold.store.engine.engine import Engine, KeySpan, TableDamagedError
from streamfold.store.rows import BasinRow, CounterRow, Row, SpaceRow
from streamfold.store.upkeep.live_bytes import LiveBytes


@dataclass(slots=True)
class DeletingBasins:
    """Deleted basins that still have rows. Their streams reject appends and reads."""

    names: set[str] = field(default_factory=set)
    #: Spans with unreadable basin rows, and why. Some of those basins may be deleted too.
    unknown: list[tuple[KeySpan, DataCorruptError]] = field(default_factory=list)

    def damage_of(self, name: str) -> DataCorruptError | None:
        """Return why it is unknown whether this basin is deleted, or None if that is known."""
        if not self.unknown:
            return None
        key = keys.basin(name)
        return next((why for span, why in self.unknown if span.start <= key < span.end), None)

    def add(self, key: bytes, value: bytes) -> None:
        """Add a basin if its row marks it as deleted."""
        try:
            if rows.decode(value, BasinRow).deleted_at is not None:
                self.names.add(keys.basin_name(key))
        except DataCorruptError as error:
            self.unknown.append((KeySpan(key, key + b"\x00"), error))


async def own_row(engine: Engine, key: bytes, kind: type[Row]) -> Row | DataCorruptError | None:
    """Return a row, None if it does not exist, or an error if it cannot be read."""
    try:
        value = await engine.get(key)
        return None if value is None else rows.decode(value, kind)
    except DataCorruptError as error:
        return error


async def next_stream_id(engine: Engine, damage: KnownDamage) -> int | DataCorruptError:
    """Return the id of the next stream, or an error if it is unknown which ids have been used."""
    counter = await own_row(engine, keys.STREAM_IDS, CounterRow)
    if isinstance(counter, DataCorruptError):
        effect = "streams cannot be created: the next stream id is unknown"
        return damage.note_row(effect, counter)
    return 1 if counter is None else counter.following


async def live_bytes(engine: Engine) -> LiveBytes:
    """Return the store's live bytes.

    A store without streams holds nothing. The bytes are unknown, and counted again, in a store of
    an earlier version, which never counted them, and in one whose count is unreadable.
    """
    space = await own_row(engine, keys.SPACE, SpaceRow)
    if isinstance(space, SpaceRow):
        return LiveBytes(space.live, space.deleted)
    counter = await own_row(engine, keys.STREAM_IDS, CounterRow)
    return LiveBytes(0, 0) if space is None and counter is None else LiveBytes(None)


async def deleting_basins(engine: Engine) -> DeletingBasins:
    """Return the basins whose deletion is unfinished."""
    basins = DeletingBasins()
    start, end = keys.basins_from("", after=False), keys.BASINS_END
    while start < end:
        try:
            async with aclosing(engine.scan(start, end)) as pages:
                async for page in pages:
                    for key, value in page:
                        basins.add(key, value)
            break
        except TableDamagedError as error:
            basins.unknown.append((error.span, error))
            start = error.span.end
    return basins
