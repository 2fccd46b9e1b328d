"""Deletions blocked by damaged storage wait for the next pass."""

from __future__ import annotations

from pathlib import Path

from tests.store.conftest import BASIN, Clock, at_rest
from tests.store.damaged_tables import Table
from tests.store.read.test_damage import damage_at, opened, table

__all__ = ["table"]


async def test_a_basin_whose_records_are_damaged_does_not_keep_the_background_busy(
    tmp_path: Path, table: Table, clock: Clock
) -> None:
    damage_at(table, 100)
    async with opened(tmp_path, clock) as store:
        await store.delete_basin(BASIN)
        await at_rest(store)
        [basin] = (await store.list_basins()).items
        assert basin.deleted_at is not None


async def test_a_basin_goes_soon_after_its_streams(
    tmp_path: Path, table: Table, clock: Clock
) -> None:
    async with opened(tmp_path, clock) as store:
        await store.delete_basin(BASIN)
        await at_rest(store)
        assert not (await store.list_basins()).items
