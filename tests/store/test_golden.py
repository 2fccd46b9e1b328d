"""Every version opens stores of former versions.

`golden/v1` is the data directory of a writer that was killed: with tables, a log that no table has
taken in, a stream and a basin that are being deleted; `expected.json` beside it lists what it holds.
It was written by `python -m tests.store.golden.write tests/store/golden/v1`, once. When the format
changes, write the next one beside it (v2, ...), and keep all old ones.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streamfold.errors import AlreadyExistsError, FormatUnsupportedError
from streamfold.model.configs import StreamConfigLayer
from streamfold.model.records import Record
from streamfold.model.resources import Provision
from streamfold.store import StoreSettings, StreamStore, keys, open_store, rows
from streamfold.store.backup import back_up, restore_backup
from streamfold.store.engine.engine import commit_rows
from streamfold.store.engine.local_disk import LocalDisk, current_boot
from streamfold.store.engine.location import open_location
from streamfold.store.engine.slatedb import SlateEngine
from streamfold.store.inspection import inspect_store
from streamfold.store.log import chunks
from streamfold.store.rows import CleanupRow, FormatRow
from streamfold.store.supervisor import FORMAT_VERSION
from tests.store.golden import content
from tests.store.golden.write import BOOT

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = sorted(path.name for path in GOLDEN.glob("v*"))
#: An hour after the golden store was written.
NOW = content.EPOCH + 3_600_000


@pytest.fixture(params=VERSIONS)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of a golden store."""
    copy = tmp_path / str(request.param)
    shutil.copytree(GOLDEN / request.param, copy)
    return copy


async def open_engine(folder: Path, boot: str) -> SlateEngine:
    location = open_location(folder.as_uri())
    assert location.folder is not None
    return await SlateEngine.open(location, LocalDisk(location.folder, boot=boot))


@asynccontextmanager
async def opened(folder: Path, boot: str = BOOT) -> AsyncIterator[StreamStore]:
    async with open_store(
        folder.as_uri(),
        StoreSettings(upkeep_interval=3600, trim_grace=0),
        now=lambda: NOW,
        opener=lambda: open_engine(folder, boot),
    ) as store:
        yield store


def as_read_today(expected: dict[str, Any]) -> dict[str, Any]:
    """What a golden store holds, with the defaults of members that are younger than it is."""
    for basin in expected.values():
        basin["info"].setdefault("location", "local:disk")
        basin["config"]["default_stream_config"].setdefault("trim_on_snapshot", None)
        for stream in basin["streams"].values():
            stream["config"].setdefault("trim_on_snapshot", None)
    return expected


def test_there_is_a_golden_store_and_it_is_small() -> None:
    assert VERSIONS[0] == "v1"
    for version in VERSIONS:
        files = [path for path in (GOLDEN / version).rglob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in files) < 200_000


@pytest.mark.parametrize("boot", [BOOT, "another"])
async def test_everything_is_read_as_it_was_written(golden: Path, boot: str) -> None:
    """After a crash, and on another machine or after a power cut."""
    expected = as_read_today(msgspec.json.decode((golden / "expected.json").read_bytes()))
    for _ in range(2):
        async with opened(golden, boot) as store:
            assert await content.describe(store) == expected


async def test_a_backup_of_a_former_version_restores_to_the_same_store(
    golden: Path, tmp_path: Path
) -> None:
    backups, restored = tmp_path / "backups", tmp_path / "restored"
    await back_up(str(golden), str(backups))
    await restore_backup(str(backups), str(restored))
    checked = await inspect_store(str(restored))
    assert checked.findings == []
    assert checked.format == int(golden.name[1:])  # neither of the three changes it
    expected = as_read_today(msgspec.json.decode((golden / "expected.json").read_bytes()))
    boot = current_boot()
    assert boot is not None
    async with opened(restored, boot) as store:
        assert await content.describe(store) == expected


