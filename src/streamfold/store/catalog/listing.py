"""Lists basins, streams, access tokens and producers in byte order, and forks, page by page."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from typing import TypeVar

from streamfold.model.access_tokens import AccessToken
from streamfold.model.names import StreamName
from streamfold.model.resources import BasinInfo, Fork, Page, ProducerProgress, StreamInfo
from streamfold.store import keys, rows
from streamfold.store.catalog.catalog import basin_info, stream_info
from streamfold.store.engine.engine import Engine
from streamfold.store.rows import BasinRow, ForkRow, ProducerRow, StreamRow, TokenRow

#: Maximum items per page.
LIST_MAX = 1000
#: Rows read and decoded in one step: 1000 would block the event loop for 20 ms.
_FIRST_ROWS = 128

Item = TypeVar("Item")


async def list_basins(engine: Engine, prefix: str, start_after: str, limit: int) -> Page[BasinInfo]:
    after = start_after >= prefix and bool(start_after)
    start = keys.basins_from(start_after if after else prefix, after=after)

    def item(key: bytes, value: bytes) -> BasinInfo | None:
        name = keys.basin_name(key)
        return basin_info(name, rows.decode(value, BasinRow)) if name.startswith(prefix) else None

    return await _read_page(engine, start, keys.BASINS_END, limit, item)


async def list_streams(
    engine: Engine, basin: str, prefix: str, start_after: str, limit: int
) -> Page[StreamInfo]:
    after = start_after.encode() >= prefix.encode() and bool(start_after)
    start = keys.streams_from(basin, start_after if after else prefix, after=after)

    def item(key: bytes, value: bytes) -> StreamInfo | None:
        name = keys.stream_names(key)[1]
        return stream_info(name, rows.decode(value, StreamRow)) if name.startswith(prefix) else None

    return await _read_page(engine, start, keys.streams_end(basin), limit, item)


async def list_access_tokens(
    engine: Engine, prefix: str, start_after: str, limit: int
) -> Page[AccessToken]:
    after = start_after.encode() >= prefix.encode() and bool(start_after)
    start = keys.tokens_from(start_after if after else prefix, after=after)

    def item(key: bytes, value: bytes) -> AccessToken | None:
        shown = keys.token_id(key).startswith(prefix)
        return rows.decode(value, TokenRow).token if shown else None

    return await _read_page(engine, start, keys.TOKENS_END, limit, item)


async def list_producers(
    engine: Engine, stream_id: int, start_after: str, limit: int
) -> Page[ProducerProgress]:
    def item(key: bytes, value: bytes) -> ProducerProgress:
        row = rows.decode(value, ProducerRow)
        return ProducerProgress(keys.producer_id(key), row.epoch, row.seq + 1, row.at)

    return await _read_page(engine, *keys.producers_after(stream_id, start_after), limit, item)


async def list_forks(
    engine: Engine, stream_id: int, start_after: int, limit: int
) -> tuple[list[Fork], int | None]:
    """Return forks in creation order, and the id to start after for the next page, if any."""

    def item(key: bytes, value: bytes) -> tuple[int, ForkRow]:
        return keys.fork_id(key), rows.decode(value, ForkRow)

    span = keys.forks_span(stream_id, start_after + 1)
    page = await _read_page(engine, *span, limit, item)
    stored = await engine.get_many([keys.stream(row.basin, row.stream) for _, row in page.items])
    forks = []
    for (fork_id, fork), value in zip(page.items, stored, strict=True):
        row = rows.decode(value, StreamRow) if value is not None else None
        # A name in use again belongs to another stream: upkeep is still removing this fork.
        if row is not None and row.id == fork_id and row.traits and row.traits.origin:
            origin = row.traits.origin
            forks.append(Fork(StreamName(fork.stream), origin, row.created_at, row.deleted_at))
    return forks, page.items[-1][0] if page.has_more else None


async def _read_page(
    engine: Engine,
    start: bytes,
    end: bytes,
    limit: int,
    item: Callable[[bytes, bytes], Item | None],
) -> Page[Item]:
    """Read up to `limit` items from `start` on.

    Stops where `item` returns None: the prefix ends.
    """
    most = limit if 0 < limit <= LIST_MAX else LIST_MAX
    items: list[Item] = []
    async with aclosing(engine.scan(start, end, first=min(most + 1, _FIRST_ROWS))) as pages:
        async for page in pages:
            for key, value in page:
                next_item = item(key, value)
                if next_item is None or len(items) == most:
                    return Page(tuple(items), has_more=next_item is not None)
                items.append(next_item)
    return Page(tuple(items), has_more=False)
