"""Inputs that `check`, `backup` and `restore` reject with one sentence and an exit status."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from streamfold.model.records import Record
from streamfold.store import StoreSettings, keys, open_store, rows
from streamfold.store.engine.engine import commit_rows
from streamfold.store.engine.location import open_location
from streamfold.store.engine.slatedb import SlateEngine
from streamfold.store.rows import FormatRow
from tests.cli.commands import Outcome, Shell

BASIN = "refusal-basin"
SETTINGS = StoreSettings(chunk_file_bytes=1)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a closed store and a backup of it."""
    folder = tmp_path_factory.mktemp("refusals")

    async def write() -> None:
        async with open_store((folder / "store").as_uri(), SETTINGS) as store:
            await store.create_basin(BASIN)
            await store.create_stream(BASIN, "orders")
            for number in range(5):
                await store.append(BASIN, "orders", [Record(b"%d" % number)])

    asyncio.run(write())
    Shell({}).ok("backup", str(folder / "store"), str(folder / "backups"))
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "copy"
    shutil.copytree(written, copy)
    return copy


def refused(*arguments: str, status: int) -> str:
    """The sentence with which a command refuses."""
    outcome: Outcome = Shell({})(*arguments)
    assert outcome.status == status, (outcome.status, outcome.stderr)
    assert outcome.text == ""
    assert outcome.stderr.startswith("error: ")
    assert outcome.stderr.count("\n") == 1
    as_json = Shell({})(*arguments, "--json")
    assert (as_json.status, as_json.text) == (status, "")
    assert as_json.error["message"] in outcome.stderr
    return outcome.stderr.removeprefix("error: ").rstrip()


def commands(store: Path, target: Path) -> list[tuple[tuple[str, ...], int, int]]:
    """A check and a backup of `store`: their arguments, and their status if there is no such store."""
    return [(("check", str(store)), 2, 2), (("backup", str(store), str(target)), 4, 1)]


def test_what_is_not_a_store(folder: Path) -> None:
    (folder / "empty").mkdir()
    for name, why in (("empty", "it has no folder 'db'"), ("none", "the folder does not exist")):
        for command, missing, _ in commands(folder / name, folder / "target"):
            said = refused(*command, status=missing)
            assert said == f"there is no store at {folder / name}: {why}"
    assert not (folder / "none").exists()
    assert list((folder / "empty").iterdir()) == []
    assert not (folder / "target").exists()


def test_half_a_store(folder: Path) -> None:
    shutil.rmtree(folder / "store" / "db" / "manifest")
    for command, missing, _ in commands(folder / "store", folder / "target"):
        assert "is only a part of a store: it has no manifest" in refused(*command, status=missing)


def test_a_store_of_a_newer_version(folder: Path) -> None:
    async def write() -> None:
        engine = await SlateEngine.open(open_location((folder / "store").as_uri()))
        await commit_rows(engine, [(keys.FORMAT, rows.encode(FormatRow(99)))])
        await engine.close()

    asyncio.run(write())
    for command, _, failed in commands(folder / "store", folder / "target"):
        said = refused(*command, status=failed)
        assert said.startswith("the store has format 99, but this version reads up to ")
    assert not (folder / "target").exists()


def test_a_target_that_is_not_empty(folder: Path) -> None:
    (folder / "target").mkdir()
    (folder / "target" / "notes.txt").write_text("mine")
    for target in ("target", "store"):
        arguments = ("restore", str(folder / "backups"), str(folder / target))
        assert "is not empty: restore to a new folder or prefix" in refused(*arguments, status=2)
    assert [path.name for path in (folder / "target").iterdir()] == ["notes.txt"]


async def test_a_store_in_use_is_checked_and_backed_up_but_never_restored_over(
    folder: Path,
) -> None:
    store, backups = str(folder / "store"), str(folder / "backups")
    async with open_store((folder / "store").as_uri(), SETTINGS) as running:
        for command in (("check", store), ("backup", store, backups)):
            assert (await asyncio.to_thread(Shell({}), *command)).status == 0
        said = await asyncio.to_thread(refused, "restore", backups, store, status=2)
        assert "is not empty" in said
        assert (await running.append(BASIN, "orders", [Record(b"still")])).tail.seq_num == 6


