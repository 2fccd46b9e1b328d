"""SlateDB's Python binding, as far as its own copies of bytes are avoided."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slatedb.uniffi._slatedb_uniffi.slatedb import Error

from streamfold.errors import StoreRecoveringError
from streamfold.store.engine import slatedb_binding, slatedb_reads, slatedb_rows, write_kernel
from streamfold.store.engine.engine import Op, Row, commit_rows
from streamfold.store.engine.location import open_location
from streamfold.store.engine.slatedb import SlateEngine

#: Bytes of values: empty, around the sizes of length fields, and larger than a block.
SIZES = (0, 1, 4, 5, 255, 256, 70_000, *range(300, 560))


# Upstream defect 5.
def test_this_version_of_the_binding_can_be_called_without_its_copies() -> None:
    assert slatedb_binding._missing() == []


#: Rows with keys and values of all sizes up to those that ctypes writes, and deletions among them.
ROWS = st.lists(
    st.tuples(
        st.binary(min_size=1, max_size=40),
        st.none() | st.binary(max_size=40) | st.integers(0, 20_000).map(lambda size: b"v" * size),
    ),
    max_size=40,
)


@settings(max_examples=50, deadline=None)
@given(ROWS)
def test_compiled_code_writes_the_rows_that_ctypes_writes(ops: list[Op]) -> None:
    assert slatedb_binding.warm_up_writes() == write_kernel.is_supported()
    compiled = slatedb_binding._fill_compiled

    async def written(fill: Callable[[Any, list[Op]], None] | None) -> list[Row]:
        slatedb_binding._fill_compiled = fill
        engine = await SlateEngine.open(open_location("memory:"))
        try:
            await commit_rows(engine, [(b"\x00%d" % number, b"before") for number in range(9)])
            await commit_rows(engine, ops)
            return [row async for page in engine.scan(b"\x00", b"\xff" * 50) for row in page]
        finally:
            await engine.close()

    try:
        assert asyncio.run(written(compiled)) == asyncio.run(written(None))
    finally:
        slatedb_binding._fill_compiled = compiled


def test_compiled_code_raises_what_slatedb_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert slatedb_binding.warm_up_writes() == write_kernel.is_supported()
    rows = [(b"key%d" % number, b"value") for number in range(20)]
    refused: list[Op] = [*rows, (b"", b"no key"), *rows]
    with pytest.raises(Error.Invalid) as by_compiled_code:
        slatedb_binding.write_batch(refused)
    monkeypatch.setattr(slatedb_binding, "_fill_compiled", None)
    with pytest.raises(Error.Invalid) as by_ctypes:
        slatedb_binding.write_batch(refused)
    assert str(by_compiled_code.value) == str(by_ctypes.value)


async def test_reads_without_the_bindings_copies_find_what_the_binding_finds() -> None:
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
        keys = [*stored, *absent]
        db, options = engine._db, slatedb_rows.READ
        expected = [await db.get_with_options(key, options) for key in keys]
        assert expected == [stored.get(key) for key in keys]
        assert await engine.get_many(keys) == expected
        assert [await engine.get(key) for key in keys] == expected
        for first, descending in ((1, False), (3, True), (50, False)):
            scan = engine.scan(b"\x00", b"\xff" * 50, first=first, descending=descending)
            found = [row async for page in scan for row in page]
            assert found == sorted(stored.items(), reverse=descending)
    finally:
        await engine.close()


async def test_an_eager_scan_which_reads_pages_in_threads_finds_the_same_rows(
    tmp_path: Path,
) -> None:
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
            pages = engine.scan(b"\x00", b"\xff", eager=eager)
            assert [row async for page in pages for row in page] == stored
    finally:
        await engine.close()


async def test_an_eager_scan_that_is_left_or_cancelled_ends_its_read_in_the_thread(
    tmp_path: Path,
) -> None:
    engine = await SlateEngine.open(open_location((tmp_path / "store").as_uri()))
    stored = [(number.to_bytes(4, "big"), b"x" * 200_000) for number in range(60)]
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
    finally:
        await engine.close()
    barrier = threading.Barrier(3)  # passed when no thread reads any more
    ended = [slatedb_reads._page_reads.submit(barrier.wait, 20) for _ in range(3)]
    await asyncio.to_thread(wait, ended)
    assert not barrier.broken
    assert not slatedb_reads._waiting


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
        assert not slatedb_reads._waiting
    finally:
        await engine.close()


async def test_a_read_of_a_closed_database_may_be_repeated() -> None:
    engine = await SlateEngine.open(open_location("memory:"))
    await engine.close()
    with pytest.raises(StoreRecoveringError):
        await engine.get(b"key")
    with pytest.raises(StoreRecoveringError):
        await engine.get_many([b"key", b"other"])
