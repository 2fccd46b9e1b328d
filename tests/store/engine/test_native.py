"""Calls of SlateDB from event loops: reads, commits, cancellation, several loops, and forks."""

from __future__ import annotations

import asyncio
import itertools
import random
import subprocess
import sys
import threading
from contextlib import aclosing
from pathlib import Path

import pytest
import uvloop

from streamfold.errors import StorageError, StoreRecoveringError
from streamfold.store.engine import native
from streamfold.store.engine.engine import Op, commit_rows
from streamfold.store.engine.location import open_location
from streamfold.store.engine.slatedb import SlateEngine

#: Bytes of values: empty, around the sizes of length fields, and larger than a block.
SIZES = (0, 1, 4, 5, 255, 256, 70_000, *range(300, 560))
PAGE_BYTES = 1 << 20


def waiting() -> int:
    """Calls of this event loop that have not ended."""
    return len(native._loops[asyncio.get_running_loop()]._futures)


@pytest.mark.parametrize("refused", [(b"", b"no key"), (b"k" * 65_536, b"too long")])
def test_keys_that_slatedb_cannot_store_are_refused(refused: Op) -> None:
    rows: list[Op] = [(b"key%d" % number, b"value") for number in range(20)]
    with pytest.raises(native.EngineError) as failure:
        native.prepare_rows([*rows, refused, *rows])
    assert native.code_of(failure.value) == "invalid"


async def test_reads_find_what_commits_wrote() -> None:
    numbers = random.Random(7)
    stored = {
        numbers.randbytes(numbers.randrange(1, 40)): numbers.randbytes(size) for size in SIZES
    }
    absent = [numbers.randbytes(12) for _ in range(70)]
    engine = await SlateEngine.open(open_location("memory:"))
    try:
        rows = list(stored.items())
        await commit_rows(engine, rows[:100])
        await engine.flush()
        await commit_rows(engine, rows[100:])
        await commit_rows(engine, [(b"gone", b"before"), (b"gone", None)])
        keys = [*stored, *absent, b"gone"]
        expected = [stored.get(key) for key in keys]
        assert await engine.get_many(keys) == expected
        assert [await engine.get(key) for key in keys] == expected
        for first, descending in ((1, False), (3, True), (50, False)):
            scan = engine.scan(b"\x00", b"\xff" * 50, first=first, descending=descending)
            found = [row async for page in scan for row in page]
            assert found == sorted(stored.items(), reverse=descending)
    finally:
        await engine.close()


async def test_pages_are_bounded_by_rows_and_bytes(tmp_path: Path) -> None:
    numbers = random.Random(11)
    sizes = [numbers.choice((0, 100, 70_000, 300_000)) for _ in range(150)]
    stored = [
        (number.to_bytes(4, "big"), numbers.randbytes(size)) for number, size in enumerate(sizes)
    ]
    engine = await SlateEngine.open(open_location((tmp_path / "store").as_uri()))
    try:
        await commit_rows(engine, stored[:90])
        await engine.flush()
        await commit_rows(engine, stored[90:])
        for eager in (False, True):
            pages = [page async for page in engine.scan(b"\x00", b"\xff", first=2, eager=eager)]
            assert [row for page in pages for row in page] == stored
            assert len(pages[0]) == 2
            for before, page in itertools.pairwise(pages):
                assert len(page) <= 2 * len(before) or len(before) > 2
                assert sum(len(value) for _, value in page[:-1]) < PAGE_BYTES
    finally:
        await engine.close()


async def test_a_scan_that_is_left_or_cancelled_leaves_nothing_behind(tmp_path: Path) -> None:
    engine = await SlateEngine.open(open_location((tmp_path / "store").as_uri()))
    stored: list[Op] = [(number.to_bytes(4, "big"), b"x" * 200_000) for number in range(60)]
    try:
        await commit_rows(engine, stored)
        await engine.flush()

        async def read(pages: int | None) -> int:
            found = 0
            async with aclosing(engine.scan(b"\x00", b"\xff", eager=True)) as scan:
                async for page in scan:
                    found += len(page)
                    pages = None if pages is None else pages - 1
                    if pages == 0:
                        break
            return found

        for pages in range(1, 6):
            await read(pages)
            cancelled = asyncio.create_task(read(None))
            for _ in range(pages):
                await asyncio.sleep(0.002)
            cancelled.cancel()
            await asyncio.gather(cancelled, return_exceptions=True)
        assert await read(None) == len(stored)
        assert waiting() == 0
    finally:
        await engine.close()


