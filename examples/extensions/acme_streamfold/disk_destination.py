"""Archives on a network disk, which are refused while the disk is not mounted.

A folder would do, but the empty folder below an unmounted disk takes files as well, and they are
lost. A file `.mounted` at the top of the disk shows that the disk is there.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote, urlsplit

import msgspec

from streamfold.blob import BlobStore, DestinationType, LocalBlobStore
from streamfold.errors import BlobUnavailableError
from streamfold.extensions import Options

MARK = ".mounted"


class DiskOptions(Options, frozen=True, kw_only=True):
    mount: Annotated[str, msgspec.Meta(description="folder that the disk is mounted at")]
    folder: Annotated[str, msgspec.Meta(description="folder on the disk")] = "archives"


def locate(options: DiskOptions) -> str:
    path = Path(options.mount).absolute() / options.folder
    return path.as_uri().replace("file://", "disk://", 1)


def open_disk(url: str, options: Mapping[str, Any]) -> BlobStore:
    folder = Path(unquote(urlsplit(url).path))
    if not any((parent / MARK).exists() for parent in folder.parents):
        raise BlobUnavailableError(f"no disk is mounted for {url}: {MARK} is missing above it")
    return LocalBlobStore(folder)


DISK = DestinationType(
    id="disk",
    summary="a network disk",
    options=DiskOptions,
    locate=locate,
    open=open_disk,
)
