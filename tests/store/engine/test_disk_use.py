"""What a store reports as its use of local disk is what its files take."""

from __future__ import annotations

from pathlib import Path

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
