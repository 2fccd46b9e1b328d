"""Several destinations: files in all before any manifest, the first one decides, others follow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from streamfold.archive.destinations.destination import Destination
from streamfold.archive.destinations.mirrors import Mirrors
from streamfold.archive.errors import ArtifactCorruptError, CommitConflictError
from streamfold.archive.formats import JsonlFormat
from streamfold.archive.manifest.positions import SEQ_NUM
from streamfold.archive.write.artifacts import write_part
from streamfold.archive.write.writer import ArchiveWriter
from streamfold.blob import BlobStore, open_blob_store
from streamfold.errors import BlobUnavailableError, InvalidError
from streamfold.testing.blob_faults import FaultyBlobStore, Operation
from streamfold.testing.blob_kit import keys_of
from streamfold.testing.faults import Fault, FaultKind, FaultyCall
from tests.archive.plain_reader import read_states, read_table
from tests.archive.tables import SCHEMA, at, changes, open_writer, rows
from tests.s3 import S3Server

NO_FAULT = Fault()


class Outage:
    """While `on`, calls of the operations fail before their effect."""

    def __init__(self) -> None:
        self.on: set[Operation] = set()
        self.calls: list[tuple[FaultyCall, str]] = []

    def next_fault(self, operation: FaultyCall, key: str) -> Fault:
        self.calls.append((operation, key))
        return Fault(FaultKind.BEFORE) if operation in self.on else NO_FAULT


ALL = set(Operation)
MANIFESTS = {Operation.PUT_IF_ABSENT, Operation.PUT_IF_MATCH}


class Pair:
    """Two destinations, the second of which can be away."""

    def __init__(self) -> None:
        self.stores: list[BlobStore] = [open_blob_store("memory:"), open_blob_store("memory:")]
        self.outage = Outage()
        self.first = at(self.stores[0], "memory:first/")
        self.second = at(FaultyBlobStore(self.stores[1], self.outage), "memory:second/")

    async def open(self, ids: str = "id") -> ArchiveWriter:
        return await open_writer(self.first, self.second, ids=ids)

    async def tables(self) -> list[dict[int, str]]:
        return [await read_table(store) for store in self.stores]


@pytest.fixture
def pair() -> Pair:
    return Pair()


async def test_every_destination_has_the_archive_with_its_own_uris(pair: Pair) -> None:
    writer = await pair.open()
    await writer.write_base(rows({1: "a"}), "0", reason="first")
    await writer.write_diff(changes(("INSERT", 2, "b")), "0", "1")
    assert await pair.tables() == [{1: "a", 2: "b"}] * 2
    assert not writer.lagging
    for store, name in zip(pair.stores, ("first", "second"), strict=True):
        raw = json.loads(await store.get("manifest.json"))
        uris = [artifact["formats"]["jsonl"]["uri"] for artifact in raw["artifacts"]]
        assert all(uri.startswith(f"memory:{name}/epoch=1/") for uri in uris)
    first, second = [await keys_of(store) for store in pair.stores]
    assert first == second


async def test_nothing_is_committed_before_all_have_the_files(pair: Pair) -> None:
    writer = await pair.open()
    await writer.write_base(rows({1: "a"}), "0", reason="first")
    pair.outage.on = {Operation.PUT}
    with pytest.raises(BlobUnavailableError):
        await writer.write_diff(changes(("INSERT", 2, "b")), "0", "1")
    assert await pair.tables() == [{1: "a"}] * 2
    pair.outage.on = set()
    await writer.write_diff(changes(("INSERT", 2, "b")), "0", "1")
    assert await pair.tables() == [{1: "a", 2: "b"}] * 2


async def test_files_come_before_manifests(pair: Pair) -> None:
    writer = await pair.open()
    pair.outage.calls.clear()
    await writer.write_base(rows({1: "a"}), "0", reason="first")
    writes = [operation for operation, _ in pair.outage.calls if operation.startswith("put")]
    assert writes == [Operation.PUT, Operation.PUT_IF_ABSENT]


async def test_a_destination_that_misses_a_commit_lags_and_is_healed_by_the_next(
    pair: Pair,
) -> None:
    writer = await pair.open()
    await writer.write_base(rows({1: "a"}), "0", reason="first")
    pair.outage.on = MANIFESTS
    await writer.write_diff(changes(("INSERT", 2, "b")), "0", "1")
    assert list(writer.lagging) == ["memory:second/"]
    assert await pair.tables() == [{1: "a", 2: "b"}, {1: "a"}]
    pair.outage.on = set()
    await writer.write_diff(changes(("INSERT", 3, "c")), "1", "2")
    assert not writer.lagging
    assert await pair.tables() == [{1: "a", 2: "b", 3: "c"}] * 2
    assert await read_states(pair.stores[0]) == await read_states(pair.stores[1])


async def test_a_destination_that_is_back_is_healed_without_a_write(pair: Pair) -> None:
    writer = await pair.open()
    pair.outage.on = MANIFESTS
    await writer.write_base(rows({1: "a"}), "0", reason="first")
    assert writer.lagging
    await writer.refresh()
    assert writer.lagging, "it is still away"
    pair.outage.on = set()
    await writer.refresh()
    assert not writer.lagging
    assert await pair.tables() == [{1: "a"}] * 2


async def test_a_new_destination_gets_all_that_is_live(pair: Pair) -> None:
    writer = await open_writer(pair.first)
    await writer.write_base(rows({1: "a"}), "0", reason="first")
    await writer.write_diff(changes(("INSERT", 2, "b")), "0", "1")
    await pair.open("two")
    assert await pair.tables() == [{1: "a", 2: "b"}] * 2


async def test_a_destination_that_was_left_out_for_a_while_gets_what_it_missed(
    pair: Pair,
) -> None:
    writer = await pair.open()
    await writer.write_base(rows({1: "a"}), "0", reason="first")
    alone = await open_writer(pair.first, ids="two")
    await alone.write_diff(changes(("INSERT", 2, "b")), "0", "1")
    await pair.open("three")
    assert await pair.tables() == [{1: "a", 2: "b"}] * 2


async def test_the_newest_destination_counts_whatever_their_order(pair: Pair) -> None:
    writer = await pair.open()
    await writer.write_base(rows({1: "a"}), "0", reason="first")
    pair.outage.on = MANIFESTS
    await writer.write_diff(changes(("INSERT", 2, "b")), "0", "1")
    pair.outage.on = set()
    turned = await open_writer(pair.second, pair.first, ids="two")
    assert turned.head == "1"
    assert await pair.tables() == [{1: "a", 2: "b"}] * 2


async def test_a_destination_that_does_not_answer_keeps_a_writer_from_opening(
    pair: Pair,
) -> None:
    writer = await pair.open()
    await writer.write_base(rows({1: "a"}), "0", reason="first")
    pair.outage.on = ALL
    with pytest.raises(BlobUnavailableError):
        await pair.open("two")
    pair.outage.on = set()
    await writer.write_diff(changes(("INSERT", 2, "b")), "0", "1")


async def test_a_fenced_writer_does_not_touch_the_others(pair: Pair) -> None:
    zombie = await pair.open()
    await zombie.write_base(rows({1: "a"}), "0", reason="first")
    pair.outage.on = MANIFESTS
    await zombie.write_diff(changes(("INSERT", 2, "b")), "0", "1")
    pair.outage.on = set()
    owner = await pair.open("two")
    await owner.write_diff(changes(("INSERT", 3, "c")), "1", "2")
    await zombie.refresh()  # would heal the second, which it believes to lag
    assert await pair.tables() == [{1: "a", 2: "b", 3: "c"}] * 2


async def test_another_archive_is_never_overwritten(pair: Pair) -> None:
    writer = await open_writer(pair.first)
    await writer.write_base(rows({1: "a"}), "0", reason="first")
    other = await open_writer(pair.second, ids="other")
    await other.write_base(rows({9: "z"}), "0", reason="first")
    with pytest.raises(CommitConflictError, match="another archive"):
        await pair.open("three")
    assert await pair.tables() == [{1: "a"}, {9: "z"}]


async def as_plain_copy(store: BlobStore, artifacts: int) -> None:
    """Make the manifest one of a writer that knows the published fields only, as it was earlier."""
    plain = json.loads(await store.get("manifest.json"))
    for name in ("archive_id", "commit_number", "commit_id", "previous_commit_id", "writer"):
        plain.pop(name, None)
    plain["artifacts"] = plain["artifacts"][:artifacts]
    plain["head_position"] = plain["artifacts"][-1]["to_position"]
    await store.put("manifest.json", json.dumps(plain).encode())


async def test_a_copy_without_commit_numbers_is_brought_forward(pair: Pair) -> None:
    writer = await pair.open()
    await writer.write_base(rows({1: "a"}), "0", reason="first")
    await writer.write_diff(changes(("INSERT", 2, "b")), "0", "5")
    for store, artifacts in zip(pair.stores, (1, 2), strict=True):
        await as_plain_copy(store, artifacts)
    # Neither has a number: the second one, which is further, must not be taken back.
    writer = await pair.open("two")
    assert writer.head == "5"
    await writer.write_diff(changes(("INSERT", 3, "c")), "5", "7")
    assert await pair.tables() == [{1: "a", 2: "b", 3: "c"}] * 2
    assert not writer.lagging


async def test_an_archive_without_commit_numbers_is_never_overwritten(pair: Pair) -> None:
    writer = await open_writer(pair.first)
    await writer.write_base(rows({1: "a"}), "0", reason="first")
    other = await open_writer(pair.second, ids="other")
    await other.write_base(rows({9: "z", 10: "y"}), "0", reason="first")
    await as_plain_copy(pair.stores[1], 1)
    with pytest.raises(CommitConflictError, match="another archive"):
        await pair.open("three")
    assert await pair.tables() == [{1: "a"}, {9: "z", 10: "y"}]


async def test_another_table_is_refused(pair: Pair) -> None:
    writer = await ArchiveWriter.open(
        "public.other", SCHEMA, [pair.second], formats=[JsonlFormat()], writer_id="w"
    )
    await writer.write_base(rows({}), "0", reason="first")
    with pytest.raises(CommitConflictError, match=r"holds table 'public\.other'"):
        await pair.open()


async def test_a_damaged_file_is_not_copied(pair: Pair) -> None:
    writer = await open_writer(pair.first)
    manifest = await writer.write_base(rows({1: "a"}), "0", reason="first")
    [part] = manifest.parts()
    await pair.stores[0].put(part.path, b'{"id":2,"name":"b"}\n')
    again = await pair.open("two")
    [reason] = again.lagging.values()
    assert isinstance(reason, ArtifactCorruptError)
    assert await keys_of(pair.stores[1]) == []
    await again.write_diff(changes(("INSERT", 2, "b")), "0", "1")
    assert again.lagging, "the commit is made, and the second one still lacks the base"
    await pair.stores[0].put(part.path, b'{"id":1,"name":"a"}\n')
    await again.refresh()
    assert await pair.tables() == [{1: "a", 2: "b"}] * 2


async def test_a_destination_is_named_once(pair: Pair) -> None:
    for destinations in ([], [pair.first, pair.first]):
        with pytest.raises(InvalidError, match="each named once"):
            await open_writer(*destinations)


async def test_local_disk_and_s3_hold_the_same_archive(
    tmp_path: Path, s3_server: S3Server, s3_url: str
) -> None:
    local = Destination.open(tmp_path.as_uri())
    remote = Destination.open(s3_url, **s3_server.options())
    writer = await open_writer(remote, local)
    await writer.write_base(rows({1: "a"}), "0", reason="first")
    await writer.rebase(rows({2: "b"}), changes(("DELETE", 1, None)), "3", reason="forced")
    assert await read_states(local.blobs) == await read_states(remote.blobs)
    again = await open_writer(remote, local, ids="two")
    await again.write_diff(changes(("INSERT", 3, "c")), "3", "4")
    assert await read_table(local.blobs) == {3: "c", 2: "b"}


@pytest.mark.parametrize("away", ["first", "second"])
async def test_parts_are_written_once_and_committed_when_the_destination_is_back(away: str) -> None:
    stores = {name: open_blob_store("memory:") for name in ("first", "second")}
    outage = Outage()
    stores_seen = stores | {away: FaultyBlobStore(stores[away], outage)}
    pair = [at(store, f"memory:{name}/") for name, store in stores_seen.items()]
    writer = await open_writer(*pair)
    await writer.write_base(rows({1: "a"}), "1", reason="first")
    plan = writer.plan_diff("1", "2")
    outage.on = ALL
    part = await write_part(plan, changes(("INSERT", 2, "b")), Mirrors(pair, SEQ_NUM))
    assert part.lacking == {f"memory:{away}/"}
    for _ in range(3):
        with pytest.raises(BlobUnavailableError) as failure:
            await writer.commit_diff(plan, [part])
        assert failure.value.destination == f"memory:{away}/"
    for name, store in stores.items():
        diffs = [key for key in await keys_of(store) if "/diff-" in key]
        assert len(diffs) == (0 if name == away else 1)
    outage.on = set()
    await writer.commit_diff(plan, [part])
    for store in stores.values():
        assert await read_table(store) == {1: "a", 2: "b"}
        assert len([key for key in await keys_of(store) if "/diff-" in key]) == 1


async def test_a_file_that_no_destination_takes_is_an_error() -> None:
    outage = Outage()
    only = at(FaultyBlobStore(open_blob_store("memory:"), outage), "memory:only/")
    writer = await open_writer(only)
    plan = writer.plan_base("1")
    outage.on = ALL
    with pytest.raises(BlobUnavailableError) as failure:
        await write_part(plan, rows({1: "a"}), Mirrors([only], SEQ_NUM))
    assert failure.value.destination == "memory:only/"


async def test_parts_of_an_earlier_try_are_looked_for_before_they_are_used(pair: Pair) -> None:
    writer = await pair.open()
    plan = writer.plan_base("1")
    mirrors = Mirrors([pair.first, pair.second], SEQ_NUM)
    part = await write_part(plan, rows({1: "a"}), mirrors)
    [file] = part.files.values()
    await pair.stores[0].delete(file.path)
    assert await writer.holds([part])  # copied from the other destination
    for store in pair.stores:
        await store.delete(file.path)
    assert not await writer.holds([part])
