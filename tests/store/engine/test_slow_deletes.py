"""Large files are freed in parts: commits need not wait for a device that discards whole tables."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from streamfold.store.engine import partial_io
from streamfold.store.engine.engine import commit_rows
from streamfold.store.engine.local_disk import LocalDisk
from streamfold.store.engine.location import open_location
from streamfold.store.engine.slatedb import SlateEngine
from tests.store.small_tables import use_small_tables

PART = partial_io._FREED_BYTES


class Cuts:
    """The real truncation, with a record of the sizes before and after."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[int, int]] = []
        self._cut = os.truncate
        monkeypatch.setattr(os, "truncate", self._truncate)

    def _truncate(self, path: Path, size: int) -> None:
        self.made.append((path.stat().st_size, size))
        self._cut(path, size)


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> Cuts:
    return Cuts(monkeypatch)


def test_a_large_file_shrinks_part_by_part(tmp_path: Path, cuts: Cuts) -> None:
    path = tmp_path / "table"
    path.write_bytes(bytes(3 * PART + 1))
    partial_io.shrink(path)
    assert cuts.made == [(3 * PART + 1, 2 * PART + 1), (2 * PART + 1, PART + 1), (PART + 1, 1)]


def test_a_file_with_another_name_keeps_its_content(tmp_path: Path, cuts: Cuts) -> None:
    path, backup = tmp_path / "table", tmp_path / "backup"
    path.write_bytes(bytes(3 * PART))
    backup.hardlink_to(path)
    partial_io.shrink(path)
    partial_io.delete_slowly([path])
    assert cuts.made == []
    assert not path.exists()
    assert backup.stat().st_size == 3 * PART


def test_files_that_another_process_deleted_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "table"
    path.write_bytes(b"1")
    partial_io.shrink(tmp_path / "gone")
    partial_io.delete_slowly([tmp_path / "gone", path])
    assert list(tmp_path.iterdir()) == []


async def replaced_tables(engine: SlateEngine, folder: Path) -> set[str]:
    """Names of tables that a merge has replaced, and that the collector may delete."""
    for number in range(3):
        await commit_rows(engine, [(b"%d" % number, os.urandom(PART + 1))])
        await engine.flush()
    replaced = {path.name for path in (folder / "compacted").iterdir()}
    assert await engine.merge((), young=True)
    await engine.flush()
    return replaced


async def collect_until_deleted(engine: SlateEngine, folder: Path, names: set[str]) -> None:
    while names & {path.name for path in (folder / "compacted").iterdir()}:
        await engine.collect()
        await commit_rows(engine, [(b"more", b"")])


async def test_replaced_tables_are_freed_in_parts(
    tmp_path: Path, cuts: Cuts, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_small_tables(monkeypatch.setattr)
    location = open_location(tmp_path.as_uri())
    assert location.folder is not None
    engine = await SlateEngine.open(location, LocalDisk(location.folder))
    names = await replaced_tables(engine, location.folder)
    await collect_until_deleted(engine, location.folder, names)
    assert len(cuts.made) >= 3
    assert list((location.folder / "deleted").iterdir()) == []
    assert [await engine.get(b"%d" % number) is not None for number in range(3)] == [True] * 3
    await engine.close()


async def test_a_collection_finishes_one_that_was_interrupted(
    tmp_path: Path, cuts: Cuts, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_small_tables(monkeypatch.setattr)
    location = open_location(tmp_path.as_uri())
    assert location.folder is not None
    kept = location.folder / "deleted"
    kept.mkdir(parents=True)
    (kept / "left-over.sst").write_bytes(bytes(PART + 1))
    engine = await SlateEngine.open(location, LocalDisk(location.folder))
    await engine.collect()
    assert cuts.made == [(PART + 1, 1)]
    assert list(kept.iterdir()) == []
    await engine.close()


async def test_tables_are_deleted_at_once_without_hard_links(
    tmp_path: Path, cuts: Cuts, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_small_tables(monkeypatch.setattr)

    def refuse(path: Path, target: Path) -> None:
        raise OSError("this file system has no hard links")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    location = open_location(tmp_path.as_uri())
    assert location.folder is not None
    engine = await SlateEngine.open(location, LocalDisk(location.folder))
    names = await replaced_tables(engine, location.folder)
    await collect_until_deleted(engine, location.folder, names)
    assert cuts.made == []
    await engine.close()
