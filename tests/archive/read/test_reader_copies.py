"""Copied archives, and files that are not next to their manifest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import streamfold.archive
from streamfold.archive import ArtifactCorruptError, CommitConflictError
from streamfold.archive.maintenance.export import export_archive
from streamfold.archive.manifest.model import Part
from streamfold.archive.read.reader import list_archives
from tests.archive.read.test_reader_published import BASE, ROWS, artifact, lines, publish
from tests.archive.reading import HISTORY, bucket_at, folder_at, reopened, state_at, write_history
from tests.archive.tables import changes, open_writer, rows
from tests.s3 import S3Server, s3_client


async def test_a_moved_folder_is_the_same_archive(tmp_path: Path) -> None:
    await write_history(tmp_path / "before")
    (tmp_path / "before").rename(tmp_path / "after it was moved")
    archive = await reopened(tmp_path / "after it was moved")
    assert await state_at(archive) == HISTORY["31"]
    assert (await archive.verify()).ok


async def test_an_export_has_every_state_and_sends_only_what_is_missing(tmp_path: Path) -> None:
    writer = await write_history(tmp_path / "origin")
    archive = await reopened(tmp_path / "origin")
    target = folder_at(tmp_path / "copy")
    seen: list[Part] = []
    first = await export_archive(archive, target, seen.append)
    assert (first.files, len(seen)) == (6, 6)
    copy = await reopened(tmp_path / "copy")
    for position, state in HISTORY.items():
        assert await state_at(copy, position) == state
    assert all(part.uri.startswith(copy.uri) for part in copy.manifest.parts())
    await writer.write_diff(changes(("INSERT", 9, "i")), "31", "40")
    await archive.refresh()
    assert (await export_archive(archive, target)).files == 1
    await copy.refresh()
    assert await state_at(copy) == HISTORY["31"] | {9: "i"}
    assert (await export_archive(archive, target)).files == 0


async def test_an_export_never_touches_another_archive(tmp_path: Path) -> None:
    await write_history(tmp_path / "origin")
    other = await open_writer(folder_at(tmp_path / "other"), ids="other")
    await other.write_base(rows({1: "other"}), "99", reason="first")
    archive = await reopened(tmp_path / "origin")
    with pytest.raises(CommitConflictError, match="another archive"):
        await export_archive(archive, folder_at(tmp_path / "other"))
    there = await reopened(tmp_path / "other")
    assert await state_at(there) == {1: "other"}
    blobs = folder_at(tmp_path / "other").blobs
    assert len([meta async for meta in blobs.list("epoch=")]) == 1


async def test_a_damaged_file_is_not_exported(tmp_path: Path) -> None:
    await write_history(tmp_path / "origin")
    archive = await reopened(tmp_path / "origin")
    [part] = archive.manifest.base.parts()
    (tmp_path / "origin" / part.path).write_bytes(b"x" * part.size_bytes)
    target = folder_at(tmp_path / "copy")
    with pytest.raises(ArtifactCorruptError, match="SHA-256"):
        await export_archive(archive, target)
    assert await target.read() is None


async def test_an_archive_of_another_writer_is_exported_again_and_again(tmp_path: Path) -> None:
    origin = tmp_path / "origin"
    publish(origin, [artifact(origin, lines(ROWS), None, BASE, 3)])
    target = folder_at(tmp_path / "copy")
    await export_archive(await streamfold.archive.open(origin), target)
    grown = [*ROWS, {"id": 7, "name": "g"}]
    publish(origin, [artifact(origin, lines(grown), None, "0/1A2B500", 4)])
    await export_archive(await streamfold.archive.open(origin), target)
    copy = await streamfold.archive.open(tmp_path / "copy")
    assert (copy.head, len(await copy.table())) == ("0/1A2B500", 4)
    await export_archive(await streamfold.archive.open(origin), target)
    rewritten = artifact(origin, lines(ROWS[:1]), None, "0/1A2B500", 1)
    publish(origin, [rewritten])
    with pytest.raises(CommitConflictError, match="another archive"):
        await export_archive(await streamfold.archive.open(origin), target)


async def test_files_elsewhere_in_a_bucket_are_found_by_their_uri(
    s3_url: str, s3_server: S3Server
) -> None:
    folder = bucket_at(f"{s3_url}/files", s3_server)
    writer = await open_writer(folder)
    await writer.write_base(rows({1: "a"}), "1", reason="first")
    manifest = await folder.blobs.get("manifest.json")
    beside = bucket_at(f"{s3_url}/manifests", s3_server)
    await beside.blobs.put("manifest.json", manifest)
    archive = await streamfold.archive.open(f"{s3_url}/manifests", options=s3_server.options())
    assert await state_at(archive) == {1: "a"}


async def test_a_manifest_in_a_bucket_does_not_lead_to_local_files(
    s3_url: str, s3_server: S3Server, tmp_path: Path
) -> None:
    await write_history(tmp_path)
    data = (tmp_path / "manifest.json").read_bytes()
    assert tmp_path.as_uri() in json.loads(data)["artifacts"][0]["formats"]["jsonl"]["uri"]
    prefix = s3_url.removeprefix(f"s3://{s3_server.bucket}/")
    s3_client(s3_server).put_object(
        Bucket=s3_server.bucket, Key=f"{prefix}/manifest.json", Body=data
    )
    archive = await streamfold.archive.open(s3_url, options=s3_server.options())
    with pytest.raises(ArtifactCorruptError, match="is not in s3://"):
        await archive.table()


async def test_archives_below_a_folder_are_listed_in_order(tmp_path: Path) -> None:
    for name in ("b", "a/deep", "c"):
        await write_history(tmp_path / name)
    (tmp_path / "c" / "notes-manifest.json").write_text("no manifest")
    found = [uri async for uri, _ in list_archives(folder_at(tmp_path))]
    assert found == [f"{tmp_path.as_uri()}/{name}/" for name in ("a/deep", "b", "c")]
