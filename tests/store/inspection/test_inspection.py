"""A check names all damage by stream and record, and nothing else."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from streamfold.errors import FormatUnsupportedError, NotFoundError
from streamfold.model.access_tokens import AccessToken
from streamfold.model.records import Record, trim_record
from streamfold.server.store_check import check_store
from streamfold.store import keys, rows
from streamfold.store.engine.engine import Op, commit_rows
from streamfold.store.engine.location import open_location
from streamfold.store.engine.slatedb import SlateEngine
from streamfold.store.inspection import CheckFinding, CheckReport, Severity
from streamfold.store.log import chunks
from streamfold.store.rows import FormatRow, HeldRow, LeftoversRow, StateRow, StreamRow, TailMark
from streamfold.store.settings import StoreSettings
from streamfold.store.store import StreamStore, open_store
from streamfold.wire.durable_streams.responses import SnapshotDigest
from tests.store.catalog.test_access_tokens import SCOPE
from tests.store.catalog.test_snapshots import publication
from tests.store.conftest import BASIN, at_rest
from tests.store.damaged_tables import Place, only_table
from tests.store.durable_streams import create, fork_of

#: Upkeep only when a test asks for it; appends of some size become files.
SETTINGS = StoreSettings(
    upkeep_interval=3600, reclaim_after=3600, chunk_file_bytes=20_000, trim_grace=0
)
#: Too large for a row; it does not shrink.
LARGE = bytes(range(256)) * 100 + bytes(json.dumps(list(range(9999))), "ascii")


async def fill(store: StreamStore) -> None:
    """Something of everything."""
    await store.create_basin(BASIN)
    for stream in ("rows", "files", "trimmed"):
        await store.create_stream(BASIN, stream)
    for number in range(6):
        await store.append(BASIN, "rows", [Record(b"%d" % number), Record(b"x" * 5000)])
        await store.append(BASIN, "files", [Record(LARGE)])
        await store.append(BASIN, "trimmed", [Record(b"t")])
    await store.append(BASIN, "trimmed", [trim_record(4)])
    await create(store, "source", b"a", content_type="text/plain")
    for number in range(4):
        await append_text(store, "source", number)
    await create(store, "fork", fork=fork_of("source", 3))
    await append_text(store, "fork", 9)
    new = publication(2, b"the state" * 1000, digest=SnapshotDigest("a/b"))
    await store.stream(BASIN, "source").snapshots.publish(new)
    await store.account.issue_access_token(AccessToken("mine", SCOPE))
    await store.documents.put("kind", "id", b"content")
    await store.upkeep()


async def append_text(store: StreamStore, stream: str, number: int) -> None:
    await store.append(BASIN, stream, [Record(b"%d" % number)])


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("filled") / "store"

    async def write() -> None:
        async with open_store(folder.as_uri(), SETTINGS) as store:
            await fill(store)

    asyncio.run(write())
    return folder


@pytest.fixture
def folder(filled: Path, tmp_path: Path) -> Path:
    """A closed store, for this test alone."""
    copy = tmp_path / "store"
    shutil.copytree(filled, copy)
    return copy


async def checked(folder: Path) -> CheckReport:
    return await check_store(str(folder))


def only(report: CheckReport, code: str) -> CheckFinding:
    """The one finding of a report."""
    assert [finding.code for finding in report.findings] == [code], report.findings
    assert report.sound == (report.findings[0].severity is Severity.WARNING)
    return report.findings[0]


async def change(folder: Path, *ops: Op) -> None:
    """Commit rows past the store."""
    engine = await SlateEngine.open(open_location(folder.as_uri()))
    await commit_rows(engine, ops)
    await engine.close()


async def stored(folder: Path, key: bytes) -> bytes:
    engine = await SlateEngine.open(open_location(folder.as_uri()))
    value = await engine.get(key)
    await engine.close()
    assert value is not None
    return value


async def stream_id(folder: Path, stream: str) -> int:
    return rows.decode(await stored(folder, keys.stream(BASIN, stream)), StreamRow).id


async def state_of(folder: Path, stream: str) -> StateRow:
    return rows.decode(await stored(folder, keys.state(await stream_id(folder, stream))), StateRow)


async def test_a_sound_store_is_sound_and_everything_is_counted(folder: Path) -> None:
    report = await checked(folder)
    assert report.sound
    assert report.findings == []
    counts = report.counts
    assert (counts.basins, counts.streams, counts.chunk_files) == (1, 5, 6)
    assert counts.records == 12 + 6 + 7 - 4 + 5 + 1
    assert (counts.forks, counts.snapshots, counts.access_tokens, counts.documents) == (1, 1, 1, 1)
    assert counts.snapshot_bytes == 9000
    assert report.format == 4


async def test_a_check_changes_nothing_that_the_store_holds(folder: Path) -> None:
    def content() -> dict[str, bytes]:
        return {
            str(path.relative_to(folder)): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file() and path.parent.name != "manifest"
        }

    before = content()
    await checked(folder)
    assert content() == before


async def test_a_store_in_use_is_checked_beside_its_writer(tmp_path: Path) -> None:
    async with open_store(tmp_path.as_uri(), SETTINGS) as store:
        await fill(store)
        report = await checked(tmp_path)
        assert report.sound, report.findings
        assert report.counts.log_files > 10  # most is in the log alone
        await append_text(store, "rows", 1)
        assert (await checked(tmp_path)).counts.records == report.counts.records + 1


@pytest.mark.parametrize("version", ["v1", "v2", "v3", "v4"])
async def test_stores_of_former_versions_are_sound(version: str, tmp_path: Path) -> None:
    copy = tmp_path / version
    shutil.copytree(Path(__file__).parents[1] / "golden" / version, copy)
    report = await checked(copy)
    assert report.findings == []
    assert report.format == int(version[1:])


async def test_a_damaged_block_of_records_names_the_stream_and_its_records(tmp_path: Path) -> None:
    async with open_store(tmp_path.as_uri(), StoreSettings(upkeep_interval=3600)) as store:
        await store.create_basin(BASIN)
        for stream in ("first", "second"):
            await store.create_stream(BASIN, stream)
            for number in range(60):
                await store.append(BASIN, stream, [Record(random.Random(number).randbytes(6000))])
    table = await only_table(tmp_path)
    first = await stream_id(tmp_path, "first")
    number = table.block_of(keys.chunk(first, 30))
    shown = keys.chunk_last_seq_num(table.blocks[number][1])
    table = await only_table(tmp_path)
    table.flip_at(table.blocks[number][0] + 100)
    report = await checked(tmp_path)
    found = [each for each in report.findings if each.code == "records_missing"]
    assert [(each.basin, each.stream) for each in found] == [(BASIN, "first")]
    lost = range(found[0].first_seq_num or 0, found[0].next_seq_num or 0)
    assert {shown, 30} <= set(lost)
    assert len(lost) < 20
    assert found[0].file == table.name
    assert {each.code for each in report.findings} == {"records_missing", "table_damaged"}


@pytest.mark.parametrize("place", [Place.FIRST_BLOCK, Place.FILTER, Place.INDEX])
async def test_other_damage_to_a_table_is_found(folder: Path, place: Place) -> None:
    table = await only_table(folder)
    table.flip(place)
    report = await checked(folder)
    assert not report.sound
    assert table.name in {finding.file for finding in report.findings}


async def test_a_missing_table_is_found(folder: Path) -> None:
    table = await only_table(folder)
    table.path.unlink()
    report = await checked(folder)
    assert not report.sound
    assert ("table_missing", table.name) in [(each.code, each.file) for each in report.findings]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def chunk_files(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "chunks").rglob("*-*-*") if path.is_file())


@pytest.mark.parametrize("damage", [flip, cut])
async def test_a_damaged_chunk_file_names_its_records(
    folder: Path, damage: Callable[[Path], None]
) -> None:
    file = chunk_files(folder)[2]
    damage(file)
    finding = only(await checked(folder), "records_damaged")
    assert (finding.basin, finding.stream) == (BASIN, "files")
    assert (finding.first_seq_num, finding.next_seq_num) == (2, 3)
    assert finding.file == str(file.relative_to(folder))


async def test_a_missing_chunk_file_names_its_records(folder: Path) -> None:
    file = chunk_files(folder)[5]
    file.unlink()
    finding = only(await checked(folder), "chunk_file_missing")
    assert (finding.stream, finding.first_seq_num, finding.next_seq_num) == ("files", 5, 6)
    assert finding.file == str(file.relative_to(folder))


async def test_the_missing_file_of_a_trimmed_chunk_is_no_damage(folder: Path) -> None:
    trimmed = chunk_files(folder)[:3]
    async with open_store(folder.as_uri(), SETTINGS) as store:
        await store.append(BASIN, "files", [trim_record(3)])
    for file in trimmed:  # as upkeep does, which deletes the rows afterwards
        file.unlink(missing_ok=True)
    assert (await checked(folder)).findings == []


async def test_a_chunk_that_is_gone_is_a_gap(folder: Path) -> None:
    await change(folder, (keys.chunk(await stream_id(folder, "rows"), 5), None))
    finding = only(await checked(folder), "records_missing")
    assert (finding.stream, finding.first_seq_num, finding.next_seq_num) == ("rows", 4, 6)
    assert "they are not stored" in finding.message


@pytest.mark.parametrize("last", [1, 11])
async def test_the_first_and_the_last_chunk_are_missed_too(folder: Path, last: int) -> None:
    rows_id = await stream_id(folder, "rows")
    held = rows.decode(await stored(folder, keys.stream_bytes(rows_id)), HeldRow)
    await change(folder, (keys.chunk(rows_id, last), None), (keys.stream_bytes(rows_id), None))
    assert held.counted_to == 12
    finding = only(await checked(folder), "records_missing")
    assert (finding.stream, finding.first_seq_num, finding.next_seq_num) == (
        "rows",
        last - 1,
        last + 1,
    )


async def test_records_beyond_the_tail_are_found(folder: Path) -> None:
    state = await state_of(folder, "rows")
    assert state.tail is not None
    earlier = TailMark(10, state.tail.timestamp, state.tail.arrived_at)
    row = rows.encode(StateRow(tail=earlier))
    await change(folder, (keys.state(await stream_id(folder, "rows")), row))
    finding = only(await checked(folder), "records_beyond_tail")
    assert (finding.stream, finding.first_seq_num, finding.next_seq_num) == ("rows", 10, 12)


async def test_a_trim_point_beyond_the_tail_is_found(folder: Path) -> None:
    state = await state_of(folder, "rows")
    row = rows.encode(StateRow(tail=state.tail, trim_point=13))
    await change(folder, (keys.state(await stream_id(folder, "rows")), row))
    assert only(await checked(folder), "trim_beyond_tail").stream == "rows"


async def test_timestamps_that_go_back_are_found(folder: Path) -> None:
    key = keys.chunk(await stream_id(folder, "rows"), 5)
    chunk = chunks.decode(await stored(folder, key))
    header = bytearray(await stored(folder, key))
    header[16:32] = (1).to_bytes(8, "big") * 2  # first and last timestamp
    assert chunk.first_timestamp > 1
    await change(folder, (key, bytes(header)))
    codes = {each.code: each for each in (await checked(folder)).findings}
    assert codes["timestamp_decreases"].first_seq_num == 4
    assert codes["records_damaged"].first_seq_num == 4  # the payload says otherwise


async def test_a_chunk_whose_payload_is_wrong_is_found(folder: Path) -> None:
    rows_id = await stream_id(folder, "rows")
    other = await stored(folder, keys.chunk(rows_id, 1))
    value = await stored(folder, keys.chunk(rows_id, 3))
    await change(folder, (keys.chunk(rows_id, 3), value[:40] + other[40:]))
    finding = only(await checked(folder), "records_damaged")
    assert (finding.stream, finding.first_seq_num, finding.next_seq_num) == ("rows", 2, 4)


async def test_records_that_only_a_fork_needs_are_missed(folder: Path) -> None:
    source = await stream_id(folder, "source")
    async with open_store(folder.as_uri(), SETTINGS) as store:
        await store.append(BASIN, "source", [trim_record(5)])
        await store.upkeep()
    assert (await checked(folder)).findings == []
    await change(folder, (keys.chunk(source, 1), None), (keys.stream_bytes(source), None))
    finding = only(await checked(folder), "records_missing")
    assert (finding.stream, finding.first_seq_num, finding.next_seq_num) == ("fork", 1, 2)
    assert "inherits from stream 'source'" in finding.message


async def test_a_fork_that_its_source_does_not_know_is_found(folder: Path) -> None:
    source, fork = await stream_id(folder, "source"), await stream_id(folder, "fork")
    await change(folder, (keys.fork(source, fork), None))
    assert only(await checked(folder), "fork_unprotected").stream == "fork"


async def test_records_of_a_stream_without_a_name_are_found(folder: Path) -> None:
    lost = await stream_id(folder, "rows")
    await change(folder, (keys.stream(BASIN, "rows"), None))
    finding = only(await checked(folder), "stream_missing")
    assert (finding.stream_id, finding.first_seq_num, finding.next_seq_num) == (lost, 0, 12)


async def test_streams_without_their_basin_are_found(folder: Path) -> None:
    await change(folder, (keys.basin(BASIN), None))
    report = await checked(folder)
    assert {finding.code for finding in report.findings} == {"basin_missing"}
    assert len(report.findings) == 5


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
async def test_a_damaged_snapshot_names_its_stream(
    folder: Path, damage: Callable[[Path], None]
) -> None:
    [blob] = [path for path in (folder / "snapshots").rglob("*-*") if path.is_file()]
    damage(blob)
    finding = only(await checked(folder), "snapshot_damaged")
    assert (finding.stream, finding.first_seq_num) == ("source", 2)
    assert finding.file == str(blob.relative_to(folder))


@pytest.mark.parametrize(
    ("key", "subject"),
    [
        (keys.basin(BASIN), "basin 'test-basin'"),
        (keys.stream(BASIN, "rows"), "stream 'rows' in basin 'test-basin'"),
        (keys.token("mine"), "access token 'mine'"),
        (keys.SPACE, "the row 'space'"),
        (keys.document("ds-subscription/b", "sub"), "the document 'sub'"),
    ],
)
async def test_a_row_that_cannot_be_decoded_is_named(
    folder: Path, key: bytes, subject: str
) -> None:
    await change(folder, (key, b"\xc1garbage"))
    report = await checked(folder)
    assert any(
        finding.code == "row_damaged" and finding.message.startswith(subject)
        for finding in report.findings
    ), report.findings


async def test_a_token_that_is_accepted_but_not_listed_is_found(folder: Path) -> None:
    await change(folder, (keys.token("mine"), None))
    finding = only(await checked(folder), "row_damaged")
    assert finding.message.startswith("access token 'mine'")
    assert "cannot be revoked" in finding.message


async def test_bytes_that_are_counted_wrongly_are_a_warning(folder: Path) -> None:
    rows_id = await stream_id(folder, "rows")
    held = rows.decode(await stored(folder, keys.stream_bytes(rows_id)), HeldRow)
    wrong = HeldRow(held.counted_to, held.size + 1, held.hour, held.course)
    await change(folder, (keys.stream_bytes(rows_id), rows.encode(wrong)))
    assert only(await checked(folder), "held_wrong").stream == "rows"


async def test_files_that_no_row_names_are_counted_and_named_after_their_grace(
    folder: Path,
) -> None:
    file = folder / "chunks" / "00000001" / "00000000" / f"fff-{1:016x}-{9:016x}"
    file.write_bytes(b"left over")
    report = await checked(folder)
    assert report.findings == []
    assert (report.counts.unnamed_files, report.counts.unnamed_bytes) == (1, 9)
    noted = rows.encode(LeftoversRow({str(file.relative_to(folder / "chunks")): 1}))
    await change(folder, (keys.leftovers("chunk"), noted))
    assert only(await checked(folder), "file_unnamed").file == str(file.relative_to(folder))


@pytest.fixture
async def crashed(tmp_path: Path, no_collections: None) -> Path:
    """The folder of a store whose process was killed: all of it is in the log."""
    running, crashed = tmp_path / "running", tmp_path / "crashed"
    async with open_store(running.as_uri(), SETTINGS) as store:
        await store.create_basin(BASIN)
        await store.create_stream(BASIN, "early")
        mount = (await store._supervisor.mounted()).mount
        await mount.engine.flush()
        for number in range(8):
            await append_text(store, "early", number)
        await at_rest(store)
        while not crashed.exists():
            try:
                shutil.copytree(running, crashed)
            except shutil.Error:  # SlateDB deleted a log file that it does not need any more
                shutil.rmtree(crashed)
    return crashed


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink, lambda path: path.write_bytes(b"")])
async def test_a_damaged_log_file_names_the_streams_of_the_files_after_it(
    crashed: Path, damage: Callable[[Path], None]
) -> None:
    assert (await checked(crashed)).sound
    log = sorted(path for path in (crashed / "db" / "wal").iterdir() if path.stat().st_size)
    damage(log[-3])
    report = await checked(crashed)
    codes = {finding.code: finding for finding in report.findings}
    assert codes["log_damaged"].file == f"db/wal/{log[-3].name}"
    lost = codes["records_not_replayed"]
    assert (lost.stream, lost.first_seq_num, lost.next_seq_num) == ("early", 6, 8)


async def test_what_a_power_cut_would_need_is_checked(folder: Path) -> None:
    point = json.loads((folder / "db" / "restore-point").read_text())
    (folder / "db" / "manifest" / f"{point['manifest']:020d}.manifest").unlink()
    finding = only(await checked(folder), "restore_point_damaged")
    assert f"manifest {point['manifest']} is missing" in finding.message


async def test_what_is_no_store_or_of_a_newer_version_cannot_be_checked(folder: Path) -> None:
    with pytest.raises(NotFoundError, match="the folder does not exist"):
        await checked(folder / "nowhere")
    with pytest.raises(NotFoundError, match="it has no folder 'db'"):
        await checked(folder / "chunks")
    await change(folder, (keys.FORMAT, rows.encode(FormatRow(5))))
    with pytest.raises(FormatUnsupportedError, match="format 5"):
        await checked(folder)
    shutil.rmtree(folder / "db" / "manifest")
    with pytest.raises(NotFoundError, match="only a part of a store"):
        await checked(folder)
