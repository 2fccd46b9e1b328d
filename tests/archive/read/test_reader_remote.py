"""Archives in S3, and the cache that spares a second download."""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import streamfold.archive
from streamfold.archive import Archive, ArtifactCorruptError, Cache
from streamfold.archive.destinations.destination import Destination
from streamfold.archive.formats import format_of
from streamfold.archive.read.decoding import Decoding
from streamfold.archive.read.part_files import PartFiles
from streamfold.blob import BlobStore, open_blob_store
from streamfold.errors import BlobUnavailableError, InvalidError
from streamfold.testing.blob_faults import FaultyBlobStore, Operation
from streamfold.testing.faults import Fault, FaultKind, ScriptedFaults
from tests.archive.reading import Consumer, bucket_at, names_by_id, state_at
from tests.archive.tables import at, changes, open_writer, rows
from tests.s3 import S3Server, s3_client

STATE = {1: "a", 3: "c", 4: "d"}


class CountingStore(FaultyBlobStore):
    """A store that counts the files that are fetched."""

    def __init__(self, inner: BlobStore, plan: ScriptedFaults | None = None) -> None:
        super().__init__(inner, plan or ScriptedFaults())
        self.fetched: list[str] = []

    async def stream(self, key: str, chunk_size: int = 1 << 20) -> AsyncIterator[bytes]:
        self.fetched.append(key)
        async for piece in super().stream(key, chunk_size):
            yield piece


async def write_table(destination: Destination) -> None:
    writer = await open_writer(destination, formats=[format_of("parquet"), format_of("jsonl")])
    await writer.write_base(rows({1: "a", 2: "b"}), "1", reason="first")
    await writer.write_diff(changes(("DELETE", 2, None), ("INSERT", 3, "c")), "1", "2")
    await writer.write_diff(changes(("INSERT", 4, "d")), "2", "3")


async def counted(cache: Cache | None) -> tuple[CountingStore, Archive]:
    store = CountingStore(open_blob_store("memory:"))
    await write_table(at(store))
    return store, await Archive.load(PartFiles(at(store), cache), Decoding())


async def test_an_archive_in_s3_is_read_with_the_options_of_its_storage(
    s3_url: str, s3_server: S3Server
) -> None:
    await write_table(bucket_at(s3_url, s3_server))
    archive = await streamfold.archive.open(s3_url, options=s3_server.options())
    assert await state_at(archive) == STATE
    assert (await archive.verify()).ok
    seen = Consumer({1: "a", 2: "b"})
    async for item in archive.changes("1"):
        seen.take(item)
    assert seen.state == STATE


async def test_a_changed_object_in_s3_is_found_by_its_hash(
    s3_url: str, s3_server: S3Server, tmp_path: Path
) -> None:
    await write_table(bucket_at(s3_url, s3_server))
    archive = await streamfold.archive.open(
        s3_url, cache=tmp_path, formats=["jsonl"], options=s3_server.options()
    )
    client = s3_client(s3_server)
    prefix = s3_url.removeprefix(f"s3://{s3_server.bucket}/")
    [part] = archive.manifest.base.formats["jsonl"].parts
    key = f"{prefix}/{part.path}"
    body = client.get_object(Bucket=s3_server.bucket, Key=key)["Body"].read()
    client.put_object(Bucket=s3_server.bucket, Key=key, Body=body.replace(b'"b"', b'"B"'))
    with pytest.raises(ArtifactCorruptError, match="SHA-256"):
        await archive.table()
    assert [path for path in _entries(tmp_path) if path.name == part.sha256] == []
    client.put_object(Bucket=s3_server.bucket, Key=key, Body=body)
    assert await state_at(archive) == STATE


async def test_files_in_the_cache_are_not_fetched_again(tmp_path: Path) -> None:
    store, archive = await counted(Cache(tmp_path))
    for _ in range(3):
        assert await state_at(archive) == STATE
    assert len(store.fetched) == 3
    assert {path.name for path in _entries(tmp_path)} == {
        part.sha256
        for artifact in archive.manifest.artifacts
        for part in artifact.formats["parquet"].parts
    }


async def test_without_a_cache_every_read_fetches(tmp_path: Path) -> None:
    store, archive = await counted(None)
    for _ in range(2):
        assert await state_at(archive) == STATE
    assert len(store.fetched) == 6


