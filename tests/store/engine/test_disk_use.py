"""A store's reported disk use equals the size of its files."""

from __future__ import annotations

from pathlib import Path

from streamfold.store import open_store
from streamfold.store.engine.slatedb_tables import sizes_of


async def test_every_file_below_the_folder_counts_and_tables_are_named(tmp_path: Path) -> None:
    files = {
        "restore-point": 7,
        "wal/1.sst": 300,
        "wal/2.sst": 0,
        "compacted/a.sst": 5,
        "x/y/z": 11,
    }
    for name, size in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size))
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    total, tables = await sizes_of(tmp_path, None)()
    assert (total, tables) == (sum(files.values()), {"a.sst": 5})


async def test_a_folder_that_does_not_exist_takes_nothing(tmp_path: Path) -> None:
    assert await sizes_of(tmp_path / "absent", None)() == (0, {})


async def test_an_opening_deletes_what_a_killed_process_was_writing(tmp_path: Path) -> None:
    async with open_store(f"file://{tmp_path}") as store:
        await store.create_basin("test-basin")
    log = tmp_path / "db/wal"
    drafts = [tmp_path / "db/compacted/01M.sst#1", log / f"{newest(log).name}#2"]
    for draft in drafts:
        draft.parent.mkdir(exist_ok=True)
        draft.write_bytes(bytes(1 << 20))
    async with open_store(f"file://{tmp_path}") as store:
        assert len((await store.list_basins()).items) == 1
    assert not [draft for draft in drafts if draft.exists()]


async def test_an_opening_leaves_the_log_file_alone_that_a_replaced_process_is_writing(
    tmp_path: Path,
) -> None:
    """That process links the draft to the file by name, and must not find another one there."""
    async with open_store(f"file://{tmp_path}") as store:
        await store.create_basin("test-basin")
    log = tmp_path / "db/wal"
    following = log / f"{int(newest(log).stem) + 1:020}.sst"
    draft = log / f"{following.name}#1"
    draft.write_bytes(b"of another process")
    async with open_store(f"file://{tmp_path}"):
        assert draft.read_bytes() == b"of another process"
        assert following.exists()
    async with open_store(f"file://{tmp_path}"):
        assert not draft.exists()


def newest(log: Path) -> Path:
    return max(path for path in log.iterdir() if path.suffix == ".sst")
