from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from streamfold.archive.destinations.mirrors import Mirrors
from streamfold.archive.errors import (
    ChainGapError,
    CommitConflictError,
    PositionInvalidError,
    SchemaIncompatibleError,
    WriterFencedOutError,
)
from streamfold.archive.formats import FileCompression, JsonlFormat, ParquetFormat
from streamfold.archive.manifest.encoding import read_manifest
from streamfold.archive.manifest.model import MANIFEST_KEY
from streamfold.archive.manifest.positions import LSN, SEQ_NUM
from streamfold.archive.schema import TableSchema
from streamfold.archive.write.artifacts import WrittenDiff, write_part
from streamfold.archive.write.writer import GAP, ArchiveWriter
from streamfold.blob import BlobStore, open_blob_store
from streamfold.errors import InvalidError
from streamfold.testing.blob_faults import FaultyBlobStore, Operation
from streamfold.testing.blob_kit import keys_of
from streamfold.testing.faults import Fault, FaultyCall
from tests.archive.plain_reader import read_states, read_table
from tests.archive.tables import SCHEMA, Clock, at, changes, net_changes, open_writer, rows

GOLDEN = Path(__file__).parents[1] / "golden"


async def test_a_base_and_its_diffs_rebuild_the_table(blobs: BlobStore) -> None:
    writer = await open_writer(at(blobs))
    await writer.write_base(rows({1: "a", 2: "b"}), "4", reason="first")
    await writer.write_diff(changes(("UPDATE", 1, "A"), ("DELETE", 2, None)), "4", "9")
    await writer.write_diff(changes(("INSERT", 3, "c")), "9", "10")
    assert await read_states(blobs) == [
        ("4", {1: "a", 2: "b"}),
        ("9", {1: "A"}),
        ("10", {1: "A", 3: "c"}),
    ]


async def test_a_restarted_writer_continues_at_the_head_without_a_base(blobs: BlobStore) -> None:
    first = await open_writer(at(blobs))
    await first.write_base(rows({1: "a"}), "0", reason="first")
    second = await open_writer(at(blobs), ids="two")
    assert second.head == "0"
    manifest = await second.write_diff(changes(("INSERT", 2, "b")), "0", "1")
    assert [artifact.kind for artifact in manifest.artifacts] == ["snapshot", "diff"]
    assert await read_table(blobs) == {1: "a", 2: "b"}


async def test_opening_takes_the_table_from_the_writer_before(blobs: BlobStore) -> None:
    first = await open_writer(at(blobs))
    await first.write_base(rows({}), "0", reason="first")
    await open_writer(at(blobs), writer_id="writer-2", ids="two")
    for _ in range(2):
        with pytest.raises(WriterFencedOutError, match="'writer-2' took it with fencing token 2"):
            await first.write_diff(changes(("INSERT", 9, "lost")), "0", "1")
    assert await read_table(blobs) == {}


async def test_a_writer_of_the_same_name_is_another_writer(blobs: BlobStore) -> None:
    first = await open_writer(at(blobs))
    await first.write_base(rows({}), "0", reason="first")
    await open_writer(at(blobs), ids="two")
    with pytest.raises(WriterFencedOutError):
        await first.write_diff(changes(("INSERT", 9, "lost")), "0", "1")


async def test_of_two_first_writers_one_wins(blobs: BlobStore) -> None:
    writers = [await open_writer(at(blobs), ids=name) for name in ("one", "two")]
    results = await asyncio.gather(
        *(w.write_base(rows({n: "x"}), "0", reason="first") for n, w in enumerate(writers)),
        return_exceptions=True,
    )
    assert sorted(type(result).__name__ for result in results) == [
        "Manifest",
        "WriterFencedOutError",
    ]
    [winner] = [n for n, result in enumerate(results) if not isinstance(result, BaseException)]
    assert await read_table(blobs) == {winner: "x"}


async def test_a_repeated_diff_is_written_once(blobs: BlobStore) -> None:
    writer = await open_writer(at(blobs))
    await writer.write_base(rows({}), "0", reason="first")
    first = await writer.write_diff(changes(("INSERT", 1, "a")), "0", "5")
    assert await writer.write_diff(changes(("INSERT", 1, "a")), "0", "5") == first
    assert await writer.write_diff(changes(("INSERT", 1, "a")), "2", "4") == first


