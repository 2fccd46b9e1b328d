from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from streamfold.archive.destinations.destination import PROBE, Destination
from streamfold.archive.errors import CommitUnknownError, ManifestNotFoundError
from streamfold.archive.maintenance.garbage_collection import Collector, Retention
from streamfold.archive.manifest.updates import PruneEpochs, Stamp
from streamfold.archive.write.writer import ArchiveWriter
from streamfold.blob import BlobStore, LocalBlobStore
from streamfold.errors import BlobUnavailableError, InvalidError
from streamfold.testing.blob_faults import FaultyBlobStore, Operation
from streamfold.testing.blob_kit import keys_of
from streamfold.testing.faults import Fault, FaultKind, ScriptedFaults
from tests.archive.plain_reader import read_states, read_table
from tests.archive.tables import Clock, at, changes, new_ids, open_writer, rows

DAY = timedelta(days=1)
NO_GRACE = Retention(grace=timedelta(0))


class World:
    """An archive on local disk whose files can be made to look old, and its collector."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = Clock()
        self.clock.time = datetime.now(UTC)
        self.blobs: BlobStore = LocalBlobStore(root)
        self.collector = self.collect_in(self.blobs)

    def collect_in(self, blobs: BlobStore) -> Collector:
        return Collector([at(blobs)], now=self.clock.now, new_id=new_ids("gc"))

    def age(self, by: timedelta) -> None:
        """Let time pass, for the clock and for every file."""
        self.clock.time += by
        for path in [*self.root.glob("epoch=*/*"), *self.root.glob(f"{PROBE}*")]:
            past = path.stat().st_mtime - by.total_seconds()
            os.utime(path, (past, past))

    async def write_epochs(self, count: int) -> ArchiveWriter:
        """Write bases of epochs 1 to `count`, a day apart, each followed by a diff."""
        writer = await open_writer(at(self.blobs), clock=self.clock)
        await writer.write_base(rows({1: "1"}), "1", reason="first")
        for epoch in range(2, count + 1):
            self.age(DAY)
            closing = changes(("INSERT", epoch, str(epoch)))
            state = {number: str(number) for number in range(1, epoch + 1)}
            await writer.rebase(rows(state), closing, str(epoch), reason="forced")
        return writer

    async def epochs(self) -> list[int]:
        stored = await at(self.blobs).read()
        assert stored is not None
        return sorted({artifact.epoch for artifact in stored.manifest.artifacts})

    async def folders(self) -> set[str]:
        return {key.split("/")[0] for key in await keys_of(self.blobs, "epoch=")}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_epochs_beyond_the_number_kept_are_pruned(world: World) -> None:
    await world.write_epochs(4)
    result = await world.collector.collect(Retention(keep_epochs=2))
    assert result.epochs == (1, 2)
    assert await world.epochs() == [3, 4]
    assert [state for _, state in await read_states(world.blobs)][-1] == {
        1: "1",
        2: "2",
        3: "3",
        4: "4",
    }
    stored = await at(world.blobs).read()
    assert stored is not None
    assert stored.manifest.oldest_readable_position == "3"


async def test_epochs_replaced_long_ago_are_pruned(world: World) -> None:
    await world.write_epochs(4)
    world.age(DAY)
    result = await world.collector.collect(Retention(max_age=timedelta(days=2)))
    assert result.epochs == (1, 2), "epoch 2 was replaced two days ago, epoch 3 one day ago"


async def test_the_newest_epoch_always_stays(world: World) -> None:
    await world.write_epochs(2)
    world.age(100 * DAY)
    await world.collector.collect(Retention(max_age=DAY))
    assert await world.epochs() == [2]
    with pytest.raises(InvalidError, match="newest one stays"):
        Retention(keep_epochs=0)


async def test_without_limits_nothing_is_pruned(world: World) -> None:
    await world.write_epochs(3)
    world.age(100 * DAY)
    before = await world.blobs.get("manifest.json")
    result = await world.collector.collect(Retention())
    assert (result.epochs, result.files) == ((), ())
    assert await world.blobs.get("manifest.json") == before


async def test_files_of_a_pruned_epoch_stay_for_the_grace_period(world: World) -> None:
    await world.write_epochs(3)
    world.age(10 * DAY)
    first = await world.collector.collect(Retention(keep_epochs=1))
    assert first.files == (), "old files, but a reader may have planned a moment ago"
    assert await world.folders() == {"epoch=1", "epoch=2", "epoch=3"}
    world.age(DAY)
    second = await world.collector.collect(Retention(keep_epochs=1))
    assert len(second.files) == 4
    assert await world.folders() == {"epoch=3"}
    assert await read_table(world.blobs) == {1: "1", 2: "2", 3: "3"}
    stored = await at(world.blobs).read()
    assert stored is not None
    assert stored.manifest.retired == ()


async def test_orphans_go_when_they_are_old_and_live_files_never(world: World) -> None:
    await world.write_epochs(1)
    await world.blobs.put("epoch=9/diff-of-a-crashed-writer", b"x")
    await world.blobs.put(f"{PROBE}of-a-crashed-check", b"x")
    assert (await world.collector.collect(Retention())).files == ()
    world.age(2 * DAY)
    await world.blobs.put("epoch=9/diff-under-way", b"x")
    await world.blobs.put("notes.txt", b"not ours")
    result = await world.collector.collect(Retention())
    assert [file.path for file in result.files] == [
        "epoch=9/diff-of-a-crashed-writer",
        f"{PROBE}of-a-crashed-check",
    ]
    assert await read_table(world.blobs) == {1: "1"}
    assert "notes.txt" in await keys_of(world.blobs)


async def test_the_storage_clock_decides_about_the_age_of_files(world: World) -> None:
    await world.write_epochs(1)
    await world.blobs.put("epoch=9/diff-under-way", b"x")
    world.clock.time += 1000 * DAY  # this machine's clock is wrong
    assert (await world.collector.collect(Retention())).files == ()


async def test_a_dry_run_changes_nothing_and_lists_what_would_be_deleted(world: World) -> None:
    await world.write_epochs(3)
    await world.blobs.put("epoch=9/orphan", b"xyz")
    world.age(2 * DAY)
    before = {key: await world.blobs.get(key) for key in await keys_of(world.blobs)}
    result = await world.collector.collect(Retention(keep_epochs=1), dry_run=True)
    assert result.dry_run
    assert result.epochs == (1, 2)
    assert [(file.path, file.size_bytes) for file in result.files] == [("epoch=9/orphan", 3)]
    assert {key: await world.blobs.get(key) for key in await keys_of(world.blobs)} == before


async def test_a_pin_keeps_its_epoch_until_it_expires(world: World) -> None:
    await world.write_epochs(3)
    await world.collector.pin("report", 1, 5 * DAY, reason="monthly report")
    assert (await world.collector.collect(Retention(keep_epochs=1))).epochs == (2,)
    assert await world.epochs() == [1, 3]
    world.age(4 * DAY)
    await world.collector.collect(Retention(keep_epochs=1))
    assert "epoch=1" in await world.folders()
    world.age(DAY)
    assert (await world.collector.collect(Retention(keep_epochs=1))).epochs == (1,)
    stored = await at(world.blobs).read()
    assert stored is not None
    assert stored.manifest.pins == ()


async def test_a_pin_can_be_taken_back_and_renewed(world: World) -> None:
    await world.write_epochs(2)
    await world.collector.pin("report", 1, DAY)
    manifest = await world.collector.pin("report", 1, 9 * DAY)
    assert [pin.id for pin in manifest.pins] == ["report"]
    assert (await world.collector.unpin("report")).pins == ()
    assert (await world.collector.unpin("report")).pins == ()
    with pytest.raises(InvalidError, match="epoch 7"):
        await world.collector.pin("other", 7, DAY)
    with pytest.raises(InvalidError, match="lifetime"):
        await world.collector.pin("other", 1, timedelta(0))


async def test_a_pin_that_arrives_while_a_collection_runs_is_respected(world: World) -> None:
    await world.write_epochs(3)
    manifest = await world.collector.pin("late", 1, 5 * DAY)
    planned_before = PruneEpochs(frozenset({1, 2, 3}), forget_before=world.clock.now())
    pruned = planned_before.apply(manifest, Stamp("commit", world.clock.now()))
    assert {artifact.epoch for artifact in pruned.artifacts} == {1, 3}


async def test_parts_that_a_later_base_uses_again_outlive_their_epoch(world: World) -> None:
    writer = await open_writer(at(world.blobs), clock=world.clock)
    await writer.write_base({0: rows({2: "b"}), 1: rows({1: "a"})}, "1", reason="first")
    closing = changes(("UPDATE", 1, "A"))
    await writer.rebase({1: rows({1: "A"})}, closing, "2", reason="forced", reuse=[0])
    await world.collector.collect(Retention(keep_epochs=1))
    world.age(2 * DAY)
    await world.collector.collect(Retention(keep_epochs=1))
    assert len(await keys_of(world.blobs, "epoch=1/")) == 1
    assert await read_table(world.blobs) == {1: "A", 2: "b"}


async def test_nothing_is_deleted_after_an_unknown_outcome(world: World) -> None:
    await world.write_epochs(3)
    await world.blobs.put("epoch=9/orphan", b"x")
    world.age(2 * DAY)
    script = {
        Operation.PUT_IF_MATCH: [Fault(FaultKind.AFTER)],
        Operation.GET_WITH_ETAG: [Fault(), Fault(FaultKind.BEFORE)],
    }
    collector = world.collect_in(FaultyBlobStore(world.blobs, ScriptedFaults(script)))
    before = set(await keys_of(world.blobs, "epoch="))
    with pytest.raises(CommitUnknownError, match="nothing was deleted"):
        await collector.collect(Retention(keep_epochs=1))
    assert set(await keys_of(world.blobs, "epoch=")) == before


async def test_nothing_is_deleted_when_a_manifest_cannot_be_read(world: World) -> None:
    await world.write_epochs(1)
    await world.blobs.put("epoch=9/orphan", b"x")
    world.age(2 * DAY)
    script = {Operation.GET_WITH_ETAG: [Fault(), Fault(FaultKind.BEFORE)]}
    collector = world.collect_in(FaultyBlobStore(world.blobs, ScriptedFaults(script)))
    with pytest.raises(BlobUnavailableError):
        await collector.collect(NO_GRACE)
    assert "epoch=9/orphan" in await keys_of(world.blobs)


async def test_a_destination_without_a_manifest_keeps_its_files(
    world: World, tmp_path: Path
) -> None:
    await world.write_epochs(1)
    other = Destination.open((tmp_path / "other").as_uri())
    await other.blobs.put("epoch=1/waiting-for-its-manifest", b"x")
    collector = Collector([at(world.blobs), other], now=world.clock.now, new_id=new_ids("gc"))
    world.age(2 * DAY)
    await collector.collect(NO_GRACE)
    assert await keys_of(other.blobs, "epoch=") == ["epoch=1/waiting-for-its-manifest"]


async def test_what_a_lagging_destination_still_names_stays_there(tmp_path: Path) -> None:
    world = World(tmp_path / "first")
    second = Destination.open((tmp_path / "second").as_uri())
    writer = await open_writer(at(world.blobs), second, clock=world.clock)
    await writer.write_base(rows({1: "a"}), "1", reason="first")
    alone = await open_writer(at(world.blobs), ids="two", clock=world.clock)
    await alone.rebase(rows({2: "b"}), changes(("DELETE", 1, None)), "2", reason="forced")
    refusing = FaultyBlobStore(
        second.blobs, ScriptedFaults({Operation.PUT_IF_MATCH: [Fault(FaultKind.BEFORE)] * 9})
    )
    collector = Collector(
        [at(world.blobs), Destination(refusing, second.uri)],
        now=world.clock.now,
        new_id=new_ids("gc"),
    )
    await collector.collect(Retention(keep_epochs=1, grace=timedelta(0)))
    assert await read_table(second.blobs) == {1: "a"}


async def test_a_writer_and_a_collector_work_side_by_side(world: World) -> None:
    writer = await world.write_epochs(2)
    await world.collector.collect(Retention(keep_epochs=1))
    await writer.write_diff(changes(("INSERT", 9, "9")), "2", "9")
    assert await world.epochs() == [2]
    assert await read_table(world.blobs) == {1: "1", 2: "2", 9: "9"}


async def test_an_archive_must_be_there(world: World) -> None:
    with pytest.raises(ManifestNotFoundError):
        await world.collector.collect(Retention())