def test_a_backup_into_its_store_or_around_it(folder: Path) -> None:
    for target in (folder / "store" / "backups", folder):
        said = refused("backup", str(folder / "store"), str(target), status=2)
        assert "are within each other" in said


def test_a_backup_into_another_store(folder: Path) -> None:
    other = folder / "other"
    shutil.copytree(folder / "store", other)
    said = refused("backup", str(folder / "store"), str(other), status=2)
    assert "other is a store: choose a folder or prefix of its own for backups" in said
    assert not (other / "backups").exists()


def test_what_is_not_a_backup(folder: Path) -> None:
    (folder / "empty").mkdir()
    said = refused("restore", str(folder / "empty"), str(folder / "target"), status=4)
    assert said.startswith(f"there is no finished backup at {folder / 'empty'}")
    said = refused("restore", str(folder / "none"), str(folder / "target"), status=4)
    assert said == f"there is no backup at {folder / 'none'}: the folder does not exist"
    named = ("restore", str(folder / "backups"), str(folder / "target"), "--at", "20200101T000000Z")
    assert "there is no finished backup '20200101T000000Z'" in refused(*named, status=4)
    assert not (folder / "target").exists()


@pytest.mark.parametrize("damage", ["cut", "flipped", "missing"])
def test_a_backup_whose_object_is_damaged(folder: Path, damage: str) -> None:
    objects = (folder / "backups" / "objects").rglob("*-*-*")
    victim = next(path for path in objects if path.is_file())
    if damage == "missing":
        victim.unlink()
    elif damage == "cut":
        victim.write_bytes(victim.read_bytes()[:5])
    else:
        victim.write_bytes(bytes(byte ^ 1 for byte in victim.read_bytes()))
    said = first_refusal(folder)
    faults = {"cut": "has 5 of", "flipped": "has other bytes", "missing": "is missing"}
    assert "its object 'objects/" in said
    assert faults[damage] in said
    # Half of a store is left, which nobody takes for one.
    assert "was not finished" in refused("check", str(folder / "target"), status=2)


def first_refusal(folder: Path) -> str:
    """A restore that fails in the middle; the next one would find its target used."""
    outcome = Shell({})("restore", str(folder / "backups"), str(folder / "target"))
    assert outcome.status == 1
    assert outcome.stderr.count("\n") == 1
    return outcome.stderr


def test_a_backup_whose_manifest_is_cut_or_of_a_newer_version(folder: Path) -> None:
    [manifest] = (folder / "backups" / "backups").iterdir()
    content = manifest.read_bytes()
    manifest.write_bytes(content[:100])
    restore = ("restore", str(folder / "backups"), str(folder / "target"))
    assert "is damaged" in refused(*restore, status=1)
    manifest.write_text(json.dumps({**json.loads(content), "format": 2}))
    assert "has format 2, but this version reads up to 1" in refused(*restore, status=1)
    assert not (folder / "target").exists()


def test_old_backups_are_deleted_with_the_objects_that_only_they_need(folder: Path) -> None:
    store, backups = str(folder / "store"), folder / "backups"
    shell = Shell({})

    async def write() -> None:
        async with open_store((folder / "store").as_uri(), SETTINGS) as running:
            await running.append(BASIN, "orders", [Record(b"more")])

    ids = [path.stem for path in (backups / "backups").iterdir()]
    asyncio.run(write())
    second = shell.json("backup", store, str(backups), "--keep", "1")
    assert second["deleted"] == ids
    listed = shell.ok("backup", "--list", str(backups), "--json").objects
    assert [each["id"] for each in listed] == [second["id"]]
    manifest = json.loads((backups / "backups" / f"{second['id']}.json").read_text())
    files = [path for path in (backups / "objects").rglob("*") if path.is_file()]
    objects = {str(path.relative_to(backups)) for path in files}
    assert objects == {file[1] for file in manifest["files"]}
    shell.ok("restore", str(backups), str(folder / "target"))
    assert shell.json("check", str(folder / "target"))["counts"]["records"] == 6