@pytest.mark.parametrize(("start", "end"), [("6", "8"), ("3", "8")])
async def test_a_diff_that_does_not_begin_at_the_head_is_refused(
    blobs: BlobStore, start: str, end: str
) -> None:
    writer = await open_writer(at(blobs))
    await writer.write_base(rows({}), "5", reason="first")
    with pytest.raises(ChainGapError, match="head '5'"):
        await writer.write_diff(changes(), start, end)
    assert writer.head == "5"


async def test_a_diff_needs_a_base(blobs: BlobStore) -> None:
    writer = await open_writer(at(blobs))
    with pytest.raises(ChainGapError, match="no base yet"):
        await writer.write_diff(changes(), "-1", "0")


async def test_a_rebase_brings_its_closing_diff(blobs: BlobStore) -> None:
    writer = await open_writer(at(blobs))
    await writer.write_base(rows({1: "a"}), "0", reason="first")
    closing = net_changes({1: "a"}, {1: "b", 2: "c"})
    manifest = await writer.rebase(rows({1: "b", 2: "c"}), closing, "7", reason="max_interval")
    assert [(a.kind, a.epoch, a.to_position, a.rebase_reason) for a in manifest.artifacts] == [
        ("snapshot", 1, "0", "first"),
        ("diff", 1, "7", None),
        ("snapshot", 2, "7", "max_interval"),
    ]
    await writer.write_diff(changes(("DELETE", 1, None)), "7", "8")
    assert [state for _, state in await read_states(blobs)] == [
        {1: "a"},
        {1: "b", 2: "c"},
        {1: "b", 2: "c"},
        {2: "c"},
    ]


async def test_what_a_table_lacks_is_in_all_that_follows_until_it_is_emptied(
    blobs: BlobStore,
) -> None:
    writer = await open_writer(at(blobs))
    await writer.write_base(rows({5: "a"}), "7", reason="first", incomplete_before="4")
    await writer.write_diff(changes(("INSERT", 6, "b")), "7", "8")
    closing = changes(("INSERT", 7, "c"))
    manifest = await writer.rebase(rows({}), closing, "9", reason="forced")
    assert manifest.incomplete_before == "4"
    again = await open_writer(at(blobs), ids="again")  # as it was stored
    assert again.manifest is not None
    assert again.manifest.incomplete_before == "4"
    plan = again.plan_diff("9", "10", empties=True)
    part = await write_part(plan, changes(("TRUNCATE", None, None)), Mirrors([at(blobs)], SEQ_NUM))
    emptied = await again.commit_diff(plan, [part])
    assert emptied.incomplete_before is None
    assert [a.incomplete_before for a in emptied.artifacts] == ["4", "4", "4", "4", None]
    # A base of all rows that its writer knows itself lacks nothing.
    await again.write_diff(changes(("INSERT", 8, "d")), "10", "11")
    assert (
        await again.rebase(rows({8: "d"}), changes(), "11", reason="x")
    ).incomplete_before is None


async def test_a_rebase_at_the_head_needs_no_closing_diff(blobs: BlobStore) -> None:
    writer = await open_writer(at(blobs))
    await writer.write_base(rows({1: "a"}), "0", reason="first")
    await writer.write_diff(changes(("INSERT", 2, "b")), "0", "1")
    manifest = await writer.rebase(rows({1: "a", 2: "b"}), changes(), "1", reason="forced")
    assert [artifact.kind for artifact in manifest.artifacts] == ["snapshot", "diff", "snapshot"]
    assert await writer.rebase(rows({}), changes(), "1", reason="forced") == manifest


async def test_untouched_buckets_are_used_again(blobs: BlobStore) -> None:
    writer = await open_writer(at(blobs))
    await writer.write_base({0: rows({2: "b"}), 1: rows({1: "a"})}, "0", reason="first")
    before = set(await keys_of(blobs, "epoch="))
    manifest = await writer.rebase(
        {1: rows({1: "A", 3: "c"})},
        net_changes({1: "a"}, {1: "A", 3: "c"}),
        "1",
        reason="forced",
        reuse=[0],
    )
    [files] = manifest.base.formats.values()
    assert {part.bucket: part.path in before for part in files.parts} == {0: True, 1: False}
    assert files.uri.endswith("/"), "no single file is the whole base"
    assert manifest.base.row_count == 3
    assert await read_table(blobs) == {1: "A", 2: "b", 3: "c"}


