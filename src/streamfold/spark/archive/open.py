"""Opens archives and their files where they are read: on the driver, and in every task."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streamfold.archive.destinations.aws_credentials import Profiles
from streamfold.archive.destinations.destination import Destination
from streamfold.archive.read.cache import Cache
from streamfold.archive.read.part_files import PartFiles
from streamfold.archive.read.reader import Archive, open_archive
from streamfold.blob import BlobStore, open_blob_store
from streamfold.spark.archive.options import CREDENTIALS, Storage

#: Name of a read's only profile.
_PROFILE = "archive"


async def open_table(storage: Storage) -> Archive:
    """Open the archive; credentials are fetched when needed, and renewed."""
    access = _access(storage)
    provider = access.pop("credential_provider", None)
    return await open_archive(
        storage.uri, cache=storage.cache, options=access, credential_provider=provider
    )


def open_files(storage: Storage, folder: str) -> PartFiles:
    """Open the files in an archive's folder, without reading its manifest."""
    access = _access(storage)

    def open_folder(url: str) -> BlobStore:
        return open_blob_store(url, **access)

    cache = None if storage.cache is None else Cache(Path(storage.cache))
    return PartFiles(Destination(open_folder(folder.rstrip("/")), folder), cache, open_folder)


def _access(storage: Storage) -> dict[str, Any]:
    """Return the storage's options; given ones win over those of the profile."""
    if not storage.credentials:
        return dict(storage.options)
    raw: Mapping[str, object] = {_PROFILE: dict(storage.credentials)}
    profiles = Profiles.parse(raw, path=CREDENTIALS.rstrip("."))
    found = profiles.access(_PROFILE, path=CREDENTIALS).blob_options()
    return {**found, **storage.options}
