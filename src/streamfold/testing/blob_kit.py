"""Conformance tests for blob stores, and a table of all blob store calls by name.

    class TestMyStore(BlobStoreConformance):
        @pytest.fixture
        def store(self) -> BlobStore:
            return MyStore(...)          # a new, empty store for each test

Needs pytest and pytest-asyncio: `pip install streamfold[testing]`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

from streamfold.blob import BlobChangedError, BlobStore
from streamfold.errors import BlobExistsError, BlobNotFoundError, InvalidError
from streamfold.extras import needing_extra

BAD_KEYS = ["", "/", "/a", "a/", "a//b", ".", "..", "../a", "a/../b", "a/./b", "a\0b", "a\nb"]
BAD_KEYS += ["a\x7f", "\ud800", "x" * 256, "/".join(["x" * 200] * 5)]
BAD_PREFIXES = ["/", "/a", "a//", "../", "a/../b", "a\0"]

#: Bytes. Larger than one multipart upload part of any service.
SEVERAL_PARTS = 20 * 1024 * 1024 + 7

#: An ETag that matches no blob.
STALE = '"stale"'

Call = Callable[[BlobStore, str], Coroutine[Any, Any, object]]

CALLS: dict[str, Call] = {
    "put": lambda store, key: store.put(key, b"x"),
    "put_if_absent": lambda store, key: store.put_if_absent(key, b"x"),
    "put_if_match": lambda store, key: store.put_if_match(key, b"x", STALE),
    "get": lambda store, key: store.get(key),
    "get_with_etag": lambda store, key: store.get_with_etag(key),
    "get_range": lambda store, key: store.get_range(key, 0, 1),
    "stream": lambda store, key: collect(store.stream(key)),
    "head": lambda store, key: store.head(key),
    "delete": lambda store, key: store.delete(key),
}
READS = ["get", "get_with_etag", "get_range", "stream", "head"]


async def pieces_of(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Yield `pieces` as the body of a streamed upload."""
    for piece in pieces:
        yield piece


async def swap(store: BlobStore, key: str, data: bytes = b"x") -> str:
    """Replace the blob at `key`, conditional on its current ETag. Return the new ETag."""
    _, etag = await store.get_with_etag(key)
    return await store.put_if_match(key, data, etag)


async def collect(stream: AsyncIterator[bytes]) -> bytes:
    """Return everything `stream` yields, joined."""
    return b"".join([piece async for piece in stream])


async def keys_of(store: BlobStore, prefix: str = "") -> list[str]:
    """Return the keys `store` lists, in listing order."""
    return [meta.key async for meta in store.list(prefix)]


with needing_extra("testing"):
    import pytest