async def test_a_bucket_that_the_last_base_lacks_cannot_be_used_again(blobs: BlobStore) -> None:
    writer = await open_writer(at(blobs))
    with pytest.raises(InvalidError, match="no base has schema"):
        await writer.write_base({1: rows({})}, "0", reason="first", reuse=[0])
    await writer.write_base({0: rows({})}, "0", reason="first")
    with pytest.raises(InvalidError, match="bucket 7 cannot be reused"):
        await writer.rebase({0: rows({})}, changes(), "1", reason="forced", reuse=[7])


async def test_several_formats_come_from_one_pass(blobs: BlobStore, tmp_path: Path) -> None:
    def once() -> Iterator[pa.RecordBatch]:
        yield from rows({1: "a"})
        yield from rows({2: "b"})

    formats = (JsonlFormat(), ParquetFormat())
    writer = await open_writer(at(blobs), formats=formats)
    manifest = await writer.write_base(once(), "0", reason="first")
    assert set(manifest.base.formats) == {"jsonl", "parquet"}
    assert await read_table(blobs) == {1: "a", 2: "b"}
    [part] = manifest.base.formats["parquet"].parts
    (tmp_path / "base.parquet").write_bytes(await blobs.get(part.path))
    assert pa.parquet.read_table(tmp_path / "base.parquet").column("name").to_pylist() == ["a", "b"]


async def test_a_base_larger_than_memory_allows_goes_through_a_file(tmp_path: Path) -> None:
    blobs = open_blob_store(tmp_path.as_uri())
    names = dict.fromkeys(range(300), "x" * 50000)
    writer = await open_writer(at(blobs))
    batches = (batch for number, name in names.items() for batch in rows({number: name}))
    manifest = await writer.write_base(batches, "0", reason="first")
    assert manifest.base.formats["jsonl"].size_bytes > 15_000_000
    assert await read_table(blobs) == names


@pytest.mark.parametrize("state", [{}, {1: "only"}])
async def test_an_empty_table_has_a_base_too(blobs: BlobStore, state: dict[int, str]) -> None:
    writer = await open_writer(at(blobs))
    await writer.write_base(rows(state), "-1", reason="first")
    await writer.write_diff(changes(("TRUNCATE", None, None)), "-1", "0")
    await writer.write_diff(changes(), "0", "1")
    assert [table for _, table in await read_states(blobs)] == [state, {}, {}]


async def test_a_base_of_no_batches_is_whole(blobs: BlobStore) -> None:
    writer = await open_writer(at(blobs), formats=[JsonlFormat(), ParquetFormat()])
    manifest = await writer.write_base([], "-1", reason="first")
    assert manifest.base.row_count == 0
    assert await read_table(blobs) == {}


async def test_the_schema_of_the_archive_and_of_the_source_are_merged(blobs: BlobStore) -> None:
    writer = await open_writer(at(blobs))
    await writer.write_base(rows({1: "a"}), "0", reason="first")
    wider = TableSchema.of(
        pa.schema([("id", pa.int64()), ("name", pa.string()), ("mail", pa.string())]), ["id"]
    )
    second = await open_writer(at(blobs), ids="two", schema=wider)
    after = {"id": 2, "name": "b", "mail": "b@example.org"}
    change = {"action": "INSERT", "key": {"id": 2}, "before": None, "after": after}
    batch = pa.RecordBatch.from_pylist([change], schema=wider.changes)
    manifest = await second.write_diff([batch], "0", "1")
    assert [artifact.schema_id for artifact in manifest.artifacts] == [SCHEMA.id, wider.id]
    assert set(manifest.schemas) == {SCHEMA.id, wider.id}
    assert [column["Name"] for column in manifest.columns or []] == ["id", "name", "mail"]


async def test_a_column_that_the_last_writer_adds_while_it_is_replaced_is_kept(
    blobs: BlobStore,
) -> None:
    first = await open_writer(at(blobs))
    await first.write_base(rows({1: "a"}), "0", reason="first")
    wider = TableSchema.of(pa.schema([*SCHEMA.arrow, ("mail", pa.string())]), ["id"])

    class BeforeClaim:
        """Delays the first swap of the manifest."""

        def __init__(self) -> None:
            self.delays = [1.0]

        def next_fault(self, operation: FaultyCall, key: str) -> Fault:
            claims = operation is Operation.PUT_IF_MATCH and key == MANIFEST_KEY
            return Fault(delay=self.delays.pop()) if claims and self.delays else Fault()

    async def add_column(_: float) -> None:
        first.evolve(wider)
        await first.write_diff(changes(("INSERT", 2, "b")), "0", "1")

    slow = FaultyBlobStore(blobs, BeforeClaim(), sleep=add_column)
    second = await open_writer(at(slow), ids="two")
    assert second.head == "1"
    assert second.schema.id == wider.id
    manifest = await second.write_diff(changes(("INSERT", 3, "c")), "1", "2")
    assert manifest.schema_id == wider.id


