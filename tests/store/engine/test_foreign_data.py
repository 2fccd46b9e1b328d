"""Data of other programs is recognised where a store is to be, and left alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from streamfold import _native
from streamfold.errors import FormatUnsupportedError
from streamfold.store.engine.native import SlateDatabase, prepare_rows
from streamfold.store.store import open_store, wall_clock
from tests.cli.commands import Shell
from tests.s3 import run_s3_server, s3_client


async def write_as_s2_lite(root: Path, path: str) -> None:
    """A database of SlateDB where s2-lite keeps its own: in the location itself."""
    storage = _native.Storage.local(str(root), syncs_log=False)
    database = await SlateDatabase.open(storage, path, {}, _native.Clock(wall_clock()), 1 << 20)
    await database.commit(prepare_rows([(b"\x01some-basin", b"{}")]))
    await database.close(flush=True)


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


async def test_a_folder_of_s2_lite_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    await write_as_s2_lite(tmp_path, "lite")
    before = files(tmp_path)
    with pytest.raises(FormatUnsupportedError, match=r"s2-lite.*streamfold copy"):
        async with open_store(f"file://{tmp_path}/lite"):
            pass
    assert files(tmp_path) == before
    ended = Shell({})("serve", "--local-root", str(tmp_path / "lite"), "--port", "0", "--json")
    assert (ended.status, ended.error["code"]) == (1, "format_unsupported")


@pytest.mark.parametrize("power_cut", [False, True])
async def test_files_of_others_within_a_store_are_left_alone(
    tmp_path: Path, power_cut: bool
) -> None:
    url = tmp_path.as_uri()
    async with open_store(url) as store:
        await store.create_basin("some-basin")
    others = [tmp_path / folder / ".DS_Store" for folder in ("db/wal", "db/manifest", "chunks")]
    for path in others:
        path.write_bytes(b"theirs")
    if power_cut:
        marker = tmp_path / "db" / "restore-point"
        marker.write_text(json.dumps(json.loads(marker.read_text()) | {"boot": "before"}))
    async with open_store(url) as store:
        await store.upkeep()
        assert [basin.name for basin in (await store.list_basins()).items] == ["some-basin"]
    assert [path.read_bytes() for path in others] == [b"theirs"] * 3


async def test_a_store_is_not_taken_for_another_program(tmp_path: Path) -> None:
    for _ in range(2):
        async with open_store(f"file://{tmp_path}"):
            pass
    with pytest.raises(FormatUnsupportedError, match=f"give file://{tmp_path}\\)"):
        async with open_store(f"file://{tmp_path}/db"):
            pass


def test_a_bucket_of_s2_lite_is_refused() -> None:
    with run_s3_server() as s3:
        s3_client(s3).put_object(
            Bucket=s3.bucket, Key=f"lite/manifest/{1:020d}.manifest", Body=b"manifest"
        )
        shell = Shell(s3.environment())
        options = ("--bucket", s3.bucket, "--port", "0", "--json")
        ended = shell("serve", "--path", "lite", *options)
        assert (ended.status, ended.error["code"]) == (1, "format_unsupported")
        assert "streamfold copy" in ended.error["message"]
