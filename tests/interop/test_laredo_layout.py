"""Archives in layout `laredo`: a reader by Laredo's published rules rebuilds them, and so does ours."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import streamfold.archive
from streamfold.archive import LAREDO, ArchiveWriter, Collector, Destination, Layout, Retention
from streamfold.archive.errors import CommitConflictError
from streamfold.archive.formats import Format, format_of
from streamfold.archive.maintenance.export import export_archive
from streamfold.archive.schema import TableSchema
from streamfold.archive.write.layout import STREAMFOLD
from streamfold.archive.write.writer import GAP
from streamfold.blob import LocalBlobStore
from streamfold.cli.archives.json_output import archive_text
from streamfold.errors import BlobUnavailableError, InvalidError
from streamfold.testing.blob_faults import FaultyBlobStore, Operation
from streamfold.testing.faults import Fault, FaultKind, ScriptedFaults
from tests.archive.tables import new_ids
from tests.interop.laredo_reader import LaredoReader

Key = tuple[Any, ...]
State = Mapping[Key, str]

BOTH = (format_of("jsonl"), format_of("protobuf"))


@dataclass(frozen=True, slots=True)
class Keys:
    """The key columns of a table, and keys of it: `k(n)` is the n-th."""

    columns: tuple[pa.Field, ...]
    values: tuple[Key, ...]

    @property
    def names(self) -> list[str]:
        return [field.name for field in self.columns]

    @property
    def schema(self) -> TableSchema:
        return TableSchema.of(pa.schema([*self.columns, ("name", pa.string())]), self.names)

    def row(self, key: Key, name: str) -> dict[str, Any]:
        return dict(zip(self.names, key, strict=True)) | {"name": name}

    def rows(self, state: State) -> list[pa.RecordBatch]:
        plain = [self.row(key, name) for key, name in sorted(state.items())]
        return [pa.RecordBatch.from_pylist(plain, schema=self.schema.arrow)]

    def changes(self, before: State, after: State, *, truncate: bool = False) -> Any:
        found: list[dict[str, Any]] = [{"action": "TRUNCATE"}] if truncate else []
        before = {} if truncate else before
        for key in sorted({*before, *after}):
            change = {"key": dict(zip(self.names, key, strict=True))}
            if key not in after:
                found.append(change | {"action": "DELETE"})
            elif before.get(key) != after[key]:
                action = "UPDATE" if key in before else "INSERT"
                found.append(change | {"action": action, "after": self.row(key, after[key])})
        return [pa.RecordBatch.from_pylist(found, schema=self.schema.changes)]


#: Go prints 1000000 as 1e+06, and 9007199254740992 is the last integer that a double tells apart.
INTEGERS = tuple((n,) for n in (-1_000_000, 7, 999_999, 1_000_000, 1_234_567, 1 << 53))
KEYS = {
    "an integer": Keys((pa.field("id", pa.int64()),), INTEGERS),
    "a text": Keys(
        (pa.field("id", pa.string()),), tuple((t,) for t in ("", "a", "a b", "1e+06", "<&>", "ü"))
    ),
    "an integer and a text": Keys(
        (pa.field("tenant", pa.int64()), pa.field("code", pa.string())),
        ((1, "a"), (1, "a b"), (2, "a"), (2_000_000, "a"), (2_000_000, "b"), (3, "")),
    ),
    "two texts": Keys(
        (pa.field("left", pa.string()), pa.field("right", pa.string())),
        (("a", "b"), ("a", "c"), ("b", "a"), ("", "a"), ("a", ""), ("[a", "b]")),
    ),
    "a decimal and a truth": Keys(
        (pa.field("amount", pa.decimal128(10, 2)), pa.field("paid", pa.bool_())),
        tuple(
            (Decimal(amount), paid)
            for amount in ("-1.00", "1.00", "1000000.00")
            for paid in (False, True)
        ),
    ),
}


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> LaredoReader:
    return LaredoReader.build(tmp_path_factory.mktemp("laredo"))


async def open_writer(
    folder: Path,
    keys: Keys,
    formats: Sequence[Format] = BOTH,
    layout: Layout = LAREDO,
    ids: str = "id",
) -> ArchiveWriter:
    return await ArchiveWriter.open(
        "public.orders",
        keys.schema,
        [Destination.open(folder.as_uri())],
        formats=formats,
        writer_id="writer-1",
        layout=layout,
        new_id=new_ids(ids),
    )


async def write_history(folder: Path, keys: Keys) -> dict[str, State]:
    """Write bases, diffs, a truncate, re-bases and a gap; return the table at every position."""
    a, b, c, d, e, f = keys.values
    states: dict[str, State] = {
        "0/0": {},
        "0/3": {a: "one", b: "one", c: "one", d: "one"},
        "0/A": {a: "two", c: "one", d: "two", e: "new"},
        "0/B": {f: "after a truncate", d: "again"},
        "1/0": {f: "changed", d: "again", a: "back"},
        "1/10": {a: "back"},
        "1/20": {b: "after a gap", d: "there"},
        "1/21": {b: "after a gap"},
    }
    writer = await open_writer(folder, keys)
    await writer.write_base([], "0/0", reason="first")
    for start, end in (("0/0", "0/3"), ("0/3", "0/A"), ("0/A", "0/B")):
        changes = keys.changes(states[start], states[end], truncate=end == "0/B")
        await writer.write_diff(changes, start, end)
    closing = keys.changes(states["0/B"], states["1/0"])
    await writer.rebase(keys.rows(states["1/0"]), closing, "1/0", reason="forced")
    await writer.write_diff(keys.changes(states["1/0"], states["1/10"]), "1/0", "1/10")
    await writer.write_base(keys.rows(states["1/10"]), "1/10", reason="forced")  # nothing changed
    await writer.write_base(keys.rows(states["1/20"]), "1/20", reason=GAP)
    await writer.write_diff(keys.changes(states["1/20"], states["1/21"]), "1/20", "1/21")
    return states


def as_decoded(keys: Keys, state: State) -> list[dict[str, Any]]:
    """The rows as JSON has them, in a fixed order."""
    rows = [keys.row(key, name) for key, name in state.items()]
    decoded = json.loads(json.dumps(rows, default=str))
    return sorted(decoded, key=lambda row: json.dumps(row, sort_keys=True))


def file_names(folder: Path) -> list[str]:
    files = (path for path in folder.rglob("*.*") if path.is_file())
    return sorted(str(path.relative_to(folder)) for path in files)


@pytest.mark.parametrize("name", KEYS)
async def test_a_reader_by_the_published_rules_rebuilds_every_state(
    tmp_path: Path, reader: LaredoReader, name: str
) -> None:
    keys = KEYS[name]
    states = await write_history(tmp_path, keys)
    for form in ("jsonl", "protobuf"):
        for position, state in states.items():
            found = reader.read(tmp_path, form, keys.names, position)
            assert (found["table"], found["head"]) == ("public.orders", "1/21")
            assert found["position"] == position
            rows = sorted(found["rows"], key=lambda row: json.dumps(row, sort_keys=True))
            assert rows == as_decoded(keys, state), (form, position)


async def test_files_have_the_published_names_and_nothing_else_is_there(tmp_path: Path) -> None:
    await write_history(tmp_path, KEYS["an integer"])
    names = (
        "epoch=1/snapshot-0_0",
        "epoch=1/diff-0_0-0_3",
        "epoch=1/diff-0_3-0_A",
        "epoch=1/diff-0_A-0_B",
        "epoch=1/diff-0_B-1_0",
        "epoch=2/snapshot-1_0",
        "epoch=2/diff-1_0-1_10",
        "epoch=3/snapshot-1_10",
        "epoch=4/snapshot-1_20",
        "epoch=4/diff-1_20-1_21",
    )
    expected = [name + end for name in names for end in (".jsonl", ".pb")]
    assert file_names(tmp_path) == sorted([*expected, "manifest.json"])
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert (manifest["layout"], manifest["position_order"]) == ("laredo", "lsn")
    uris = [ref["uri"] for item in manifest["artifacts"] for ref in item["formats"].values()]
    assert sorted(uris) == sorted(f"{tmp_path.as_uri()}/{name}" for name in expected)


async def test_our_own_reader_rebuilds_verifies_and_exports_it(tmp_path: Path) -> None:
    keys = KEYS["an integer and a text"]
    states = await write_history(tmp_path / "archive", keys)
    found = await streamfold.archive.open(tmp_path / "archive")
    for position, state in states.items():
        rows = (await found.table(position=position)).to_pylist()
        assert {(row["tenant"], row["code"]): row["name"] for row in rows} == state
    verification = await found.verify()
    assert verification.ok, verification
    assert "layout   laredo" in archive_text(found, found.plan()).splitlines()
    await export_archive(found, Destination.open((tmp_path / "copy").as_uri()))
    copy = await streamfold.archive.open(tmp_path / "copy")
    assert (await copy.verify()).ok
    assert file_names(tmp_path / "copy") == file_names(tmp_path / "archive")


@pytest.mark.parametrize(
    ("name", "forms", "key", "why"),
    [
        (
            "two texts",
            BOTH,
            ("a b", "c"),
            r"key field 'left' holds 'a b': .* use layout streamfold",
        ),
        ("an integer", BOTH, ((1 << 53) + 1,), r"holds '9007199254740993': .* without jsonl"),
        ("an integer", BOTH[:1], (-(1 << 53) - 1,), r"holds '-9007199254740993'"),
    ],
)
async def test_keys_that_laredo_would_mix_up_are_refused(
    tmp_path: Path, name: str, forms: Sequence[Format], key: Key, why: str
) -> None:
    keys = KEYS[name]
    writer = await open_writer(tmp_path, keys, forms)
    with pytest.raises(InvalidError, match=why):
        await writer.write_base(keys.rows({key: "x"}), "0/1", reason="first")
    await writer.write_base([], "0/1", reason="first")
    with pytest.raises(InvalidError, match=why):
        await writer.write_diff(keys.changes({}, {key: "x"}), "0/1", "0/2")
    await writer.write_diff(keys.changes({}, {keys.values[0]: "x"}), "0/1", "0/3")


async def test_protobuf_alone_holds_every_integer_key(tmp_path: Path, reader: LaredoReader) -> None:
    keys = KEYS["an integer"]
    large: State = {((1 << 53) + 1,): "a", ((1 << 53) + 2,): "b", (-(1 << 63),): "c"}
    writer = await open_writer(tmp_path, keys, BOTH[1:])
    await writer.write_base(keys.rows(large), "0/1", reason="first")
    rest = dict(list(large.items())[1:])
    await writer.write_diff(keys.changes(large, rest), "0/1", "0/2")
    found = reader.read(tmp_path, "protobuf", ["id"], "0/2")
    assert sorted(row["name"] for row in found["rows"]) == ["b", "c"]
    assert {row["id"] for row in found["rows"]} == {"9007199254740994", "-9223372036854775808"}


@pytest.mark.parametrize(("form", "limit"), [("jsonl", 16 << 20), ("protobuf", 4 << 20)])
async def test_a_row_that_laredo_would_not_take_is_refused(
    tmp_path: Path, form: str, limit: int
) -> None:
    keys = KEYS["an integer"]
    writer = await open_writer(tmp_path, keys, [format_of(form)])
    with pytest.raises(InvalidError, match=f"takes less than {limit}: use layout streamfold"):
        await writer.write_base(keys.rows({(1,): "x" * limit}), "0/1", reason="first")


@pytest.mark.parametrize(
    ("bases", "diffs", "why"),
    [
        (["parquet"], ["jsonl"], "needs one of jsonl, protobuf for both"),
        (["jsonl"], ["protobuf"], "for both bases and diffs"),
        (["parquet"], ["parquet"], "for both bases and diffs"),
    ],
)
async def test_formats_that_laredo_cannot_read_are_refused(
    tmp_path: Path, bases: list[str], diffs: list[str], why: str
) -> None:
    with pytest.raises(InvalidError, match=why):
        await ArchiveWriter.open(
            "public.orders",
            KEYS["an integer"].schema,
            [Destination.open(tmp_path.as_uri())],
            formats=[format_of(name) for name in bases],
            diff_formats=[format_of(name) for name in diffs],
            writer_id="writer-1",
            layout=LAREDO,
        )


async def test_compressed_files_are_refused(tmp_path: Path) -> None:
    forms = [format_of("jsonl", "gzip"), format_of("protobuf")]
    with pytest.raises(InvalidError, match="jsonl with compression gzip has no name"):
        await open_writer(tmp_path, KEYS["an integer"], forms)


@pytest.mark.parametrize(("old", "new"), [(LAREDO, STREAMFOLD), (STREAMFOLD, LAREDO)])
async def test_an_archive_keeps_its_layout(tmp_path: Path, old: Layout, new: Layout) -> None:
    keys = KEYS["an integer"]
    writer = await open_writer(tmp_path, keys, layout=old)
    await writer.write_base([], old.position(-1), reason="first")
    before = (tmp_path / "manifest.json").read_bytes()
    with pytest.raises(
        CommitConflictError, match=f"has layout {old.name}, and {new.name} is wanted"
    ):
        await open_writer(tmp_path, keys, layout=new, ids="other")
    assert (tmp_path / "manifest.json").read_bytes() == before
    await open_writer(tmp_path, keys, layout=old, ids="third")


async def test_an_artifact_is_one_file_of_its_own_epoch(tmp_path: Path) -> None:
    keys = KEYS["an integer"]
    writer = await open_writer(tmp_path, keys)
    with pytest.raises(InvalidError, match="bucket 1 has no name in layout laredo"):
        await writer.write_base({0: [], 1: []}, "0/1", reason="first")
    await writer.write_base({0: []}, "0/1", reason="first")
    with pytest.raises(InvalidError, match="cannot be reused in layout laredo"):
        await writer.write_base({}, "0/1", reason="forced", reuse=[0])


async def test_collection_spares_names_that_a_writer_may_use_again(tmp_path: Path) -> None:
    keys = KEYS["an integer"]
    await write_history(tmp_path, keys)
    left = [
        tmp_path / "epoch=1/diff-0_B-0_C.jsonl",
        tmp_path / "epoch=4/diff-1_21-1_22.jsonl",  # the next diff may have this name
        tmp_path / "epoch=5/snapshot-1_22.jsonl",
    ]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
    destination = Destination.open(tmp_path.as_uri())
    later = datetime.now(UTC) + timedelta(days=1)
    collector = Collector([destination], now=lambda: later, new_id=new_ids("gc"))
    nothing_new = Retention(keep_epochs=1, grace=timedelta(0))
    collected = await collector.collect(nothing_new)
    assert collected.epochs == (1, 2, 3)
    assert [path.exists() for path in left] == [False, True, True]
    assert {name.partition("/")[0] for name in file_names(tmp_path)} == {
        "epoch=4", "epoch=5", "manifest.json",
    }  # fmt: skip
    assert (await (await streamfold.archive.open(tmp_path)).verify()).ok


async def test_an_attempt_that_was_not_committed_is_replaced_under_its_name(
    tmp_path: Path, reader: LaredoReader
) -> None:
    """The next writer has other changes for the same range, as after a change of its settings."""
    keys = KEYS["an integer"]
    a, b, *_ = keys.values
    folder = tmp_path / "archive"
    await (await open_writer(folder, keys)).write_base(keys.rows({a: "one"}), "0/1", reason="first")
    # Opening swaps 7 times for its self-test and once for the claim.
    faults = {Operation.PUT_IF_MATCH: [Fault()] * 8 + [Fault(FaultKind.BEFORE)]}
    blobs = FaultyBlobStore(LocalBlobStore(folder), ScriptedFaults(faults))
    failing = await ArchiveWriter.open(
        "public.orders",
        keys.schema,
        [Destination(blobs, folder.as_uri() + "/")],
        formats=BOTH,
        writer_id="writer-2",
        layout=LAREDO,
    )
    with pytest.raises(BlobUnavailableError):
        await failing.write_diff(keys.changes({}, {b: "first attempt"}), "0/1", "0/2")
    left = folder / "epoch=1" / "diff-0_1-0_2.jsonl"
    assert b"first attempt" in left.read_bytes()
    writer = await open_writer(folder, keys, ids="third")
    await writer.write_diff(keys.changes({}, {b: "second"}), "0/1", "0/2")
    assert (await (await streamfold.archive.open(folder)).verify()).ok
    found = reader.read(folder, "protobuf", keys.names, "0/2")
    assert sorted(row["name"] for row in found["rows"]) == ["one", "second"]


#: What the Go program writes, by position.
LARGE = {"id": 1_000_000, "name": None, "price": None}
SECOND = {"id": 2, "name": "second", "price": -1.0}
WRITTEN_IN_GO = {
    "0/10": [{"id": 1, "name": "<a & b>", "price": 0.5}, LARGE],
    "0/20": [{"id": 1, "name": "changed", "price": 1e21}, SECOND],
    "0/30": [LARGE],
    "0/40": [SECOND, LARGE],
    "1/0": [LARGE],
}
ORDERS = TableSchema.of(
    pa.schema([("id", pa.int64()), ("name", pa.string()), ("price", pa.float64())]), ["id"]
)


@pytest.mark.parametrize("form", ["jsonl", "protobuf"])
@pytest.mark.parametrize("schema", [None, ORDERS], ids=["inferred", "given"])
async def test_ours_reads_what_a_writer_by_the_published_rules_wrote(
    tmp_path: Path, reader: LaredoReader, form: str, schema: TableSchema | None
) -> None:
    reader.write(tmp_path)
    found = await streamfold.archive.open(tmp_path, formats=[form], schema=schema)
    for position, expected in WRITTEN_IN_GO.items():
        rows = (await found.table(position=position)).to_pylist()
        assert sorted(rows, key=lambda row: float(row["id"])) == expected, position
    assert (await found.verify()).ok


async def test_an_archive_of_laredo_that_ours_continues_stays_readable_by_its_rules(
    tmp_path: Path, reader: LaredoReader
) -> None:
    reader.write(tmp_path)
    writer = await ArchiveWriter.open(
        "public.orders",
        ORDERS,
        [Destination.open(tmp_path.as_uri())],
        formats=BOTH,
        writer_id="writer-1",
        layout=LAREDO,
    )
    gone = {"action": "DELETE", "key": {"id": 1_000_000}}
    fresh = {"action": "INSERT", "key": {"id": 2_000_000}, "after": SECOND | {"id": 2_000_000}}
    batch = pa.RecordBatch.from_pylist([gone, fresh], schema=ORDERS.changes)
    manifest = await writer.write_diff([batch], "1/0", "1/8")
    assert manifest.layout == "laredo"
    for form in ("jsonl", "protobuf"):
        found = reader.read(tmp_path, form, ["id"], "1/8")
        assert found["rows"] == [SECOND | {"id": 2_000_000}]