async def test_a_damaged_file_in_the_cache_is_fetched_again(tmp_path: Path) -> None:
    store, archive = await counted(Cache(tmp_path))
    await archive.table()
    path = _entries(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert await state_at(archive) == STATE
    assert len(store.fetched) == 4


async def test_the_cache_keeps_to_its_bytes_and_drops_the_longest_unused(tmp_path: Path) -> None:
    _, archive = await counted(Cache(tmp_path))
    await archive.table()
    base, first, second = (
        Cache(tmp_path).path(str(artifact.formats["parquet"].parts[0].sha256))
        for artifact in archive.manifest.artifacts
    )
    for age, path in enumerate((second, base, first)):
        os.utime(path, (1_000_000 + age, 1_000_000 + age))
    room = sum(path.stat().st_size for path in (base, first))
    Cache(tmp_path, room).evict()
    assert sorted(_entries(tmp_path)) == sorted([base, first])
    assert Cache(tmp_path).find(base.name) == base
    Cache(tmp_path, base.stat().st_size).evict()
    assert _entries(tmp_path) == [base]


async def test_a_cache_without_room_still_serves_the_table(tmp_path: Path) -> None:
    _, archive = await counted(Cache(tmp_path, 0))
    assert await state_at(archive) == STATE
    assert len(_entries(tmp_path)) <= 1
    with pytest.raises(InvalidError, match="negative"):
        Cache(tmp_path, -1)
    with pytest.raises(InvalidError, match="name another"):
        Cache(tmp_path / "lock" / "below a file")


def test_an_eviction_waits_for_one_that_may_have_listed_the_files_before(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 0)
    for name in ("a" * 64, "b" * 64):
        cache.path(name).parent.mkdir()
        cache.path(name).write_bytes(b"cached")
    with (tmp_path / "lock").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        evicting = threading.Thread(target=cache.evict)
        evicting.start()
        assert len(_entries(tmp_path)) == 2
    evicting.join()
    assert _entries(tmp_path) == []


async def test_what_a_dead_process_left_in_the_cache_goes_when_it_is_old(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    old, fresh = tmp_path / "draft-old", tmp_path / "draft-fresh"
    for path in (old, fresh):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    cache.evict()
    assert not old.exists()
    assert fresh.exists()


async def test_a_failed_fetch_leaves_nothing_in_the_cache(tmp_path: Path) -> None:
    memory = open_blob_store("memory:")
    await write_table(at(memory))
    faults = ScriptedFaults({Operation.STREAM: [Fault(FaultKind.CUT, amount=100)]})
    store = CountingStore(memory, faults)
    archive = await Archive.load(PartFiles(at(store), Cache(tmp_path)), Decoding())
    with pytest.raises(BlobUnavailableError):
        await archive.table()
    assert _drafts(tmp_path) == []
    assert await state_at(archive) == STATE


_READ = """
import asyncio, sys
import streamfold.archive
from streamfold.archive import Cache
from pathlib import Path

async def main(url, folder, room):
    for _ in range(5):
        archive = await streamfold.archive.open(url, cache=Cache(Path(folder), int(room)))
        table = await archive.table()
        print(sorted(zip(table["id"].to_pylist(), table["name"].to_pylist())))

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("room", [0, 1 << 30])
async def test_several_processes_share_a_cache(
    s3_url: str, s3_server: S3Server, tmp_path: Path, room: int
) -> None:
    await write_table(bucket_at(s3_url, s3_server))
    environment = {**os.environ, **s3_server.environment()}
    command = [sys.executable, "-c", _READ, s3_url, str(tmp_path), str(room)]
    running = [
        await asyncio.create_subprocess_exec(
            *command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(3)
    ]
    ended = await asyncio.gather(*(process.communicate() for process in running))
    expected = f"{sorted(STATE.items())}\n" * 5
    assert [(out.decode(), err.decode()) for out, err in ended] == [(expected, "")] * 3
    assert _drafts(tmp_path) == []


async def test_reading_on_stops_fetching_when_it_is_given_up(tmp_path: Path) -> None:
    _, archive = await counted(Cache(tmp_path))
    batches = archive.batches()
    first = await anext(batches)
    await batches.aclose()
    assert set(names_by_id(first)) <= set(STATE)
    assert _drafts(tmp_path) == []


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("??/*"))


def _drafts(folder: Path) -> list[Path]:
    return sorted(folder.glob("draft-*"))
