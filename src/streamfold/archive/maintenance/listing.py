"""The archives in a folder: every manifest in it or below."""

from __future__ import annotations

from collections.abc import AsyncIterator

from streamfold.archive.destinations.destination import Destination
from streamfold.archive.manifest.encoding import read_manifest
from streamfold.archive.manifest.model import MANIFEST_KEY, Manifest
from streamfold.errors import BlobNotFoundError, StreamfoldError


async def list_archives(
    folder: Destination,
) -> AsyncIterator[tuple[str, Manifest | StreamfoldError]]:
    """Yield the folder and the manifest of each archive, in the order of their names.

    For a manifest that cannot be used the reason comes instead; the others are still listed.
    """
    async for meta in folder.blobs.list():
        if meta.key != MANIFEST_KEY and not meta.key.endswith("/" + MANIFEST_KEY):
            continue
        found: Manifest | StreamfoldError
        try:
            found = read_manifest(await folder.blobs.get(meta.key))
        except BlobNotFoundError:
            continue  # deleted since it was listed
        except StreamfoldError as error:
            found = error
        yield folder.uri + meta.key.removesuffix(MANIFEST_KEY), found