async def test_a_schema_that_does_not_fit_changes_nothing(blobs: BlobStore) -> None:
    writer = await open_writer(at(blobs))
    manifest = await writer.write_base(rows({1: "a"}), "0", reason="first")
    other = TableSchema.of(pa.schema([("id", pa.int64()), ("name", pa.int64())]), ["id"])
    with pytest.raises(SchemaIncompatibleError, match="name"):
        await open_writer(at(blobs), ids="two", schema=other)
    with pytest.raises(SchemaIncompatibleError, match="name"):
        writer.evolve(other)
    assert await writer.refresh() == manifest
    await writer.write_diff(changes(("INSERT", 2, "b")), "0", "1")


async def test_buckets_cannot_be_used_again_in_another_schema(blobs: BlobStore) -> None:
    writer = await open_writer(at(blobs))
    await writer.write_base({0: rows({}), 1: rows({})}, "0", reason="first")
    writer.evolve(TableSchema.of(pa.schema([*SCHEMA.arrow, ("mail", pa.string())]), ["id"]))
    with pytest.raises(InvalidError, match="write them all"):
        await writer.rebase({0: []}, [], "1", reason="forced", reuse=[1])


async def test_other_positions_than_seq_nums_have_their_own_order(blobs: BlobStore) -> None:
    writer = await ArchiveWriter.open(
        "t", SCHEMA, [at(blobs)], formats=[JsonlFormat()], writer_id="w", order=LSN
    )
    await writer.write_base(rows({}), "0/9", reason="first")
    await writer.write_diff(changes(("INSERT", 1, "a")), "0/9", "0/10")
    with pytest.raises(PositionInvalidError, match="not an LSN"):
        await writer.write_diff(changes(), "0/10", "17")
    assert [position for position, _ in await read_states(blobs)] == ["0/9", "0/10"]
    assert "epoch=1/snapshot-00000000_00000009" in (await keys_of(blobs, "epoch=1/s"))[0]


async def test_an_archive_of_another_writer_is_continued(blobs: BlobStore) -> None:
    published = (GOLDEN / "published.json").read_bytes()
    await blobs.put("manifest.json", published)
    writer = await ArchiveWriter.open(
        "public.config_document",
        SCHEMA,
        [at(blobs)],
        formats=[JsonlFormat()],
        writer_id="w",
        order=LSN,
    )
    assert writer.head == "0/1A2B400"
    manifest = await writer.write_diff(changes(("INSERT", 9, "i")), "0/1A2B400", "0/1A2B500")
    assert manifest.archive_id is not None
    assert [artifact.schema_id for artifact in manifest.chain] == [None, SCHEMA.id]
    paths = [part.path for part in manifest.parts()]
    assert paths[0] == "epoch=1/snapshot-0_1A2B000.jsonl"
    again = read_manifest(await blobs.get("manifest.json"))
    assert again.artifacts[0].created_at == "2026-06-03T12:00:00Z"


async def test_parts_are_written_elsewhere_and_committed_here(blobs: BlobStore) -> None:
    writer = await open_writer(at(blobs), formats=[JsonlFormat(), ParquetFormat()])
    plan = pickle.loads(pickle.dumps(writer.plan_base("5")))
    mirrors = Mirrors([at(blobs)], plan.order)
    parts = [
        pickle.loads(pickle.dumps(await write_part(plan, rows(state), mirrors, bucket=bucket)))
        for bucket, state in enumerate([{2: "b"}, {1: "a", 3: "c"}])
    ]
    assert await read_states(blobs) == [], "no reader sees parts before the commit"
    manifest = await writer.commit_base(plan, parts, reason="first")
    assert manifest.base.row_count == 3
    diff = pickle.loads(pickle.dumps(writer.plan_diff("5", "6")))
    part = await write_part(diff, changes(("DELETE", 1, None)), mirrors, bucket=1)
    await writer.commit_diff(diff, [part])
    assert await read_table(blobs) == {2: "b", 3: "c"}

    closing, base = writer.plan_diff("6", "9"), writer.plan_base("9")
    last = WrittenDiff(closing, [await write_part(closing, changes(("DELETE", 3, None)), mirrors)])
    part = await write_part(base, rows({}), mirrors, bucket=1)
    manifest = await writer.commit_base(base, [part], reason="forced", reuse=[0], closing=last)
    assert [artifact.epoch for artifact in manifest.artifacts] == [1, 1, 1, 2]
    assert await read_table(blobs) == {2: "b"}


