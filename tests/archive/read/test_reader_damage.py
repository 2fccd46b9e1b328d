"""Files that were cut, changed or lost: nothing wrong is ever given out as the table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import streamfold.archive
from streamfold.archive import (
    Archive,
    ArtifactCorruptError,
    Checked,
    ManifestInvalidError,
    TableSchema,
)
from streamfold.archive.buckets import bucket_numbers
from streamfold.archive.destinations.mirrors import Mirrors
from streamfold.archive.formats import FORMATS, format_of
from streamfold.archive.manifest.positions import SEQ_NUM
from streamfold.archive.write.artifacts import write_part
from streamfold.errors import BlobUnavailableError, FormatUnsupportedError, StreamfoldError
from tests.archive.reading import HISTORY, folder_at, reopened, state_at, write_history
from tests.archive.tables import SCHEMA, changes, open_writer, rows


def edit_manifest(folder: Path, edit: Callable[[Any], None]) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    edit(manifest)
    path.write_text(json.dumps(manifest))


def without_hashes(manifest: Any) -> None:
    for artifact in manifest["artifacts"]:
        for files in artifact["formats"].values():
            for part in files["parts"]:
                del part["sha256"]


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def files_of(folder: Path, pattern: str = "*") -> list[Path]:
    found = sorted(folder.glob(f"epoch=*/{pattern}"))
    assert found
    return found


async def failure_of(archive: Archive) -> StreamfoldError:
    with pytest.raises(StreamfoldError) as caught:
        await archive.table()
    return caught.value


@pytest.mark.parametrize("pattern", ["snapshot-*25-*", "diff-*25-*"])
async def test_a_flipped_bit_anywhere_is_found_before_a_row_is_given_out(
    tmp_path: Path, pattern: str
) -> None:
    await write_history(tmp_path)
    archive = await reopened(tmp_path)
    path = files_of(tmp_path, pattern)[-1]
    for offset in range(path.stat().st_size):
        flip(path, offset)
        error = await failure_of(archive)
        assert isinstance(error, ArtifactCorruptError)
        assert "SHA-256" in error.message
        assert path.name in error.message
        flip(path, offset)
    assert await state_at(archive) == HISTORY["31"]


async def test_a_cut_file_is_found_by_its_size(tmp_path: Path) -> None:
    await write_history(tmp_path)
    archive = await reopened(tmp_path)
    path = files_of(tmp_path, "snapshot-*25-*")[0]
    whole = path.read_bytes()
    for size in (0, 1, len(whole) - 1):
        path.write_bytes(whole[:size])
        error = await failure_of(archive)
        assert isinstance(error, ArtifactCorruptError)
        assert f"has {size} bytes" in error.message


@pytest.mark.parametrize("format_id", FORMATS.ids())
async def test_without_hashes_a_wrong_number_of_rows_is_found(
    tmp_path: Path, format_id: str
) -> None:
    writer = await open_writer(folder_at(tmp_path), formats=[format_of(format_id)])
    await writer.write_base(rows({1: "a", 2: "b"}), "1", reason="first")
    await writer.write_diff(changes(("INSERT", 3, "c")), "1", "2")
    small, large = (files_of(tmp_path, pattern)[0] for pattern in ("diff-*", "snapshot-*"))
    other = tmp_path / "other"
    elsewhere = await open_writer(folder_at(other), formats=[format_of(format_id)])
    await elsewhere.write_base(rows({1: "a"}), "1", reason="first")
    large.write_bytes(files_of(other)[0].read_bytes())

    def forget(manifest: Any) -> None:
        without_hashes(manifest)
        [part] = manifest["artifacts"][0]["formats"][format_id]["parts"]
        part["size_bytes"] = large.stat().st_size
        manifest["artifacts"][0]["formats"][format_id]["size_bytes"] = large.stat().st_size

    edit_manifest(tmp_path, forget)
    error = await failure_of(await reopened(tmp_path))
    assert isinstance(error, ArtifactCorruptError)
    assert "holds 1 row, the manifest says 2" in error.message
    assert small.exists()


@pytest.mark.parametrize("format_id", ["parquet", "protobuf-typed"])
async def test_formats_with_checksums_find_a_flipped_bit_on_their_own(
    tmp_path: Path, format_id: str
) -> None:
    writer = await open_writer(folder_at(tmp_path), formats=[format_of(format_id)])
    state = {number: f"name {number}" for number in range(50)}
    await writer.write_base(rows(state), "1", reason="first")
    edit_manifest(tmp_path, without_hashes)
    archive = await reopened(tmp_path)
    path = files_of(tmp_path)[0]
    wrong = []
    for offset in range(0, path.stat().st_size, 7):
        flip(path, offset)
        try:
            if await state_at(archive) != state:
                wrong.append(offset)
        except ArtifactCorruptError as error:
            wrong += [] if path.name in error.message else [offset]
        flip(path, offset)
    assert wrong == []


async def test_counts_in_the_manifest_that_contradict_each_other_are_refused(
    tmp_path: Path,
) -> None:
    await write_history(tmp_path)

    def count_wrong(manifest: Any) -> None:
        manifest["artifacts"][-1]["change_count"] = 7

    edit_manifest(tmp_path, count_wrong)
    with pytest.raises(ManifestInvalidError, match="one of them is wrong"):
        await (await reopened(tmp_path)).table()


async def test_a_missing_file_that_the_manifest_names_is_corruption(tmp_path: Path) -> None:
    await write_history(tmp_path)
    archive = await reopened(tmp_path)
    files_of(tmp_path, "snapshot-*25-*")[0].unlink()
    error = await failure_of(archive)
    assert isinstance(error, ArtifactCorruptError)
    assert "the manifest still names it" in error.message
    with pytest.raises(ArtifactCorruptError):
        [batch async for batch in archive.batches()]
    assert await state_at(archive, "20") == HISTORY["20"]


async def test_a_file_that_grew_is_found_by_its_size(tmp_path: Path) -> None:
    await write_history(tmp_path)
    archive = await reopened(tmp_path)
    path = files_of(tmp_path, "snapshot-*25-*")[0]
    path.write_bytes(path.read_bytes() + b"\n")
    error = await failure_of(archive)
    assert isinstance(error, ArtifactCorruptError)
    assert "at least" in error.message


async def test_a_file_that_cannot_be_read_is_not_called_corrupt(tmp_path: Path) -> None:
    await write_history(tmp_path)
    archive = await reopened(tmp_path)
    path = files_of(tmp_path, "snapshot-*25-*")[0]
    path.unlink()
    path.mkdir()
    assert isinstance(await failure_of(archive), BlobUnavailableError)


async def test_a_later_version_is_refused_by_its_number(tmp_path: Path) -> None:
    await write_history(tmp_path)
    edit_manifest(tmp_path, lambda manifest: manifest.update(manifest_version=2))
    with pytest.raises(FormatUnsupportedError, match="upgrade"):
        await streamfold.archive.open(tmp_path)


async def test_a_manifest_with_a_gap_in_its_chain_is_not_used(tmp_path: Path) -> None:
    await write_history(tmp_path)
    edit_manifest(tmp_path, lambda manifest: manifest["artifacts"].pop(1))
    with pytest.raises(ManifestInvalidError, match="must begin at"):
        await streamfold.archive.open(tmp_path)


async def test_a_manifest_that_does_not_reach_its_head_is_not_used(tmp_path: Path) -> None:
    await write_history(tmp_path)
    edit_manifest(tmp_path, lambda manifest: manifest["artifacts"].pop())
    with pytest.raises(ManifestInvalidError, match="its head is"):
        await streamfold.archive.open(tmp_path)


async def test_verification_passes_over_what_is_whole_and_counts_it(tmp_path: Path) -> None:
    await write_history(tmp_path)
    seen: list[Checked] = []
    found = await (await reopened(tmp_path)).verify(seen.append)
    assert found.ok
    assert (found.table, found.head_position) == ("public.users", "31")
    assert (found.artifacts, found.files, found.rows, found.unhashed) == (6, 6, 10, 0)
    assert found.size_bytes == sum(path.stat().st_size for path in files_of(tmp_path))
    assert [file.problem for file in seen] == [None] * 6


async def test_verification_reports_everything_that_is_wrong_not_just_the_first(
    tmp_path: Path,
) -> None:
    await write_history(tmp_path)
    flipped, cut, lost, *_ = files_of(tmp_path)
    flip(flipped, 3)
    cut.write_bytes(cut.read_bytes()[:-1])
    lost.unlink()
    found = await (await reopened(tmp_path)).verify()
    assert not found.ok
    reported = {Path(file.path).name: file.problem for file in found.problems}
    assert reported.keys() == {flipped.name, cut.name, lost.name}
    assert "SHA-256" in str(reported[flipped.name])
    assert "bytes" in str(reported[cut.name])
    assert "is not in" in str(reported[lost.name])


async def test_a_deep_verification_finds_a_base_that_the_epoch_before_does_not_lead_to(
    tmp_path: Path,
) -> None:
    await write_history(tmp_path / "right")
    found = await (await reopened(tmp_path / "right")).verify(deep=True)
    assert (found.ok, found.compared, found.incomparable) == (True, 1, 0)
    writer = await open_writer(folder_at(tmp_path / "wrong"))
    await writer.write_base(rows({1: "a", 2: "b"}), "1", reason="first")
    await writer.rebase(rows({1: "a", 2: "B"}), changes(), "3", reason="forced")
    await writer.write_base(rows({5: "e"}), "9", reason="gap")
    archive = await reopened(tmp_path / "wrong")
    assert (await archive.verify()).ok
    found = await archive.verify(deep=True)
    [problem] = found.problems
    assert "epoch=2/snapshot" in problem.path
    assert "is not the table that epoch 1 leads to" in str(problem.problem)
    assert (found.compared, found.incomparable) == (1, 1)


async def test_a_deep_verification_compares_the_columns_that_both_have(tmp_path: Path) -> None:
    wider = TableSchema.of(SCHEMA.arrow.append(pa.field("more", pa.float64())), ["id"])
    writer = await open_writer(folder_at(tmp_path))
    await writer.write_base(rows({1: "a"}), "1", reason="first")
    writer = await open_writer(folder_at(tmp_path), schema=wider, ids="two")
    grown = pa.RecordBatch.from_pylist([{"id": 1, "name": "a", "more": 0.5}], schema=wider.arrow)
    none = pa.RecordBatch.from_pylist([], schema=wider.changes)
    await writer.rebase([grown], [none], "2", reason="forced")
    found = await (await reopened(tmp_path)).verify(deep=True)
    assert (found.ok, found.compared) == (True, 1)


async def test_a_deep_verification_leaves_out_what_cannot_be_read(tmp_path: Path) -> None:
    await write_history(tmp_path)
    flip(files_of(tmp_path)[0], 3)
    found = await (await reopened(tmp_path)).verify(deep=True)
    assert (len(found.problems), found.compared, found.incomparable) == (1, 0, 1)


async def test_verification_looks_at_every_format(tmp_path: Path) -> None:
    formats = [format_of(name) for name in FORMATS.ids()]
    writer = await open_writer(folder_at(tmp_path), formats=formats)
    await writer.write_base(rows({1: "a", 2: "b"}), "1", reason="first")
    archive = await reopened(tmp_path)
    assert (await archive.verify()).rows == 2 * len(FORMATS.ids())
    for path in files_of(tmp_path):
        flip(path, 1)
        [problem] = (await archive.verify()).problems
        assert problem.path.endswith(path.name)
        flip(path, 1)


async def test_verification_says_when_no_hash_is_known(tmp_path: Path) -> None:
    await write_history(tmp_path)
    edit_manifest(tmp_path, without_hashes)
    found = await (await reopened(tmp_path)).verify()
    assert (found.ok, found.unhashed) == (True, 6)


def by_hash(keys: range, count: int) -> dict[int, list[int]]:
    numbers = bucket_numbers([pa.array(keys, pa.int64())], count)
    return {
        bucket: [k for k, n in zip(keys, numbers, strict=True) if n == bucket]
        for bucket in range(count)
    }


def of_our_hash(manifest: Any) -> None:
    for artifact in manifest["artifacts"]:
        for files in artifact["formats"].values():
            for part in files["parts"]:
                part["bucketing"] = "splitmix64"


async def write_buckets(
    folder: Path, base: dict[int, list[int]], diff: dict[int, list[int]]
) -> None:
    formats = [format_of(name) for name in FORMATS.ids()]
    destination = folder_at(folder)
    writer = await open_writer(destination, formats=formats)
    parts = {bucket: rows(dict.fromkeys(keys, "a")) for bucket, keys in base.items()}
    await writer.write_base(parts, "1", reason="first")
    plan = writer.plan_diff("1", "2")
    written = []
    for bucket, keys in diff.items():
        first = [("TRUNCATE", None, None)] if bucket == 0 else []
        found = changes(*first, *(("INSERT", key, "b") for key in keys))
        mirrors = Mirrors([destination], SEQ_NUM)
        written.append(await write_part(plan, found, mirrors, bucket=bucket))
    await writer.commit_diff(plan, written)


async def test_verification_finds_keys_in_the_bucket_of_others(tmp_path: Path) -> None:
    right, few = by_hash(range(100), 4), by_hash(range(100), 2)
    wrong = {0: few[0], 1: few[1], 2: [], 3: []}
    for name, base, diff in (("right", right, right), ("base", wrong, right), ("diff", right, few)):
        await write_buckets(tmp_path / name, base, diff)
        # Without a hash by name, any file may hold any key.
        assert (await (await reopened(tmp_path / name)).verify()).ok
        edit_manifest(tmp_path / name, of_our_hash)
    found = await (await reopened(tmp_path / "right")).verify()
    assert (found.ok, found.rows) == (True, 201 * len(FORMATS.ids()))
    for name in ("base", "diff"):
        found = await (await reopened(tmp_path / name)).verify()
        assert len(found.problems) == 2 * len(FORMATS.ids())
        held, own = len(few[0]), len(right[0])
        assert f"of bucket 0 of 4 holds {held - own} rows of other buckets" in str(
            found.problems[0].problem
        )


async def test_verification_finds_a_number_of_buckets_that_no_hash_has(tmp_path: Path) -> None:
    await write_buckets(tmp_path, {0: [1], 1: [2], 2: [3]}, {0: [1]})
    edit_manifest(tmp_path, of_our_hash)
    found = await (await reopened(tmp_path)).verify()
    assert len(found.problems) == 4 * len(FORMATS.ids())
    assert "of bucket 0 of 3 holds 1 row of other buckets" in str(found.problems[0].problem)
