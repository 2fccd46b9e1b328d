from __future__ import annotations

import asyncio
import errno
import gc
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from streamfold.blob import LocalBlobStore
from streamfold.blob.local_files import DRAFTS, LOCK
from streamfold.blob.local_store import WRITE_BUFFER
from streamfold.errors import (
    BlobExistsError,
    BlobOutcomeUnknownError,
    BlobUnavailableError,
    InvalidError,
)
from streamfold.testing.blob_kit import CALLS, keys_of, pieces_of


class RecordingDisk:
    """Stands in for `os.fsync`: notes what was synced and whether the target had its name yet."""

    def __init__(self, root: Path, target: str = "") -> None:
        self.root = root
        self.target = root / target
        self.synced: list[tuple[str, bool]] = []
        self.broken: set[str] = set()

    def fsync(self, descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        name = "draft" if ".streamfold-drafts" in path.parts else str(path)
        name = name.replace(str(self.root), "root", 1)
        if name in self.broken:
            raise OSError(errno.EIO, "Input/output error")
        os.fsync(descriptor)
        self.synced.append((name, self.target.is_file()))


def files_below(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize("call", ["put", "put_if_absent", "streamed put"])
async def test_bytes_folders_and_name_are_synced_in_that_order(tmp_path: Path, call: str) -> None:
    disk = RecordingDisk(tmp_path, "a/b/blob")
    store = LocalBlobStore(tmp_path, fsync=disk.fsync)
    disk.synced.clear()
    if call == "streamed put":
        await store.put("a/b/blob", pieces_of([b"x", b"y"]))
    else:
        await CALLS[call](store, "a/b/blob")
    assert disk.synced == [
        ("draft", False),
        ("root", False),  # holds a
        ("root/a", False),  # holds b
        ("root/a/b", True),  # holds the blob, which has its name by now
    ]


async def test_a_swap_syncs_its_bytes_then_its_name(tmp_path: Path) -> None:
    disk = RecordingDisk(tmp_path)
    store = LocalBlobStore(tmp_path, fsync=disk.fsync)
    etag = await store.put_if_absent("a/blob", b"old")
    disk.synced.clear()
    await store.put_if_match("a/blob", b"new", etag)
    assert [name for name, _ in disk.synced] == ["draft", "root/a"]


async def test_a_swap_on_a_disk_that_fails_is_refused_or_unknown(tmp_path: Path) -> None:
    disk = RecordingDisk(tmp_path)
    store = LocalBlobStore(tmp_path, fsync=disk.fsync)
    etag = await store.put_if_absent("blob", b"old")
    disk.broken = {"draft"}
    with pytest.raises(BlobUnavailableError, match="not written"):
        await store.put_if_match("blob", b"new", etag)
    assert await store.get("blob") == b"old"
    disk.broken = {"root"}
    with pytest.raises(BlobOutcomeUnknownError, match="power cut"):
        await store.put_if_match("blob", b"new", etag)


async def test_what_is_read_to_be_swapped_is_on_disk_first(tmp_path: Path) -> None:
    disk = RecordingDisk(tmp_path)
    store = LocalBlobStore(tmp_path, fsync=disk.fsync)
    (tmp_path / "blob").write_bytes(b"another process, not synced yet")
    disk.synced.clear()
    await store.get_with_etag("blob")
    assert [name for name, _ in disk.synced] == ["root"]
    disk.broken = {"root"}
    with pytest.raises(BlobUnavailableError, match="Input/output error"):
        await store.get_with_etag("blob")


async def test_equal_bytes_in_quick_succession_have_different_etags(tmp_path: Path) -> None:
    store = LocalBlobStore(tmp_path, fsync=lambda descriptor: None)
    etags = [await store.put_if_absent("blob", b"same")]
    for _ in range(200):
        etags.append(await store.put_if_match("blob", b"same", etags[-1]))
    assert len(set(etags)) == len(etags)


async def test_known_folders_are_not_synced_again(tmp_path: Path) -> None:
    disk = RecordingDisk(tmp_path)
    store = LocalBlobStore(tmp_path, fsync=disk.fsync)
    await store.put("a/one", b"x")
    disk.synced.clear()
    await store.put("a/two", b"x")
    assert [name for name, _ in disk.synced] == ["draft", "root/a"]


async def test_a_folder_made_by_another_process_is_synced_before_it_is_relied_on(
    tmp_path: Path,
) -> None:
    disk = RecordingDisk(tmp_path)
    store = LocalBlobStore(tmp_path, fsync=disk.fsync)
    (tmp_path / "a").mkdir()
    disk.synced.clear()
    await store.put("a/blob", b"x")
    assert [name for name, _ in disk.synced] == ["draft", "root", "root/a"]


def test_a_new_root_and_its_parents_are_synced(tmp_path: Path) -> None:
    disk = RecordingDisk(tmp_path)
    LocalBlobStore(tmp_path / "one" / "two", fsync=disk.fsync)
    assert [name for name, _ in disk.synced] == ["root", "root/one", "root/one"]


async def test_a_deletion_is_synced(tmp_path: Path) -> None:
    disk = RecordingDisk(tmp_path, "a/blob")
    store = LocalBlobStore(tmp_path, fsync=disk.fsync)
    await store.put("a/blob", b"x")
    disk.synced.clear()
    await store.delete("a/blob")
    assert disk.synced == [("root/a", False)]


async def test_a_taken_name_is_synced_before_it_is_reported(tmp_path: Path) -> None:
    disk = RecordingDisk(tmp_path)
    store = LocalBlobStore(tmp_path, fsync=disk.fsync)
    (tmp_path / "blob").write_bytes(b"another process, not synced yet")
    disk.synced.clear()
    with pytest.raises(BlobExistsError):
        await store.put_if_absent("blob", b"x")
    assert [name for name, _ in disk.synced] == ["draft", "root"]


@pytest.mark.parametrize("call", ["put", "put_if_absent"])
async def test_a_disk_that_fails_before_the_name_is_given_wrote_nothing(
    tmp_path: Path, call: str
) -> None:
    disk = RecordingDisk(tmp_path)
    store = LocalBlobStore(tmp_path, fsync=disk.fsync)
    disk.broken = {"draft"}
    with pytest.raises(BlobUnavailableError, match=r"not written.*Input/output error"):
        await CALLS[call](store, "blob")
    assert files_below(tmp_path) == []


@pytest.mark.parametrize("call", ["put", "put_if_absent", "delete"])
async def test_a_disk_that_fails_after_the_change_leaves_its_outcome_unknown(
    tmp_path: Path, call: str
) -> None:
    disk = RecordingDisk(tmp_path)
    store = LocalBlobStore(tmp_path, fsync=disk.fsync)
    if call == "delete":
        await store.put("blob", b"x")
    disk.broken = {"root"}
    with pytest.raises(BlobOutcomeUnknownError, match="power cut"):
        await CALLS[call](store, "blob")
    assert files_below(tmp_path) == ([] if call == "delete" else ["blob"])


async def test_no_drafts_stay_and_none_are_listed(tmp_path: Path) -> None:
    store = LocalBlobStore(tmp_path)
    await store.put("blob", b"x")
    with pytest.raises(BlobExistsError):
        await store.put_if_absent("blob", b"y")
    assert files_below(tmp_path) == ["blob"]
    (tmp_path / ".streamfold-drafts" / "left-by-a-crash").write_bytes(b"half")
    assert await keys_of(store) == ["blob"]
    for call in CALLS:
        with pytest.raises(InvalidError, match="which the store uses"):
            await CALLS[call](store, ".streamfold-drafts/left-by-a-crash")


async def test_no_file_is_open_while_the_first_bytes_of_a_blob_are_waited_for(
    tmp_path: Path,
) -> None:
    seen = []

    async def pieces() -> AsyncIterator[bytes]:
        for size in (WRITE_BUFFER - 1, 1, 1):
            seen.append(len(files_below(tmp_path)))
            yield bytes(size)

    await LocalBlobStore(tmp_path).put("blob", pieces())
    assert seen == [0, 0, 1]
    assert files_below(tmp_path) == ["blob"]
    assert (tmp_path / "blob").stat().st_size == WRITE_BUFFER + 1


async def test_a_cancelled_put_finishes_its_thread_and_leaves_no_draft(tmp_path: Path) -> None:
    store = LocalBlobStore(tmp_path)
    for pause in (0.0, 0.001, 0.005):
        put = asyncio.ensure_future(store.put("blob", b"x" * 5_000_000))
        await asyncio.sleep(pause)
        if put.cancel() or not pause:  # otherwise it was quicker than the pause
            with pytest.raises(asyncio.CancelledError):
                await put
    assert files_below(tmp_path) in ([], ["blob"])


async def test_no_draft_is_lost_while_others_open_the_store(tmp_path: Path) -> None:
    """Each opening removes drafts of processes that were killed, and only these."""
    store = LocalBlobStore(tmp_path, fsync=lambda _: None)
    written = asyncio.Event()

    async def open_again() -> None:
        while not written.is_set():
            await asyncio.to_thread(LocalBlobStore, tmp_path, fsync=lambda _: None)

    async def write(name: str) -> None:
        for _ in range(700):
            await store.put(name, b"x")

    openers = [asyncio.create_task(open_again()) for _ in range(3)]
    try:
        await asyncio.gather(*(write(name) for name in "abc"))
    finally:
        written.set()
        await asyncio.gather(*openers)


async def test_a_key_cannot_be_a_blob_and_a_folder(tmp_path: Path) -> None:
    store = LocalBlobStore(tmp_path)
    await store.put("a/b", b"x")
    for key in ("a", "a/b/c"):
        for call in ("put", "put_if_absent"):
            with pytest.raises(InvalidError, match="cannot hold both"):
                await CALLS[call](store, key)
    assert files_below(tmp_path) == ["a/b"]


async def test_files_that_no_key_can_name_are_not_listed(tmp_path: Path) -> None:
    store = LocalBlobStore(tmp_path)
    (tmp_path / "line\nbreak").write_bytes(b"x")
    (tmp_path / "link").symlink_to("/etc")
    await store.put("blob", b"x")
    assert await keys_of(store) == ["blob"]


ROUNDS = 300

# Both wait for each other before each round, and sync nothing, so that they meet at the same name.
RACER = """
import asyncio, mmap, os, sys
from pathlib import Path
from streamfold.blob import LocalBlobStore
from streamfold.errors import BlobExistsError

async def main(root, counters, name, rounds):
    store = LocalBlobStore(Path(root), fsync=lambda descriptor: None)
    with open(counters, "r+b") as file:
        shared = mmap.mmap(file.fileno(), 8)
    mine = 0 if name == "one" else 4
    for number in range(int(rounds)):
        shared[mine : mine + 4] = (number + 1).to_bytes(4, "big")
        while int.from_bytes(shared[4 - mine : 8 - mine], "big") <= number:
            os.sched_yield()
        try:
            await store.put_if_absent(f"folder-{number % 7}/{number}", name.encode())
            print(number)
        except BlobExistsError:
            pass

asyncio.run(main(*sys.argv[1:]))
"""


def test_two_processes_never_both_win_a_conditional_put(tmp_path: Path) -> None:
    root, counters, names = tmp_path / "root", tmp_path / "counters", ("one", "two")
    counters.write_bytes(bytes(8))
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(root), str(counters), name, str(ROUNDS)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in names
    ]
    results = [racer.communicate(timeout=240) for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0]
    won = [[int(number) for number in output.split()] for output, _ in results]
    assert sorted(won[0] + won[1]) == list(range(ROUNDS))
    for name, numbers in zip(names, won, strict=True):
        for number in numbers:
            assert (root / f"folder-{number % 7}" / str(number)).read_text() == name
    assert files_below(root / ".streamfold-drafts") == []


STEPS = 200

COUNTER = """
import asyncio, sys
from contextlib import suppress
from pathlib import Path
from streamfold.blob import BlobChangedError, LocalBlobStore

async def main(root, steps):
    store = LocalBlobStore(Path(root), fsync=lambda descriptor: None)
    left = int(steps)
    while left:
        data, etag = await store.get_with_etag("blob")
        with suppress(BlobChangedError):
            await store.put_if_match("blob", b"%d" % (int(data) + 1), etag)
            left -= 1

asyncio.run(main(*sys.argv[1:]))
"""


def test_two_processes_that_swap_lose_no_step(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"0")
    counters = [
        subprocess.Popen([sys.executable, "-c", COUNTER, str(tmp_path), str(STEPS)])
        for _ in range(2)
    ]
    assert [counter.wait(timeout=240) for counter in counters] == [0, 0]
    assert (tmp_path / "blob").read_bytes() == b"%d" % (2 * STEPS)


def test_the_drafts_of_a_process_that_was_killed_are_removed_by_the_next_and_others_stay(
    tmp_path: Path,
) -> None:
    code = (
        "import sys; from pathlib import Path; "
        "from streamfold.blob.local_files import DurableTree\n"
        "draft = DurableTree(Path(sys.argv[1])).open_draft(); draft.write(b'half')\n"
        "print('written', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"written\n"
        LocalBlobStore(tmp_path)
        drafts = tmp_path / ".streamfold-drafts"
        assert [(drafts / name).read_bytes() for name in files_below(drafts)] == [b"half"]
        writer.kill()
        writer.wait()
    LocalBlobStore(tmp_path)
    assert files_below(drafts) == []


def opened_below(folder: Path) -> list[str]:
    """What this process has open below the folder; threads of other tests open and close sockets."""
    paths: list[str] = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            paths.append(str(descriptor.readlink()))
    return sorted(path for path in paths if path.startswith(str(folder)))


@pytest.mark.parametrize("change", ["put", "stream"])
async def test_a_caller_that_goes_while_a_file_is_opened_leaves_it_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    store, opened, gone = LocalBlobStore(tmp_path), threading.Event(), threading.Event()
    await store.put("blob", b"content")
    opens = os.open

    def open_slowly(*args: Any) -> int:
        descriptor = opens(*args)
        if not opened.is_set() and (DRAFTS in str(args[0]) or str(args[0]).endswith("blob")):
            opened.set()
            gone.wait(60)
        return descriptor

    async def large() -> AsyncIterator[bytes]:
        yield bytes(WRITE_BUFFER)

    async def use() -> None:
        if change == "put":
            await store.put("large", large())
        else:
            async for _ in store.stream("blob"):
                pass

    before = opened_below(tmp_path)
    monkeypatch.setattr(os, "open", open_slowly)
    task = asyncio.create_task(use())
    await asyncio.to_thread(opened.wait, 60)
    task.cancel()
    await asyncio.sleep(0)
    gone.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    gc.collect()
    assert opened_below(tmp_path) == before
    assert not [path for path in (tmp_path / DRAFTS).iterdir() if path.name != LOCK]
