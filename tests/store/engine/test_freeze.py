"""While a store is frozen, its server deletes no file that the frozen state needs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from streamfold.errors import StorageError
from streamfold.model.records import Record, trim_record
from streamfold.store.engine import freeze as freezing
from streamfold.store.engine import slatedb_tables
from streamfold.store.engine.freeze import freeze, is_frozen
from streamfold.store.engine.location import open_location
from streamfold.store.engine.native import SlateManifest
from streamfold.store.engine.slatedb import open_admin
from streamfold.store.settings import StoreSettings
from streamfold.store.store import StreamStore, open_store
from tests.s3 import S3Server, s3_client
from tests.store.catalog.test_snapshots import publish
from tests.store.conftest import BASIN
from tests.store.durable_streams import append, create

#: Upkeep only when a test asks for it; every append is large enough for a file.
SETTINGS = StoreSettings(
    upkeep_interval=3600, reclaim_after=3600, chunk_file_bytes=1, trim_grace=0, leftover_grace=0
)

pytestmark = pytest.mark.usefixtures("no_collections")


def files(folder: Path) -> set[str]:
    """Chunk files and snapshots."""
    return {
        path.name
        for area in ("chunks", "snapshots")
        for path in (folder / area).rglob("*")
        if path.is_file() and "drafts" not in str(path)
    }


async def filled(store: StreamStore) -> None:
    await store.create_basin(BASIN)
    await create(store, "s")
    for number in range(4):
        await append(store, "s", b"%d" % number)
    await publish(store, 2)


async def test_files_of_trimmed_records_and_old_snapshots_stay_while_frozen(
    tmp_path: Path,
) -> None:
    async with open_store(tmp_path.as_uri(), SETTINGS) as store:
        await filled(store)
        before = files(tmp_path)
        assert len(before) == 5
        async with freeze(open_admin(open_location(tmp_path.as_uri()))):
            await store.append(BASIN, "s", [trim_record(3)])
            await store.upkeep()
            await store.upkeep()
            assert files(tmp_path) >= before
        await store.upkeep()
        await store.upkeep()
        assert len(files(tmp_path) & before) < 3


async def test_files_of_a_deleted_stream_stay_while_frozen(tmp_path: Path) -> None:
    async with open_store(tmp_path.as_uri(), SETTINGS) as store:
        await filled(store)
        before = files(tmp_path)
        async with freeze(open_admin(open_location(tmp_path.as_uri()))):
            await store.delete_stream(BASIN, "s")
            await store.upkeep()
            assert files(tmp_path) == before
        await store.upkeep()
        assert not files(tmp_path)
        assert not [info.name for info in (await store.list_streams(BASIN)).items]


async def test_log_files_stay_while_frozen(tmp_path: Path) -> None:
    async with open_store(tmp_path.as_uri(), SETTINGS) as store:
        await filled(store)
        engine = (await store._supervisor.mounted()).mount.engine
        wal = tmp_path / "db" / "wal"
        async with freeze(open_admin(open_location(tmp_path.as_uri()))) as held:
            needed = [path for path in wal.iterdir() if path.stat().st_size]
            assert needed
            await engine.flush()
            await engine.collect()
            assert all(path.exists() for path in needed)
            assert int(min(needed).stem) > held.manifest.replay_after
        await store.append(BASIN, "s", [Record(b"more")])
        await engine.flush()
        await engine.collect()
        assert not all(path.exists() for path in needed)


async def test_log_files_in_a_bucket_stay_while_frozen(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SlateDB's collector would delete them, although a checkpoint needs them (upstream defect 24)."""
    monkeypatch.setattr(slatedb_tables, "_MIN_AGE_MS", 0)
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    url = f"s3://{s3_server.bucket}/freeze"

    def log() -> set[str]:
        listed = s3_client(s3_server).list_objects_v2(
            Bucket=s3_server.bucket, Prefix="freeze/db/wal"
        )
        return {item["Key"] for item in listed["Contents"] if item["Size"]}

    async with open_store(url, SETTINGS) as store:
        await filled(store)
        engine = (await store._supervisor.mounted()).mount.engine
        await engine.collect()  # one that began before the freeze may still delete log files
        await append(store, "s", b"needed")
        async with freeze(open_admin(open_location(url))):
            needed = log()
            assert needed
            await engine.flush()
            await engine.collect()
            assert needed <= log()
        await append(store, "s", b"more")
        await engine.flush()
        await engine.collect()
        assert not needed & log()


async def test_a_freeze_ends_with_its_process(tmp_path: Path) -> None:
    async with open_store(tmp_path.as_uri(), SETTINGS) as store:
        await filled(store)
        admin = open_admin(open_location(tmp_path.as_uri()))
        assert not await is_frozen(admin)
        async with freeze(admin):
            assert await is_frozen(admin)
        assert not await is_frozen(admin)
        await admin.create_checkpoint(freezing._NAME, 1)
        assert not await is_frozen(admin)


def test_a_freeze_that_could_not_be_renewed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    held = freezing.Freeze(SlateManifest(1, 1, 0, 0, 0, None, [], [], []))
    held.check()
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 541)
    with pytest.raises(StorageError, match="start again"):
        held.check()
    held.renewed()
    held.check()
