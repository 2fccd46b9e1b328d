"""`streamfold backup` and `restore`: a store under load, on local disk and on S3, to every record."""

from __future__ import annotations

import asyncio
import json
import time
from base64 import b64decode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from tests.cli.commands import Shell
from tests.cli.loaded_server import DS_LOADED, S2_LOADED, Face, Load, described, fill, server_on
from tests.s3 import S3Server, s3_client


@dataclass(frozen=True)
class Places:
    """Where a store, its backups and the restored store are."""

    shell: Shell
    store: str
    backups: str
    restored: str

    def where(self, place: str) -> tuple[str, ...]:
        """The options of serve for the store at `place`."""
        if place.startswith("s3://"):
            bucket, _, path = place.removeprefix("s3://").partition("/")
            return "--bucket", bucket, "--path", path
        return "--local-root", place

    @asynccontextmanager
    async def serving(self, place: str) -> AsyncIterator[str]:
        async with server_on(self.shell, *self.where(place)) as url:
            yield url


@pytest.fixture(params=["local", "s3"])
def places(request: pytest.FixtureRequest, tmp_path: Path, s3_server: S3Server) -> Places:
    """A store on one kind of storage, and its backups on the other."""
    folder, bucket = str(tmp_path), f"s3://{s3_server.bucket}/backups-of-{request.param}"
    here, there = (folder, bucket) if request.param == "local" else (bucket, folder)
    shell = Shell(s3_server.environment())
    return Places(shell, f"{here}/store", f"{there}/backups", f"{here}/restored")


@asynccontextmanager
async def closing_face(url: str) -> AsyncIterator[Face]:
    with Face(url) as face:
        yield face


async def run(places: Places, *arguments: str) -> dict[str, object]:
    found: dict[str, object] = await asyncio.to_thread(places.shell.json, *arguments)
    return found


async def test_a_backup_under_load_restores_to_every_record(places: Places) -> None:
    async with places.serving(places.store) as url, closing_face(url) as face:
        await asyncio.to_thread(fill, face)
        before = described(face)
        with Load(url, seed=1).running() as load:
            await asyncio.to_thread(load.wait, 12)
            await run(places, "backup", places.store, places.backups)
            await asyncio.to_thread(load.wait, 12)
            s2_acked, ds_acked = load.s2_acked, load.ds_acked
            second = await run(places, "backup", places.store, places.backups)
            await asyncio.to_thread(load.wait, 12)
        # Incremental: most of what the first backup has was not copied again.
        assert int(str(second["copied_bytes"])) < int(str(second["size_bytes"]))
        restored = await run(places, "restore", places.backups, places.restored)
        assert restored["id"] == second["id"]
        checked = await run(places, "check", places.restored)
        assert checked["sound"] is True
        async with places.serving(places.restored) as other, closing_face(other) as copy:
            assert described(copy) == before
            for stream, acked in ((S2_LOADED, s2_acked), (DS_LOADED, ds_acked)):
                copied = copy.records(stream)
                tail = copy.ask("GET", f"/v1/streams/{stream}/records/tail").json()["tail"]
                assert tail["seq_num"] >= acked
                assert sorted(copied) == list(range(min(copied), tail["seq_num"]))
                bodies = {number: b64decode(record["body"]) for number, record in copied.items()}
                known = load.bodies[stream].keys() & bodies.keys()
                assert len(known) >= 8
                assert {n: bodies[n] for n in known} == {n: load.bodies[stream][n] for n in known}
            # The restored store goes its own way, and the original does not notice.
            await asyncio.to_thread(leave_alone, copy)
            assert described(face) == before
            assert face.append(S2_LOADED, b"still the writer") > s2_acked
    sound = await run(places, "check", places.store)
    assert sound["sound"] is True


def leave_alone(copy: Face) -> None:
    """Change the restored store in every way that deletes files."""
    copy.trim(S2_LOADED, copy.append(S2_LOADED, *(b"x" * 100_000 for _ in range(3))))
    for stream in ("fork", "source", "snapshotted"):
        copy.ask("DELETE", f"/v1/streams/{stream}")


async def test_a_backup_that_is_killed_leaves_nothing_to_restore_and_the_next_one_is_whole(
    tmp_path: Path,
) -> None:
    here = str(tmp_path)
    shell, store = Shell({}), f"{here}/store"
    async with server_on(shell, "--local-root", store) as url, closing_face(url) as face:
        await asyncio.to_thread(fill, face)
        with Load(url, seed=2).running() as load:
            await asyncio.to_thread(load.wait, 20)
            unfinished = await killed_backup(shell, store, tmp_path)
            places = Places(shell, store, str(unfinished), f"{here}/restored")
            refused = await asyncio.to_thread(
                places.shell, "restore", places.backups, places.restored
            )
            assert refused.status == 4
            assert refused.stderr.startswith("error: there is no finished backup at ")
            assert not (tmp_path / "restored").exists()
            acked = load.s2_acked
            await run(places, "backup", places.store, places.backups)
        target = f"{places.restored}-2"
        await run(places, "restore", places.backups, target)
        assert (await run(places, "check", target))["sound"] is True
        async with places.serving(target) as other, closing_face(other) as copy:
            tail = copy.ask("GET", f"/v1/streams/{S2_LOADED}/records/tail").json()["tail"]
            assert tail["seq_num"] >= acked


async def killed_backup(shell: Shell, store: str, folder: Path) -> Path:
    """Begin backups until one was killed before it was finished: a machine may be slow to kill."""
    for number in count():
        backups = folder / f"backups-{number}"
        async with shell.running("backup", store, str(backups)) as process:
            await asyncio.to_thread(wait_for_objects, backups / "objects")
            process.kill()
            await process.wait()
        if not any((backups / "backups").glob("*.json")):
            return backups
    raise AssertionError("there is always another number")


def wait_for_objects(folder: Path) -> None:
    """Return once a backup has copied something."""
    while not (folder.exists() and any(folder.rglob("*.sst"))):
        time.sleep(0.002)


async def test_a_restore_that_is_killed_leaves_a_target_that_nobody_takes_for_a_store(
    tmp_path: Path, s3_server: S3Server
) -> None:
    shell = Shell(s3_server.environment())
    bucket = f"s3://{s3_server.bucket}/unfinished"
    for target in (str(tmp_path / "restored"), bucket):
        marker = "db/0-restoring"
        if target == bucket:
            s3_client(s3_server).put_object(Bucket=s3_server.bucket, Key=f"unfinished/{marker}")
            where: tuple[str, ...] = ("--bucket", s3_server.bucket, "--path", "unfinished")
        else:
            (tmp_path / "restored" / "db" / "manifest").mkdir(parents=True)
            (tmp_path / "restored" / "db" / "manifest" / f"{1:020d}.manifest").touch()
            (tmp_path / "restored" / marker).touch()
            where = ("--local-root", target)
        for command in (("serve", *where, "--port", "0"), ("check", target)):
            failed = await asyncio.to_thread(shell, *command, "--json")
            assert failed.status == (1 if command[0] == "serve" else 2)
            line = json.loads(failed.stderr.splitlines()[-1])["error"]["message"]
            assert "was not finished: empty it, and restore the backup again" in line
