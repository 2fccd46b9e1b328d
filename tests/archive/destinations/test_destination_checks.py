"""Storage that ignores write conditions is rejected before anything is written to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from streamfold.archive.destinations.destination import Destination, check_compare_and_swap
from streamfold.blob import BlobChangedError, BlobStore, open_blob_store
from streamfold.errors import BlobOutcomeUnknownError, BlobUnavailableError, StorageError
from streamfold.testing.blob_faults import FaultyBlobStore, Operation
from streamfold.testing.blob_kit import keys_of
from streamfold.testing.faults import Fault, FaultKind, ScriptedFaults
from tests.archive.tables import at, open_writer


class LyingStore(FaultyBlobStore):
    """A store as some emulators and proxies are; each `lie` breaks one promise."""

    def __init__(self, inner: BlobStore, lie: str) -> None:
        super().__init__(inner, ScriptedFaults())
        self._lie = lie
        self._lied = False

    async def put_if_absent(self, key: str, data: bytes) -> str:
        if self._lie != "ignores absence":
            return await super().put_if_absent(key, data)
        await self.put(key, data)
        return (await self.get_with_etag(key))[1]

    async def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        if self._lie == "ignores etags":
            return await self._overwrite(key, data)
        if self._lie == "two winners":
            try:
                return await super().put_if_match(key, data, etag)
            except BlobChangedError:
                if self._lied:
                    raise
                self._lied = True
                return await self._overwrite(key, data)
        if self._lie == "refuses all":
            raise BlobChangedError("no")
        if self._lie == "keeps nothing":
            (_, current), _ = await self.get_with_etag(key), etag
            if current == etag:
                await super().put_if_match(key, b"something else", etag)
                return "etag"
        return await super().put_if_match(key, data, etag)

    async def _overwrite(self, key: str, data: bytes) -> str:
        await self.put(key, data)
        return (await self.get_with_etag(key))[1]


@pytest.mark.parametrize(
    ("lie", "reported"),
    [
        ("ignores absence", "had to be absent"),
        ("ignores etags", "of 4 racing swaps win"),
        ("two winners", "2 of 4 racing swaps win"),
        ("refuses all", "0 of 4 racing swaps win"),
        ("keeps nothing", "does not hold the bytes"),
    ],
)
async def test_storage_that_ignores_conditions_is_refused(lie: str, reported: str) -> None:
    blobs = LyingStore(open_blob_store("memory:"), lie)
    with pytest.raises(StorageError, match=reported):
        await open_writer(at(blobs))
    assert await keys_of(blobs) == []


async def test_the_probe_is_removed_when_the_check_itself_fails() -> None:
    inner = open_blob_store("memory:")
    script = {Operation.GET: [Fault(FaultKind.BEFORE)]}
    with pytest.raises(BlobUnavailableError):
        await check_compare_and_swap(at(FaultyBlobStore(inner, ScriptedFaults(script))), "probe")
    assert await keys_of(inner) == []


async def test_an_unknown_outcome_of_a_file_is_settled_by_sending_it_again() -> None:
    inner = open_blob_store("memory:")
    after = Fault(FaultKind.AFTER)
    destination = at(FaultyBlobStore(inner, ScriptedFaults({Operation.PUT: [after] * 3})))

    async def pieces() -> AsyncIterator[bytes]:
        yield b"bytes"

    await_twice: Callable[[], AsyncIterator[bytes]] = pieces
    with pytest.raises(BlobOutcomeUnknownError):
        await destination.put("epoch=1/a", await_twice)
    await destination.put("epoch=1/b", await_twice)
    assert await inner.get("epoch=1/b") == b"bytes"


def test_a_destination_names_its_manifest() -> None:
    assert Destination.open("memory:t/").manifest_uri == "memory:t/manifest.json"