class BlobStoreConformance:
    """Conformance suite. Subclass it in a test module and override the `store` fixture."""

    pytestmark = pytest.mark.asyncio

    @pytest.fixture
    def store(self) -> BlobStore:
        raise NotImplementedError("override the `store` fixture: return an empty blob store")

    @pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 5000], ids=["0", "1", "1M"])
    async def test_a_put_blob_reads_back_whole(self, store: BlobStore, data: bytes) -> None:
        await store.put("folder/blob", data)
        assert await store.get("folder/blob") == data
        assert await collect(store.stream("folder/blob", 100_000)) == data

    async def test_put_replaces_the_blob(self, store: BlobStore) -> None:
        await store.put("blob", b"old and longer")
        await store.put("blob", b"new")
        assert await store.get("blob") == b"new"

    @pytest.mark.parametrize("pieces", [[], [b""], [b"a", b"", b"bc"], [b"z" * 100_000] * 7])
    async def test_put_takes_pieces_of_any_size(
        self, store: BlobStore, pieces: list[bytes]
    ) -> None:
        await store.put("blob", pieces_of(pieces))
        assert await store.get("blob") == b"".join(pieces)

    @pytest.mark.parametrize("streamed", [True, False])
    async def test_put_takes_blobs_of_several_parts(self, store: BlobStore, streamed: bool) -> None:
        data = bytes(range(251)) * (SEVERAL_PARTS // 251)
        step = 1_000_003  # divides neither the blob nor a part
        pieces = [data[at : at + step] for at in range(0, len(data), step)]
        await store.put("blob", pieces_of(pieces) if streamed else data)
        assert await collect(store.stream("blob")) == data

    @pytest.mark.parametrize("size", [10, SEVERAL_PARTS])
    async def test_a_failing_iterator_raises_its_error_and_writes_nothing(
        self, store: BlobStore, size: int
    ) -> None:
        async def failing() -> AsyncIterator[bytes]:
            for _ in range(10):
                yield b"x" * (size // 10)
            raise FileNotFoundError("the caller's own")

        await store.put("old", b"old")
        for key in ("old", "new"):
            with pytest.raises(FileNotFoundError, match="the caller's own"):
                await store.put(key, failing())
        assert [(key, await store.get(key)) for key in await keys_of(store)] == [("old", b"old")]

    @pytest.mark.parametrize("size", [10, SEVERAL_PARTS])
    async def test_a_cancelled_upload_writes_nothing(self, store: BlobStore, size: int) -> None:
        stuck = asyncio.Event()

        async def endless() -> AsyncIterator[bytes]:
            yield b"x" * size
            stuck.set()
            await asyncio.Event().wait()

        upload = asyncio.ensure_future(store.put("blob", endless()))
        await stuck.wait()
        upload.cancel()
        with pytest.raises(asyncio.CancelledError):
            await upload
        assert await keys_of(store) == []

    async def test_readers_see_the_old_blob_or_the_new_one(self, store: BlobStore) -> None:
        versions = [bytes([number]) * 200_000 for number in range(8)]
        await store.put("blob", versions[0])

        async def write() -> None:
            for version in versions:
                await store.put("blob", version)

        writer = asyncio.ensure_future(write())
        while not writer.done():
            assert await store.get("blob") in versions
        await writer

    async def test_put_if_absent_writes_a_new_blob(self, store: BlobStore) -> None:
        await store.put_if_absent("folder/blob", b"data")
        assert await store.get("folder/blob") == b"data"

    @pytest.mark.parametrize("again", [b"first", b"other"], ids=["same bytes", "other bytes"])
    async def test_put_if_absent_never_replaces(self, store: BlobStore, again: bytes) -> None:
        await store.put_if_absent("blob", b"first")
        with pytest.raises(BlobExistsError, match="blob"):
            await store.put_if_absent("blob", again)
        assert await store.get("blob") == b"first"

    async def test_put_if_absent_lets_one_of_many_win(self, store: BlobStore) -> None:
        async def claim(number: int) -> int | None:
            with suppress(BlobExistsError):
                await store.put_if_absent("blob", b"%d" % number)
                return number
            return None

        results = await asyncio.gather(*(claim(number) for number in range(12)))
        winners = [number for number in results if number is not None]
        assert len(winners) == 1
        assert await store.get("blob") == b"%d" % winners[0]

    async def test_put_if_absent_works_again_after_delete(self, store: BlobStore) -> None:
        await store.put_if_absent("blob", b"first")
        await store.delete("blob")
        await store.put_if_absent("blob", b"second")
        assert await store.get("blob") == b"second"

    async def test_each_etag_is_good_for_one_swap(self, store: BlobStore) -> None:
        first = await store.put_if_absent("folder/blob", b"first")
        second = await store.put_if_match("folder/blob", b"second", first)
        with pytest.raises(BlobChangedError, match="folder/blob"):
            await store.put_if_match("folder/blob", b"stale", first)
        third = await store.put_if_match("folder/blob", b"third", second)
        assert await store.get_with_etag("folder/blob") == (b"third", third)
        assert len({first, second, third}) == 3

    async def test_the_etag_read_is_the_etag_to_swap_with(self, store: BlobStore) -> None:
        await store.put("blob", b"put")
        data, etag = await store.get_with_etag("blob")
        assert data == b"put"
        await store.put_if_match("blob", b"swapped", etag)
        assert await store.get("blob") == b"swapped"

    async def test_a_swap_of_a_blob_that_was_replaced_fails(self, store: BlobStore) -> None:
        etag = await store.put_if_absent("blob", b"first")
        await store.put("blob", b"other")
        with pytest.raises(BlobChangedError):
            await store.put_if_match("blob", b"mine", etag)
        assert await store.get("blob") == b"other"

    async def test_a_swap_creates_nothing(self, store: BlobStore) -> None:
        with pytest.raises(BlobNotFoundError, match="absent"):
            await store.put_if_match("absent", b"x", STALE)
        etag = await store.put_if_absent("blob", b"first")
        await store.delete("blob")
        with pytest.raises(BlobNotFoundError, match="blob"):
            await store.put_if_match("blob", b"second", etag)
        assert await keys_of(store) == []

    async def test_of_racing_swaps_one_wins_per_etag(self, store: BlobStore) -> None:
        async def swap_from(etag: str, number: int) -> tuple[int, str] | None:
            with suppress(BlobChangedError):
                return number, await store.put_if_match("blob", b"%d" % number, etag)
            return None

        etag = await store.put_if_absent("blob", b"start")
        for turn in range(4):
            numbers = range(100 + 8 * turn, 108 + 8 * turn)
            results = await asyncio.gather(*(swap_from(etag, number) for number in numbers))
            [(winner, etag)] = [result for result in results if result]
            assert await store.get_with_etag("blob") == (b"%d" % winner, etag)

    async def test_racing_counters_lose_no_step(self, store: BlobStore) -> None:
        await store.put_if_absent("blob", b"0")

        async def count_to(steps: int) -> None:
            while steps:
                data, etag = await store.get_with_etag("blob")
                with suppress(BlobChangedError):
                    await store.put_if_match("blob", b"%d" % (int(data) + 1), etag)
                    steps -= 1

        await asyncio.gather(*(count_to(6) for _ in range(4)))
        assert await store.get("blob") == b"24"

    @pytest.mark.parametrize(
        ("start", "length"), [(0, 3), (2, 5), (0, 10), (7, 100), (9, 1), (3, 0), (10, 1), (99, 9)]
    )
    async def test_get_range_is_a_slice(self, store: BlobStore, start: int, length: int) -> None:
        data = b"0123456789"
        await store.put("blob", data)
        assert await store.get_range("blob", start, length) == data[start : start + length]

    async def test_an_empty_blob_has_an_empty_range(self, store: BlobStore) -> None:
        await store.put("blob", b"")
        assert await store.get_range("blob", 0, 5) == b""

    async def test_a_negative_range_is_refused(self, store: BlobStore) -> None:
        for start, length in ((-1, 1), (0, -1)):
            with pytest.raises(InvalidError, match="negative"):
                await store.get_range("blob", start, length)

    async def test_stream_yields_pieces_of_the_size_asked_for(self, store: BlobStore) -> None:
        await store.put("blob", b"0123456789")
        assert [piece async for piece in store.stream("blob", 4)] == [b"0123", b"4567", b"89"]
        with pytest.raises(InvalidError, match="chunk_size"):
            await collect(store.stream("blob", 0))

    async def test_head_returns_size_time_and_version(self, store: BlobStore) -> None:
        await store.put("blob", b"data")
        first = await store.head("blob")
        assert (first.key, first.size) == ("blob", 4)
        assert abs(datetime.now(UTC) - first.last_modified) < timedelta(minutes=10)
        await store.put("blob", b"Data")
        second = await store.head("blob")
        assert first.etag is None or first.etag != second.etag

    @pytest.mark.parametrize("call", READS)
    async def test_reading_an_absent_blob_is_not_found(self, store: BlobStore, call: str) -> None:
        await store.put("folder/blob", b"x")
        for key in ("absent", "folder", "folder/absent", "folder/blob/below"):
            with pytest.raises(BlobNotFoundError, match=key):
                await CALLS[call](store, key)

    async def test_delete_removes_and_ignores_absence(self, store: BlobStore) -> None:
        await store.put("folder/blob", b"x")
        await store.put("folder/other", b"y")
        for key in ("folder/blob", "folder/blob", "never/there", "folder"):
            await store.delete(key)
        assert await keys_of(store) == ["folder/other"]

    async def test_list_is_in_byte_order_of_keys(self, store: BlobStore) -> None:
        keys = [
            "a-b",
            "a/b",
            "a0",
            "a/b0/c",
            "a/b-",
            "B",
            "a b",
            "é/x",
            "\uffff",
            "\U00010000",
            "z",
        ]
        for key in keys:
            await store.put(key, key.encode())
        assert await keys_of(store) == sorted(keys, key=str.encode)

    async def test_list_returns_what_head_returns(self, store: BlobStore) -> None:
        await store.put("folder/blob", b"data")
        assert [meta async for meta in store.list()] == [await store.head("folder/blob")]

    @pytest.mark.parametrize(
        ("prefix", "keys"),
        [
            ("", ["a", "ab", "b/.x", "b/x", "b/xy", "b/z/1", "bc"]),
            ("a", ["a", "ab"]),
            ("b", ["b/.x", "b/x", "b/xy", "b/z/1", "bc"]),
            ("b/", ["b/.x", "b/x", "b/xy", "b/z/1"]),
            ("b/.", ["b/.x"]),
            ("b/x", ["b/x", "b/xy"]),
            ("b/z/", ["b/z/1"]),
            ("b/z/1/", []),
            ("none/", []),
        ],
    )
    async def test_list_takes_any_prefix(
        self, store: BlobStore, prefix: str, keys: list[str]
    ) -> None:
        for key in ("bc", "b/xy", "b/z/1", "b/x", "b/.x", "ab", "a"):
            await store.put(key, b"x")
        assert await keys_of(store, prefix) == keys

    @pytest.mark.parametrize(
        "key", ["a b", "a%20b", "a+b", "a#1", "a?b=c&d", "[x]{y}", "ü/名", "~*"]
    )
    async def test_unusual_keys_are_kept_as_they_are(self, store: BlobStore, key: str) -> None:
        await store.put(key, b"x")
        assert await keys_of(store) == [key]
        assert (await store.head(key)).key == key
        assert await store.get(key) == b"x"

    @pytest.mark.parametrize("call", CALLS)
    async def test_keys_that_break_a_rule_are_refused(self, store: BlobStore, call: str) -> None:
        for key in BAD_KEYS:
            with pytest.raises(InvalidError, match="blob key"):
                await CALLS[call](store, key)
        assert await keys_of(store) == []

    async def test_prefixes_that_no_key_has_are_refused(self, store: BlobStore) -> None:
        for prefix in BAD_PREFIXES:
            with pytest.raises(InvalidError, match="blob prefix"):
                await keys_of(store, prefix)
