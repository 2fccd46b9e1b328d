"""Refuses to open a store where another program keeps its data.

A store keeps its database in the folder `db` of its location. s2-lite, which also uses SlateDB, keeps
its database in the location itself: a store opened there would find nothing, start empty, and look as
if all data were lost.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from streamfold.blob import BlobStore
from streamfold.errors import FormatUnsupportedError

#: Where SlateDB keeps its manifests, below its own folder, and their file names.
MANIFESTS: Final = "manifest"
_MANIFEST: Final = re.compile(r"[0-9]{20}\.manifest")


def check_folder(url: str, folder: Path) -> None:
    """Raise if `folder` itself is a SlateDB database."""
    manifests = folder / MANIFESTS
    if manifests.is_dir():
        _check(url, (path.name for path in manifests.iterdir()))


async def check_blobs(url: str, manifests: BlobStore) -> None:
    """Raise if the location on object storage is one; `manifests` holds the blobs below MANIFESTS."""
    async for meta in manifests.list():
        _check(url, [meta.key.rpartition("/")[2]])


def _check(url: str, names: Iterable[str]) -> None:
    if not any(map(_MANIFEST.fullmatch, names)):
        return
    above = url.rstrip("/").removesuffix("/db")
    if above != url.rstrip("/"):
        hint = f" (if it is the folder db of a Streamfold store, give {above})"
    else:
        hint = ""
    raise FormatUnsupportedError(
        f"{url} holds a database of another program, most likely of s2-lite{hint}: choose another "
        "location, run s2-lite on this one, and copy each basin with `streamfold copy s2://basin "
        "s2://basin --from-endpoint URL-OF-S2-LITE`"
    )
