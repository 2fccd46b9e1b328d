"""Conformance tests for archive destinations.

    class TestMyDestination(DestinationConformance):
        @pytest.fixture
        def destination(self) -> Destination:
            return Destination(MyStore(...), "my://folder/")     # new and empty for each test

A destination is a blob store with a name, so run `BlobStoreConformance` on the store too.
Needs pytest, pytest-asyncio and pyarrow: `pip install streamfold[archive,testing]`.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import msgspec

from streamfold.archive.destinations.destination import (
    Destination,
    StoredManifest,
    check_compare_and_swap,
)
from streamfold.archive.manifest.model import Artifact, FormatFiles, Manifest, Part
from streamfold.blob import BlobChangedError
from streamfold.errors import BlobExistsError
from streamfold.extras import needing_extra
from streamfold.testing.blob_kit import keys_of, pieces_of

with needing_extra("testing"):
    import pytest

MOMENT = "2026-06-03T12:00:00.000000Z"


def small_manifest(number: int = 1) -> Manifest:
    """Return a manifest with one base. Manifests of different numbers differ."""
    path = "epoch=1/snapshot-00000000000000000007-attempt1.jsonl"
    part = Part(path=path, uri="elsewhere:/" + path, size_bytes=0, sha256="0" * 64, rows=0)
    files = FormatFiles(uri=part.uri, size_bytes=0, compression="none", parts=(part,))
    base = Artifact(
        kind="snapshot",
        epoch=1,
        from_position=None,
        to_position="7",
        created_at=MOMENT,
        row_count=0,
        formats={"jsonl": files},
    )
    return Manifest(
        table="public.users",
        epoch=1,
        updated_at=MOMENT,
        head_position="7",
        artifacts=(base,),
        commit_number=number,
        commit_id=f"commit-{number}",
    )


class DestinationConformance:
    """Conformance suite. Subclass it in a test module and override `destination`."""

    pytestmark = pytest.mark.asyncio

    @pytest.fixture
    def destination(self) -> Destination:
        raise NotImplementedError("override the `destination` fixture: return an empty one")

    async def test_it_passes_its_own_check_and_leaves_nothing(
        self, destination: Destination
    ) -> None:
        await check_compare_and_swap(destination, "probe")
        assert await keys_of(destination.blobs) == []

    async def test_a_new_destination_has_no_manifest(self, destination: Destination) -> None:
        assert await destination.read() is None

    async def test_a_manifest_is_read_as_it_was_stored_with_uris_of_this_destination(
        self, destination: Destination
    ) -> None:
        stored = await destination.swap(small_manifest(), None)
        assert await destination.read() == stored
        [part] = stored.manifest.parts()
        assert part.uri == destination.uri + part.path
        assert stored.manifest.base.formats["jsonl"].uri == part.uri

    async def test_a_first_manifest_is_stored_once(self, destination: Destination) -> None:
        stored = await destination.swap(small_manifest(1), None)
        with pytest.raises(BlobExistsError):
            await destination.swap(small_manifest(2), None)
        assert await destination.read() == stored

    async def test_a_manifest_replaces_the_one_that_was_read(
        self, destination: Destination
    ) -> None:
        first = await destination.swap(small_manifest(1), None)
        second = await destination.swap(small_manifest(2), first)
        with pytest.raises(BlobChangedError):
            await destination.swap(small_manifest(3), first)
        assert await destination.read() == second

    async def test_of_racing_commits_one_wins(self, destination: Destination) -> None:
        async def commit(number: int, previous: StoredManifest) -> StoredManifest | None:
            with suppress(BlobChangedError):
                return await destination.swap(small_manifest(number), previous)
            return None

        current = await destination.swap(small_manifest(), None)
        for turn in range(1, 4):
            numbers = range(10 * turn, 10 * turn + 6)
            results = await asyncio.gather(*(commit(number, current) for number in numbers))
            [current] = [result for result in results if result]
            assert await destination.read() == current

    async def test_unknown_fields_survive(self, destination: Destination) -> None:
        manifest = msgspec.structs.replace(small_manifest(), extra={"later": {"a": [1, None]}})
        stored = await destination.swap(manifest, None)
        assert (await destination.read()) == stored
        assert stored.manifest.extra == {"later": {"a": [1, None]}}

    async def test_a_file_exists_whole_or_not_at_all(self, destination: Destination) -> None:
        await destination.put("epoch=1/file", lambda: pieces_of([b"ab", b"c"]))
        assert await destination.blobs.get("epoch=1/file") == b"abc"
        assert await destination.holds("epoch=1/file", 3)
        assert not await destination.holds("epoch=1/file", 4)
        assert not await destination.holds("epoch=1/other", 3)
