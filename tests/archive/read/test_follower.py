"""Consumers that are kept up to date, whatever the writer and collection do meanwhile."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from streamfold.archive import (
    Archive,
    ArchiveWriter,
    ArtifactCorruptError,
    Changes,
    Collector,
    PartGoneError,
    PositionInvalidError,
    Retention,
    Rows,
)
from streamfold.archive.read.decoding import Decoding
from streamfold.archive.read.part_files import PartFiles
from streamfold.blob import LocalBlobStore
from streamfold.testing.blob_faults import FaultyBlobStore
from streamfold.testing.faults import ScriptedFaults
from tests.archive.reading import HISTORY, Consumer, folder_at, reopened, state_at, write_history
from tests.archive.tables import at, changes, new_ids, open_writer, rows

#: Longer than any test: news come by waking.
NEVER = timedelta(hours=1)


class Bell:
    """Wakes a follower when it is rung, and not otherwise."""

    def __init__(self) -> None:
        self._rung = asyncio.Event()

    def ring(self) -> None:
        self._rung.set()

    async def wait(self) -> None:
        await self._rung.wait()
        self._rung.clear()


class Followed:
    """A consumer and the follower that feeds it."""

    def __init__(self, archive: Archive, since: str | None = None, state: object = None) -> None:
        self.bell = Bell()
        self.archive = archive
        self.consumer = Consumer(state)  # type: ignore[arg-type]
        self._news = archive.follow(since, poll=NEVER, wake=self.bell.wait)

    async def until(self, position: str) -> dict[int, str]:
        """Take what comes until the consumer has the table at `position`."""
        self.bell.ring()
        async with asyncio.timeout(300):
            async for item in self._news:
                self.consumer.take(item)
                reached = item.position if isinstance(item, Rows) else item.to_position
                if item.last and reached == position:
                    return self.consumer.state
        raise AssertionError("a follower never ends")

    async def stop(self) -> None:
        await self._news.aclose()


async def collect(folder: Path, keep: int = 1) -> None:
    """Collect as if the grace period were over long since."""
    collector = Collector(
        [folder_at(folder)], now=lambda: datetime.now(UTC), new_id=new_ids(os.urandom(4).hex())
    )
    retention = Retention(keep_epochs=keep, grace=timedelta(0))
    await collector.collect(retention)
    make_old(folder)
    await collector.collect(retention)


def make_old(folder: Path) -> None:
    for path in folder.glob("epoch=*/*"):
        os.utime(path, (1, 1))


async def test_a_follower_begins_with_the_rows_and_continues_with_changes(tmp_path: Path) -> None:
    writer = await write_history(tmp_path)
    followed = Followed(await reopened(tmp_path))
    assert await followed.until("31") == HISTORY["31"]
    await writer.write_diff(changes(("DELETE", 1, None)), "31", "40")
    assert await followed.until("40") == {3: "c", 4: "D"}
    assert followed.consumer.reloads == ["start"]
    await followed.stop()


async def test_a_rebase_does_not_load_the_rows_again(tmp_path: Path) -> None:
    writer = await write_history(tmp_path)
    followed = Followed(await reopened(tmp_path))
    await followed.until("31")
    for position in range(32, 36):
        state = {position: "new"}
        closing = changes(("TRUNCATE", None, None), ("INSERT", position, "new"))
        await writer.rebase(rows(state), closing, str(position), reason="forced")
        assert await followed.until(str(position)) == state
    assert followed.consumer.reloads == ["start"]
    await followed.stop()


async def test_a_consumer_with_a_table_continues_from_its_position(tmp_path: Path) -> None:
    await write_history(tmp_path)
    for since, state in HISTORY.items():
        if since == "31":
            continue
        followed = Followed(await reopened(tmp_path), since, state)
        assert await followed.until("31") == HISTORY["31"]
        assert followed.consumer.reloads == []
        await followed.stop()


async def test_a_gap_brings_the_rows_again_with_the_reason(tmp_path: Path) -> None:
    writer = await write_history(tmp_path)
    followed = Followed(await reopened(tmp_path))
    await followed.until("31")
    await writer.write_base(rows({8: "h"}), "50", reason="gap")
    assert await followed.until("50") == {8: "h"}
    assert followed.consumer.reloads == ["start", "gap"]
    await followed.stop()


async def test_who_was_away_while_epochs_were_pruned_gets_the_rows_again(tmp_path: Path) -> None:
    writer = await write_history(tmp_path)
    followed = Followed(await reopened(tmp_path))
    await followed.until("31")
    await writer.rebase(rows({5: "e"}), changes(("INSERT", 5, "e")), "60", reason="forced")
    await collect(tmp_path)
    assert await followed.until("60") == {5: "e"}
    assert followed.consumer.reloads == ["start", "pruned"]
    await followed.stop()


async def test_an_empty_table_is_news_too(tmp_path: Path) -> None:
    writer = await open_writer(folder_at(tmp_path))
    await writer.write_base(rows({}), "-1", reason="first")
    followed = Followed(await reopened(tmp_path), state={1: "of long ago"})
    assert await followed.until("-1") == {}
    await followed.stop()


async def test_another_archive_in_the_same_folder_is_loaded_anew(tmp_path: Path) -> None:
    await write_history(tmp_path)
    followed = Followed(await reopened(tmp_path))
    await followed.until("31")
    manifest = tmp_path / "manifest.json"
    manifest.rename(tmp_path / "manifest.old")
    other = await open_writer(folder_at(tmp_path), ids="other")
    await other.write_base(rows({1: "other"}), "40", reason="first")
    assert await followed.until("40") == {1: "other"}
    assert followed.consumer.reloads == ["start", "replaced"]
    await followed.stop()


async def test_a_position_after_the_head_is_an_error_not_a_wait(tmp_path: Path) -> None:
    await write_history(tmp_path)
    followed = Followed(await reopened(tmp_path), "99")
    with pytest.raises(PositionInvalidError, match="after the head"):
        await followed.until("99")


async def test_without_a_bell_the_manifest_is_polled(tmp_path: Path) -> None:
    writer = await write_history(tmp_path)
    archive = await reopened(tmp_path)
    async with aclosing(archive.follow("31", poll=timedelta(milliseconds=1))) as news:
        waiting = asyncio.ensure_future(anext(news))
        await writer.write_diff(changes(("INSERT", 9, "i")), "31", "40")
        async with asyncio.timeout(300):
            item = await waiting
    assert isinstance(item, Changes)
    assert item.to_position == "40"


async def test_a_wake_that_fails_is_heard(tmp_path: Path) -> None:
    await write_history(tmp_path)

    async def fail() -> None:
        raise TimeoutError("the subscription ended")

    archive = await reopened(tmp_path)
    with pytest.raises(TimeoutError, match="the subscription ended"):
        async for _ in archive.follow("31", poll=NEVER, wake=fail):
            pass


class CollectedMeanwhile(FaultyBlobStore):
    """A store in which collection runs just before the n-th file is fetched."""

    def __init__(self, folder: Path, writer: ArchiveWriter, at_fetch: int) -> None:
        super().__init__(LocalBlobStore(folder), ScriptedFaults())
        self._folder = folder
        self._writer = writer
        self._left = at_fetch

    async def stream(self, key: str, chunk_size: int = 1 << 20) -> AsyncIterator[bytes]:
        self._left -= 1
        if self._left == 0:
            state = {1: "A", 3: "c", 4: "D", 5: "e"}
            await self._writer.rebase(
                rows(state), changes(("INSERT", 5, "e")), "60", reason="forced"
            )
            await collect(self._folder)
        async for piece in super().stream(key, chunk_size):
            yield piece


AFTER = {1: "A", 3: "c", 4: "D", 5: "e"}


@pytest.mark.parametrize("at_fetch", [1, 2])
async def test_a_reader_that_races_collection_plans_anew(tmp_path: Path, at_fetch: int) -> None:
    writer = await write_history(tmp_path)
    store = CollectedMeanwhile(tmp_path, writer, at_fetch)
    archive = await Archive.load(PartFiles(at(store)), Decoding())
    assert await state_at(archive) == AFTER
    assert archive.head == "60"


@pytest.mark.parametrize("at_fetch", [1, 2])
async def test_a_follower_that_races_collection_ends_up_right(
    tmp_path: Path, at_fetch: int
) -> None:
    writer = await write_history(tmp_path)
    store = CollectedMeanwhile(tmp_path, writer, at_fetch)
    archive = await Archive.load(PartFiles(at(store)), Decoding())
    followed = Followed(archive)
    assert await followed.until("60") == AFTER
    await followed.stop()


async def test_changes_that_race_collection_say_that_they_are_pruned(tmp_path: Path) -> None:
    writer = await write_history(tmp_path)
    store = CollectedMeanwhile(tmp_path, writer, 1)
    archive = await Archive.load(PartFiles(at(store)), Decoding())
    followed = Followed(archive, "9", HISTORY["9"])
    assert await followed.until("60") == AFTER
    assert followed.consumer.reloads == ["pruned"]
    await followed.stop()


async def test_batches_begin_anew_only_before_the_first_is_given_out(tmp_path: Path) -> None:
    writer = await open_writer(folder_at(tmp_path))
    buckets = {number: rows({number: "x"}) for number in range(9)}
    await writer.write_base(buckets, "31", reason="first")
    store = CollectedMeanwhile(tmp_path, writer, 8)
    archive = await Archive.load(PartFiles(at(store)), Decoding())
    with pytest.raises(PartGoneError):
        [batch async for batch in archive.batches()]


async def test_verification_that_races_collection_calls_nothing_missing(tmp_path: Path) -> None:
    writer = await write_history(tmp_path)
    store = CollectedMeanwhile(tmp_path, writer, 3)
    archive = await Archive.load(PartFiles(at(store)), Decoding())
    assert (await archive.verify()).ok


async def test_a_follower_reports_that_a_live_file_is_lost(tmp_path: Path) -> None:
    await write_history(tmp_path)
    archive = await reopened(tmp_path)
    [lost] = archive.manifest.base.parts()
    (tmp_path / lost.path).unlink()
    followed = Followed(archive)
    with pytest.raises(ArtifactCorruptError, match="still names it"):
        await followed.until("31")
