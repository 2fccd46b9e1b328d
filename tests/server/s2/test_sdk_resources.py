"""Basins and streams through the official Python client."""

from __future__ import annotations

import pytest
from s2_sdk import (
    S2,
    BasinConfig,
    EnsureStatus,
    S2Basin,
    S2ServerError,
    StreamConfig,
    Timestamping,
    TimestampingMode,
)

from tests.server.conftest import BASIN, STREAM


async def test_a_created_basin_is_listed_and_has_its_config(s2: S2) -> None:
    config = BasinConfig(
        default_stream_config=StreamConfig(storage_class="standard", retention_policy=3600),
        create_stream_on_append=True,
    )
    created = await s2.create_basin("another-basin", config=config)
    assert created.name == "another-basin"
    assert created.deleted_at is None
    listed = await s2.list_basins(prefix="another")
    assert [info.name for info in listed.items] == ["another-basin"]
    assert not listed.has_more
    found = await s2.get_basin_config("another-basin")
    assert found.create_stream_on_append
    assert found.default_stream_config.storage_class == "standard"
    assert found.default_stream_config.retention_policy == 3600


async def test_creating_a_basin_twice_is_refused(s2: S2) -> None:
    with pytest.raises(S2ServerError) as refused:
        await s2.create_basin(BASIN)
    assert (refused.value.status_code, refused.value.code) == (409, "resource_already_exists")


async def test_ensuring_a_basin_creates_updates_and_then_does_nothing(s2: S2) -> None:
    first = await s2.ensure_basin("ensured-basin")
    assert first.status is EnsureStatus.CREATED
    config = BasinConfig(create_stream_on_read=True)
    assert (
        await s2.ensure_basin("ensured-basin", config=config)
    ).status is EnsureStatus.CONFIG_UPDATED
    assert (
        await s2.ensure_basin("ensured-basin", config=config)
    ).status is EnsureStatus.CONFIG_UNCHANGED


async def test_a_basin_is_reconfigured_member_by_member(s2: S2) -> None:
    changed = BasinConfig(default_stream_config=StreamConfig(retention_policy="infinite"))
    await s2.reconfigure_basin(BASIN, config=changed)
    config = await s2.reconfigure_basin(BASIN, config=BasinConfig(create_stream_on_append=True))
    assert config.default_stream_config.retention_policy == "infinite"
    assert config.create_stream_on_append


async def test_a_deleted_basin_shows_when_it_was_deleted_or_is_gone(s2: S2) -> None:
    await s2.delete_basin(BASIN)
    await s2.delete_basin(BASIN, ignore_not_found=True)
    listed = await s2.list_basins(prefix=BASIN)
    assert all(info.deleted_at is not None for info in listed.items)


async def test_basins_are_listed_page_by_page_in_byte_order(s2: S2) -> None:
    names = [f"paged-basin-{number}" for number in range(5)]
    for name in reversed(names):
        await s2.create_basin(name)
    page = await s2.list_basins(prefix="paged-", limit=2)
    assert [info.name for info in page.items] == names[:2]
    assert page.has_more
    rest = await s2.list_basins(prefix="paged-", start_after=names[1], limit=0)
    assert [info.name for info in rest.items] == names[2:]
    assert [info.name async for info in s2.list_all_basins(prefix="paged-")] == names


async def test_a_basin_that_does_not_exist_is_not_found(s2: S2) -> None:
    for request in (
        s2.get_basin_config("missing-basin"),
        s2.basin("missing-basin").get_stream_config("orders"),
    ):
        with pytest.raises(S2ServerError) as missing:
            await request
        assert (missing.value.status_code, missing.value.code) == (404, "basin_not_found")


async def test_a_created_stream_has_the_defaults_of_its_basin(s2: S2, basin: S2Basin) -> None:
    defaults = StreamConfig(retention_policy=86400, timestamping=Timestamping(uncapped=True))
    await s2.reconfigure_basin(BASIN, config=BasinConfig(default_stream_config=defaults))
    info = await basin.create_stream("inherits", config=StreamConfig(storage_class="standard"))
    assert info.name == "inherits"
    assert info.cipher is None
    config = await basin.get_stream_config("inherits")
    assert config.storage_class == "standard"
    assert config.retention_policy == 86400
    assert config.timestamping.uncapped
    assert config.timestamping.mode is TimestampingMode.CLIENT_PREFER
    assert config.delete_on_empty_min_age == 0


async def test_a_stream_is_reconfigured_member_by_member(basin: S2Basin) -> None:
    await basin.reconfigure_stream(
        STREAM, config=StreamConfig(timestamping=Timestamping(mode=TimestampingMode.ARRIVAL))
    )
    config = await basin.reconfigure_stream(
        STREAM, config=StreamConfig(timestamping=Timestamping(uncapped=True))
    )
    assert config.timestamping.mode is TimestampingMode.ARRIVAL
    assert config.timestamping.uncapped


async def test_ensuring_a_stream_resets_what_is_not_mentioned(basin: S2Basin) -> None:
    wanted = StreamConfig(retention_policy=60)
    assert (await basin.ensure_stream("ensured", config=wanted)).status is EnsureStatus.CREATED
    assert (
        await basin.ensure_stream("ensured", config=wanted)
    ).status is EnsureStatus.CONFIG_UNCHANGED
    assert (await basin.ensure_stream("ensured")).status is EnsureStatus.CONFIG_UPDATED
    assert (await basin.get_stream_config("ensured")).retention_policy == 604_800


@pytest.mark.parametrize("name", ["a/b", "with space", "ünï/cödé", "100%", "a?b#c", "a//b"])
async def test_a_stream_may_have_any_name(basin: S2Basin, name: str) -> None:
    await basin.create_stream(name)
    assert [info.name async for info in basin.list_all_streams(prefix=name)] == [name]
    assert (await basin.get_stream_config(name)).storage_class == "express"
    assert (await basin.stream(name).check_tail()).seq_num == 0
    await basin.delete_stream(name)


async def test_a_stream_whose_name_ends_like_a_route_is_not_mistaken_for_it(basin: S2Basin) -> None:
    await basin.create_stream("a/records", config=StreamConfig(retention_policy=77))
    assert (await basin.get_stream_config("a/records")).retention_policy == 77


async def test_a_deleted_stream_is_gone_or_going(basin: S2Basin) -> None:
    await basin.delete_stream(STREAM)
    with pytest.raises(S2ServerError) as gone:
        await basin.get_stream_config(STREAM)
    assert gone.value.code in ("stream_deletion_pending", "stream_not_found")


@pytest.mark.parametrize(
    ("config", "code"),
    [
        (StreamConfig(retention_policy=0), "invalid"),
        (StreamConfig(storage_class="gold"), "bad_json"),
    ],
)
async def test_a_bad_configuration_is_refused(
    basin: S2Basin, config: StreamConfig, code: str
) -> None:
    with pytest.raises(S2ServerError) as refused:
        await basin.create_stream("refused", config=config)
    assert refused.value.code == code
