"""The archives in a folder: every manifest that is there or below."""

from __future__ import annotations

from collections.abc import AsyncIterator

from streamfold.archive.destination import Destination
from streamfold.archive.manifest import MANIFEST_KEY, Manifest
from streamfold.archive.manifest_json import read_manifest
from streamfold.errors import BlobNotFoundError


async def list_archives(folder: Destination) -> AsyncIterator[tuple[str, Manifest]]:
    """Yield the folder and the manifest of each archive, by the order of their names.

    A manifest that cannot be used is an error of the whole listing, not left out of it.
    """
    async for meta in folder.blobs.list():
        if meta.key != MANIFEST_KEY and not meta.key.endswith("/" + MANIFEST_KEY):
            continue
        try:
            data = await folder.blobs.get(meta.key)
        except BlobNotFoundError:
            continue  # deleted since it was listed
        yield folder.uri + meta.key.removesuffix(MANIFEST_KEY), read_manifest(data)