def test_what_is_expected_is_what_was_meant() -> None:
    """The file that lists what is in v1, against the calls that wrote it."""
    expected = msgspec.json.decode((GOLDEN / "v1" / "expected.json").read_bytes())
    assert list(expected) == [content.CUSTOM, content.PLAIN, content.SEALED]
    streams = expected[content.PLAIN]["streams"]
    assert list(streams) == sorted(
        ["configured/ströme", "empty", "records", "trimmed", "bare", "fenced"]
    )
    held = {name: [record["seq_num"] for record in streams[name]["records"]] for name in streams}
    assert held["records"] == list(range(317))
    assert (held["trimmed"], held["bare"], held["empty"]) == ([3, 4, 5, 6], [], [])
    tails = {name: streams[name]["tail"]["seq_num"] for name in streams}
    assert (tails["records"], tails["trimmed"], tails["bare"], tails["empty"]) == (317, 7, 3, 0)
    assert streams["fenced"]["fencing_token"] == "second"


async def test_work_that_was_left_is_done(golden: Path) -> None:
    engine = await open_engine(golden, BOOT)
    left = [
        rows.decode(value, CleanupRow)
        async for page in engine.scan(keys.CLEANUPS_START, keys.CLEANUPS_END)
        for _, value in page
    ]
    await engine.close()
    assert CleanupRow(content.PLAIN, "going", purge=True) in left
    async with opened(golden) as store:
        await content.finish_deletions(store)
        await store.create_basin(content.GOING)
        await store.create_stream(content.PLAIN, "going")
        assert (await store.check_tail(content.PLAIN, "going")).seq_num == 0


async def test_the_store_continues(golden: Path) -> None:
    async with opened(golden) as store:
        ack = await store.append(content.PLAIN, "bare", [Record(b"next")], match_seq_num=3)
        assert ack.end.seq_num == 4
        ack = await store.append(content.PLAIN, "fenced", [Record(b"c")], fencing_token="second")
        await store.create_stream(content.PLAIN, "new")
        await store.append(content.PLAIN, "new", [Record(b"own")])
    async with opened(golden) as store:
        assert (await store.check_tail(content.PLAIN, "bare")).seq_num == 4
        assert await store.check_tail(content.PLAIN, "fenced") == ack.end
        assert (await store.check_tail(content.PLAIN, "new")).seq_num == 1


async def test_creations_are_still_known_by_their_tokens(golden: Path) -> None:
    async with opened(golden) as store:
        _, result = await store.create_basin(
            content.CUSTOM, content.CUSTOM_CONFIG, request_token=content.TOKEN
        )
        assert result is Provision.NOOP
        ref = content.PLAIN, "configured/ströme"
        _, result = await store.create_stream(*ref, content.LAYER, request_token=content.TOKEN)
        assert result is Provision.NOOP
        with pytest.raises(AlreadyExistsError):
            await store.create_stream(*ref, StreamConfigLayer(), request_token=content.TOKEN)


async def test_chunks_of_the_second_format_are_compressed(golden: Path) -> None:
    engine = await open_engine(golden, BOOT)
    pages = engine.scan(keys.chunk(0, 0), keys.chunk(2**63, 0))
    packed = [chunks.decode(value).packed async for page in pages for _, value in page]
    await engine.close()
    assert any(packed) == (golden.name != "v1")


async def test_chunks_of_the_third_format_may_be_in_files(golden: Path) -> None:
    engine = await open_engine(golden, BOOT)
    pages = engine.scan(keys.chunk(0, 0), keys.chunk(2**63, 0))
    in_files = [chunks.decode(value).in_file async for page in pages for _, value in page]
    await engine.close()
    assert any(in_files) == (golden.name not in ("v1", "v2"))


async def test_an_older_version_refuses_a_store_that_this_one_has_opened(golden: Path) -> None:
    async with opened(golden):
        pass
    engine = await open_engine(golden, BOOT)
    value = await engine.get(keys.FORMAT)
    await engine.close()
    assert rows.decode(value or b"", FormatRow) == FormatRow(FORMAT_VERSION)


async def test_a_newer_format_is_refused(golden: Path) -> None:
    engine = await open_engine(golden, BOOT)
    await commit_rows(engine, [(keys.FORMAT, rows.encode(FormatRow(99)))])
    await engine.close()
    with pytest.raises(FormatUnsupportedError, match="99"):
        async with opened(golden):
            pass