async def test_a_schema_that_changes_between_plan_and_commit_stays_the_plans(
    blobs: BlobStore,
) -> None:
    writer = await open_writer(at(blobs))
    mirrors = Mirrors([at(blobs)], SEQ_NUM)
    plan = writer.plan_base("0")
    part = await write_part(plan, rows({1: "a"}), mirrors)
    writer.evolve(TableSchema.of(pa.schema([*SCHEMA.arrow, ("mail", pa.string())]), ["id"]))
    manifest = await writer.commit_base(plan, [part], reason="first")
    assert manifest.schema_id == manifest.base.schema_id == SCHEMA.id
    diff, base = writer.plan_diff("0", "1"), replace(writer.plan_base("1"), schema=SCHEMA)
    closing = WrittenDiff(diff, [await write_part(diff, [], mirrors)])
    with pytest.raises(InvalidError, match="one schema"):
        await writer.commit_base(base, [part], reason="forced", closing=closing)


async def test_an_artifact_has_a_part(blobs: BlobStore) -> None:
    writer = await open_writer(at(blobs))
    with pytest.raises(InvalidError, match="at least one part"):
        await writer.commit_base(writer.plan_base("0"), [], reason="first")


async def test_a_format_is_named_once(blobs: BlobStore) -> None:
    for formats in ([], [JsonlFormat(), JsonlFormat(FileCompression.GZIP)]):
        with pytest.raises(InvalidError, match="each named once"):
            await open_writer(at(blobs), formats=formats)


async def test_a_base_after_the_head_says_that_it_leaves_a_gap(blobs: BlobStore) -> None:
    writer = await open_writer(at(blobs))
    await writer.write_base(rows({1: "a"}), "0", reason="first")
    with pytest.raises(ChainGapError, match="call rebase"):
        await writer.write_base(rows({2: "b"}), "5", reason="forced")
    manifest = await writer.write_base(rows({2: "b"}), "5", reason=GAP)
    assert manifest.base.rebase_reason == GAP
    with pytest.raises(PositionInvalidError, match="go back before the head"):
        await writer.write_base(rows({}), "4", reason=GAP)


async def test_times_come_from_the_clock_that_was_passed_in(blobs: BlobStore) -> None:
    clock = Clock()
    writer = await open_writer(at(blobs), clock=clock)
    clock.advance(hours=1)
    manifest = await writer.write_base(rows({}), "0", reason="first")
    assert manifest.updated_at == manifest.base.created_at == "2026-06-03T13:00:00.000000Z"


async def test_a_cancelled_write_commits_nothing_and_the_next_one_works(blobs: BlobStore) -> None:
    writer = await open_writer(at(blobs))
    await writer.write_base(rows({}), "0", reason="first")
    for turns in range(6):
        write = asyncio.ensure_future(writer.write_diff(changes(("INSERT", 1, "a")), "0", "1"))
        for _ in range(turns):
            await asyncio.sleep(0)
        write.cancel()
        await asyncio.gather(write, return_exceptions=True)
    await writer.write_diff(changes(("INSERT", 1, "a")), "0", "1")
    assert await read_states(blobs) == [("0", {}), ("1", {1: "a"})]


async def test_a_table_takes_a_new_name_if_its_former_one_is_given(blobs: BlobStore) -> None:
    formats, folder = [JsonlFormat()], [at(blobs)]
    first = await ArchiveWriter.open("users", SCHEMA, folder, formats=formats, writer_id="w-1")
    await first.write_base(rows({1: "a"}), "1", reason="first")
    with pytest.raises(CommitConflictError, match=r"holds table 'users', not 'public\.users'"):
        await ArchiveWriter.open("public.users", SCHEMA, folder, formats=formats, writer_id="w-2")
    second = await ArchiveWriter.open(
        "public.users", SCHEMA, folder, formats=formats, writer_id="w-2", former_names=["users"]
    )
    await second.write_diff(changes(("INSERT", 2, "b")), "1", "2")
    stored = await at(blobs).read()
    assert stored is not None
    assert (stored.manifest.table, stored.manifest.head_position) == ("public.users", "2")