async def test_reads_that_are_cancelled_leave_nothing_behind_and_later_ones_answer(
    tmp_path: Path,
) -> None:
    engine = await SlateEngine.open(open_location((tmp_path / "store").as_uri()))
    try:
        stored = {number.to_bytes(4, "big"): b"x" * 5000 for number in range(300)}
        await commit_rows(engine, list(stored.items()))
        await engine.flush()
        for _ in range(20):
            reads = [asyncio.create_task(engine.get_many(list(stored))) for _ in range(3)]
            await asyncio.sleep(0)
            for read in reads:
                read.cancel()
            await asyncio.gather(*reads, return_exceptions=True)
        assert await engine.get_many(list(stored)) == list(stored.values())
        assert waiting() == 0
    finally:
        await engine.close()


async def test_a_read_of_a_closed_database_may_be_repeated() -> None:
    engine = await SlateEngine.open(open_location("memory:"))
    await engine.close()
    with pytest.raises(StoreRecoveringError):
        await engine.get(b"key")
    with pytest.raises(StoreRecoveringError):
        await engine.get_many([b"key", b"other"])


async def test_an_opening_that_is_cancelled_leaves_no_writer_behind(tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    for pause in range(10):
        opening = asyncio.create_task(SlateEngine.open(open_location(url)))
        for _ in range(pause):
            await asyncio.sleep(0.001)
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
    engine = await SlateEngine.open(open_location(url))
    await commit_rows(engine, [(b"key", b"value")])
    assert await engine.get(b"key") == b"value"
    await engine.close()


def test_stores_in_several_loops_of_one_process_work_at_the_same_time(tmp_path: Path) -> None:
    async def use(number: int) -> list[bytes | None]:
        engine = await SlateEngine.open(open_location((tmp_path / f"{number}").as_uri()))
        keys = [b"%d" % key for key in range(20)]
        await asyncio.gather(*(commit_rows(engine, [(key, key * number)]) for key in keys))
        values = await engine.get_many(keys)
        await engine.close()
        assert values == [key * number for key in keys]
        return values

    results: list[object] = []

    def run(number: int) -> None:
        loop = uvloop.new_event_loop() if number % 2 else asyncio.new_event_loop()
        try:
            results.append(loop.run_until_complete(use(number)))
        finally:
            loop.close()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == len(threads)


_FORK = """
import asyncio, os, sys
from streamfold.store.engine.location import open_location
from streamfold.store.engine.slatedb import SlateEngine

async def use():
    engine = await SlateEngine.open(open_location("memory:"))
    await engine.close()

if sys.argv[1] == "used":
    asyncio.run(use())
child = os.fork()
if child == 0:
    try:
        asyncio.run(use())
    except RuntimeError as error:
        print(error, flush=True)
        os._exit(3)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize(("before", "code"), [("fresh", "0"), ("used", "3")])
def test_a_fork_of_a_process_that_used_a_store_is_refused_clearly(before: str, code: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _FORK, before], capture_output=True, text=True, timeout=120
    )
    assert ended.stdout.splitlines()[-1] == code, ended.stderr
    assert ("fork" in ended.stdout) is (code == "3")


def test_nothing_is_started_by_the_import() -> None:
    code = "import streamfold.store, os; print(len(os.listdir('/proc/self/task')))"
    if not Path("/proc/self/task").exists():
        pytest.skip("this system does not list threads")
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert ended.stdout.strip() == "1", ended.stderr


async def test_a_panic_is_an_error_of_the_call(tmp_path: Path) -> None:
    """SlateDB panics at a log file whose end is no offset in it (upstream defect 19)."""
    location = open_location((tmp_path / "store").as_uri())
    engine = await SlateEngine.open(location)
    await commit_rows(engine, [(b"key", b"value" * 100)])
    await engine.close(flush=False)
    assert location.folder is not None
    file = max(path for path in (location.folder / "wal").iterdir() if path.stat().st_size)
    whole = file.read_bytes()
    file.write_bytes(whole[:80] + b"\x01" * 8 + whole[-2:])
    with pytest.raises(StorageError):
        await SlateEngine.open(location)
