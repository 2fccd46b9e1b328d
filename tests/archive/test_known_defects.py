"""Ways in which archives of this kind have lost or bent data elsewhere, each as a test.

D16 to D18 are about services and sources, and tested there.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from streamfold.archive.errors import (
    ChainGapError,
    CommitUnknownError,
    ManifestInvalidError,
    PositionInvalidError,
    WriterFencedOutError,
)
from streamfold.archive.formats import Format, JsonlFormat, ParquetFormat
from streamfold.archive.manifest.encoding import read_manifest
from streamfold.archive.schema import TableSchema
from streamfold.archive.write.writer import GAP, ArchiveWriter
from streamfold.blob import BlobStore, LocalBlobStore, open_blob_store
from streamfold.errors import BlobUnavailableError, InvalidError
from streamfold.testing.blob_faults import FaultyBlobStore, Operation
from streamfold.testing.blob_kit import keys_of
from streamfold.testing.faults import Fault, FaultKind, ScriptedFaults
from tests.archive.plain_reader import read_states, read_table
from tests.archive.tables import SCHEMA, at, changes, open_writer, rows

BEFORE = Fault(FaultKind.BEFORE)


async def open_with_base(blobs: BlobStore, state: dict[int, str] | None = None) -> ArchiveWriter:
    writer = await open_writer(at(blobs))
    await writer.write_base(rows(state or {}), "0", reason="first")
    return writer


@pytest.mark.parametrize("operation", [Operation.PUT, Operation.PUT_IF_MATCH])
async def test_d01_a_base_that_fails_does_not_swallow_the_changes_before_it(
    blobs: BlobStore, operation: Operation
) -> None:
    await open_with_base(blobs, {1: "a"})
    # Opening swaps 7 times for its self-test and once for the claim, and puts nothing.
    passing = [Fault()] * (8 if operation is Operation.PUT_IF_MATCH else 0)
    faults = ScriptedFaults({operation: [*passing, BEFORE]})
    writer = await open_writer(at(FaultyBlobStore(blobs, faults)), ids="two")
    closing = changes(("INSERT", 2, "b"))
    with pytest.raises(BlobUnavailableError):
        await writer.rebase(rows({1: "a", 2: "b"}), closing, "2", reason="forced")
    assert writer.head == "0"
    later = changes(("INSERT", 3, "c"))
    with pytest.raises(ChainGapError, match="head '0'"):
        await writer.write_diff(later, "2", "3")  # would leave out what failed
    await writer.write_diff(changes(("INSERT", 2, "b"), ("INSERT", 3, "c")), "0", "3")
    assert await read_table(blobs) == {1: "a", 2: "b", 3: "c"}


async def test_d02_a_reloaded_source_begins_an_epoch_that_marks_the_gap(blobs: BlobStore) -> None:
    writer = await open_with_base(blobs, {1: "a"})
    manifest = await writer.write_base(rows({7: "new"}), "90", reason=GAP)
    old, base = manifest.artifacts
    assert (base.epoch, base.rebase_reason) == (2, GAP)
    assert old.to_position != base.to_position, "a follower sees that no diff leads there"


async def test_d03_rows_that_break_off_do_not_become_a_base(blobs: BlobStore) -> None:
    def half_loaded() -> Iterator[pa.RecordBatch]:
        yield from rows({1: "a"})
        raise ConnectionError("the source went away")

    writer = await open_with_base(blobs, {1: "a", 2: "b"})
    several: list[list[Format]] = [[JsonlFormat()], [JsonlFormat(), ParquetFormat()]]
    for formats in several:
        writer = await open_writer(at(blobs), formats=formats, ids=f"f{len(formats)}")
        with pytest.raises(ConnectionError):
            await writer.rebase(half_loaded(), changes(), "5", reason="forced")
    assert await read_states(blobs) == [("0", {1: "a", 2: "b"})]


async def test_d04_a_truncate_that_is_not_first_is_refused(blobs: BlobStore) -> None:
    writer = await open_with_base(blobs, {1: "a"})
    insert, truncate = ("INSERT", 2, "b"), ("TRUNCATE", None, None)
    for late in ([*changes(insert), *changes(truncate)], changes(insert, truncate)):
        with pytest.raises(InvalidError, match="TRUNCATE"):
            await writer.write_diff(late, "0", "1")
    await writer.write_diff(changes(truncate, insert), "0", "1")
    assert await read_table(blobs) == {2: "b"}


async def test_d05_a_repeated_diff_with_a_truncate_brings_nothing_back(blobs: BlobStore) -> None:
    await open_with_base(blobs, {1: "a"})
    faults = ScriptedFaults({Operation.PUT: [BEFORE]})
    writer = await open_writer(at(FaultyBlobStore(blobs, faults)), ids="two")
    with pytest.raises(BlobUnavailableError):
        await writer.write_diff(changes(("INSERT", 2, "b")), "0", "1")
    await writer.write_diff(changes(("TRUNCATE", None, None)), "0", "2")
    assert await read_table(blobs) == {}


async def test_d06_a_key_change_leaves_no_ghost(blobs: BlobStore) -> None:
    writer = await open_with_base(blobs, {1: "a"})
    moved = {"action": "UPDATE", "key": {"id": 2}, "before": {"id": 1, "name": "a"}}
    moved["after"] = {"id": 2, "name": "a"}
    as_update = pa.RecordBatch.from_pylist([moved], schema=SCHEMA.changes)
    with pytest.raises(InvalidError, match="DELETE of the old key and INSERT"):
        await writer.write_diff([as_update], "0", "1")
    await writer.write_diff(changes(("DELETE", 1, None), ("INSERT", 2, "a")), "0", "1")
    assert await read_table(blobs) == {2: "a"}


async def test_d07_keys_are_what_was_declared_and_cannot_be_confused(blobs: BlobStore) -> None:
    columns = [("left", pa.string()), ("right", pa.string()), ("value", pa.int64())]
    schema = TableSchema.of(pa.schema(columns), ["left", "right"])
    batch = pa.RecordBatch.from_pylist(
        [
            {"left": "x y", "right": "z", "value": 9007199254740993},
            {"left": "x", "right": "y z", "value": 1000000},
        ],
        schema=schema.arrow,
    )
    writer = await open_writer(at(blobs), schema=schema)
    manifest = await writer.write_base([batch], "0", reason="first")
    assert manifest.key_fields == ["left", "right"]
    key = {"left": "x y", "right": "z"}
    gone = {"action": "DELETE", "key": key, "before": None, "after": None}
    delete = pa.RecordBatch.from_pylist([gone], schema=schema.changes)
    manifest = await writer.write_diff([delete], "0", "1")
    [part] = manifest.artifacts[-1].parts()
    [line] = (await blobs.get(part.path)).splitlines()
    assert json.loads(line)["old"] | key == json.loads(line)["old"]
    [part] = manifest.base.parts()
    assert b"9007199254740993" in await blobs.get(part.path)


async def test_d08_every_change_says_what_it_is_and_an_unknown_delete_does_nothing(
    blobs: BlobStore,
) -> None:
    writer = await open_with_base(blobs, {1: "a"})
    nothing: dict[str, Any] = {"action": "", "key": None, "before": None, "after": None}
    with pytest.raises(InvalidError, match="action"):
        await writer.write_diff(
            [pa.RecordBatch.from_pylist([nothing], schema=SCHEMA.changes)], "0", "1"
        )
    with pytest.raises(InvalidError, match="key"):
        await writer.write_diff(changes(("DELETE", None, None)), "0", "1")
    await writer.write_diff(changes(("DELETE", 99, None)), "0", "1")
    assert await read_table(blobs) == {1: "a"}


async def test_d09_a_conflict_does_not_stick(blobs: BlobStore) -> None:
    first = await open_with_base(blobs)
    second = await open_writer(at(blobs), ids="two", writer_id="writer-2")
    await second.write_diff(changes(("INSERT", 1, "a")), "0", "1")
    with pytest.raises(WriterFencedOutError):
        await first.write_diff(changes(("INSERT", 1, "x")), "0", "1")
    again = await open_writer(at(blobs), ids="three")
    assert again.head == "1"
    await again.write_diff(changes(("INSERT", 2, "b")), "1", "2")
    assert await read_table(blobs) == {1: "a", 2: "b"}


async def test_d10_a_failed_commit_leaves_no_trace_in_the_next_one(blobs: BlobStore) -> None:
    await open_with_base(blobs)
    faults = ScriptedFaults({Operation.PUT_IF_MATCH: [*[Fault()] * 8, BEFORE, BEFORE]})
    writer = await open_writer(at(FaultyBlobStore(blobs, faults)), ids="two")
    with pytest.raises(BlobUnavailableError):
        await writer.write_diff(changes(("INSERT", 1, "phantom")), "0", "1")
    with pytest.raises(BlobUnavailableError):
        await writer.rebase(rows({9: "phantom"}), changes(), "1", reason="forced")
    manifest = await writer.write_diff(changes(("INSERT", 2, "b")), "0", "2")
    assert [(a.kind, a.epoch, a.to_position) for a in manifest.artifacts] == [
        ("snapshot", 1, "0"),
        ("diff", 1, "2"),
    ]
    assert await read_table(blobs) == {2: "b"}


async def test_d11_d12_a_diff_ends_after_it_begins(blobs: BlobStore) -> None:
    writer = await open_with_base(blobs)
    for end in ("0", "-1"):
        with pytest.raises(PositionInvalidError, match="covers nothing"):
            await writer.write_diff(changes(("INSERT", 1, "a")), "0", end)
    await writer.write_diff(changes(("INSERT", 1, "a")), "0", "1")
    raw = json.loads(await blobs.get("manifest.json"))
    raw["artifacts"].append(raw["artifacts"][-1] | {"from_position": "1", "to_position": "1"})
    with pytest.raises(ManifestInvalidError, match="must end after it begins"):
        read_manifest(json.dumps(raw).encode())


@pytest.mark.parametrize("position", ["", None, "abc", "1.5"])
async def test_d13_changes_without_a_position_are_refused(blobs: BlobStore, position: Any) -> None:
    fresh = await open_writer(at(open_blob_store("memory:")))
    with pytest.raises(PositionInvalidError):
        await fresh.write_base(rows({}), position, reason="first")
    writer = await open_with_base(blobs)
    with pytest.raises(PositionInvalidError):
        await writer.write_diff(changes(), "0", position)
    with pytest.raises(PositionInvalidError):
        await writer.write_diff(changes(), position, "1")
    assert writer.head == "0"


async def test_d14_d15_a_row_that_does_not_fit_fails_and_is_not_left_out(blobs: BlobStore) -> None:
    writer = await open_with_base(blobs, {1: "a"})
    as_text = pa.RecordBatch.from_pylist([{"id": "one", "name": "a"}])
    partial = pa.RecordBatch.from_pylist(
        [{"action": "INSERT", "key": {"id": 2}, "before": None, "after": None}],
        schema=SCHEMA.changes,
    )
    with pytest.raises(InvalidError):
        await writer.rebase([as_text], changes(), "1", reason="forced")
    with pytest.raises(InvalidError):
        await writer.write_diff([partial], "0", "1")
    assert await read_states(blobs) == [("0", {1: "a"})]


async def test_d19_size_hash_and_counts_of_every_file_are_in_the_manifest(
    blobs: BlobStore,
) -> None:
    writer = await open_writer(at(blobs), formats=[JsonlFormat(), ParquetFormat()])
    await writer.write_base({0: rows({1: "a"}), 1: rows({2: "b", 3: "c"})}, "0", reason="first")
    manifest = await writer.write_diff(changes(("DELETE", 1, None)), "0", "4", record_count=4)
    for part in manifest.parts():
        data = await blobs.get(part.path)
        assert part.size_bytes == len(data)
        assert part.sha256 == hashlib.sha256(data).hexdigest()
    assert [part.rows for part in manifest.base.formats["parquet"].parts] == [1, 2]
    assert manifest.base.row_count == 3
    diff = manifest.artifacts[-1]
    assert (diff.change_count, diff.record_count) == (1, 4)


async def test_d20_files_are_synced_before_they_are_named_and_readable_by_others(
    tmp_path: Path,
) -> None:
    synced: list[str] = []

    def fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append("bytes" if ".streamfold-drafts" in path.parts else path.name)
        os.fsync(descriptor)

    store = LocalBlobStore(tmp_path / "table", fsync=fsync)
    writer = await open_writer(at(store))
    synced.clear()
    await writer.write_base(rows({1: "a"}), "0", reason="first")
    assert synced == ["bytes", "table", "epoch=1", "bytes", "table"]
    umask = os.umask(0)
    os.umask(umask)
    for key in await keys_of(store):
        mode = stat.S_IMODE((tmp_path / "table" / key).stat().st_mode)
        assert mode == 0o666 & ~umask


async def test_d20_a_commit_on_a_disk_that_does_not_sync_is_not_called_committed(
    tmp_path: Path,
) -> None:
    broken = False

    def fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if broken and path == tmp_path:
            raise OSError(errno.EIO, "Input/output error")
        os.fsync(descriptor)

    writer = await open_writer(at(LocalBlobStore(tmp_path, fsync=fsync)))
    await writer.write_base(rows({1: "a"}), "0", reason="first")
    broken = True
    with pytest.raises(CommitUnknownError):
        await writer.write_diff(changes(("INSERT", 2, "b")), "0", "1")
    broken = False
    await writer.write_diff(changes(("INSERT", 2, "b")), "0", "1")
    assert await read_table(LocalBlobStore(tmp_path)) == {1: "a", 2: "b"}
