"""Where a store lives: `memory:`, `file:///folder`, `s3://bucket/prefix`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from slatedb.uniffi._slatedb_uniffi import slatedb as binding

from streamfold.blob import BlobStore, LocalBlobStore, open_blob_store
from streamfold.errors import InvalidError

#: Folders below the location in which SlateDB keeps its files, and the store its snapshots.
DATABASE, SNAPSHOTS = "db", "snapshots"
#: Of folders on local disk: for this user alone, whatever files within allow.
_PRIVATE = 0o700


@dataclass(frozen=True, slots=True)
class Location:
    """A parsed location; `store` is SlateDB's handle on it, and for `memory:` the data itself."""

    url: str
    #: Path of the database within the object store.
    path: str
    #: Folder of the database on local disk, if that is where it is.
    folder: Path | None
    store: Any = field(repr=False)
    #: Where the bytes of snapshots are.
    snapshots: BlobStore = field(repr=False)


def open_location(url: str, environment: Mapping[str, str] = os.environ) -> Location:
    """Parse `url` and connect to it; nothing is read or written yet.

    S3 takes endpoint, region and credentials from the usual AWS_* variables in `environment`.
    """
    parts = urlsplit(url)
    if parts.scheme == "memory":
        database = binding.ObjectStore.resolve("memory:///")
        return Location(url, DATABASE, None, database, open_blob_store("memory:"))
    if parts.scheme == "file":
        return _local(url, Path(unquote(parts.path)))
    if parts.scheme == "s3" and parts.netloc:
        return _s3(url, parts.netloc, parts.path.strip("/"), environment)
    raise InvalidError(
        f"store location {url!r} is not understood: "
        "give memory:, file:///folder or s3://bucket/prefix"
    )


def _local(url: str, folder: Path) -> Location:
    if not folder.is_absolute():
        raise InvalidError(f"store location {url!r} must name an absolute folder: file:///folder")
    for private in (folder, folder / DATABASE, folder / SNAPSHOTS):
        private.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
    builder = binding.ObjectStoreBuilder(binding.ObjectStoreType.LOCAL)
    builder.with_config("local_path", str(folder))
    snapshots = LocalBlobStore(folder / SNAPSHOTS)
    return Location(url, DATABASE, folder / DATABASE, builder.build(), snapshots)


def _s3(url: str, bucket: str, prefix: str, environment: Mapping[str, str]) -> Location:
    builder = binding.ObjectStoreBuilder(binding.ObjectStoreType.S3)
    builder.with_config("bucket", bucket)
    options: dict[str, str] = {}
    for key, names in {
        "access_key_id": ("AWS_ACCESS_KEY_ID",),
        "secret_access_key": ("AWS_SECRET_ACCESS_KEY",),
        "session_token": ("AWS_SESSION_TOKEN",),
        "region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
        "endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
        "container_credentials_relative_uri": ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",),
        "web_identity_token_file": ("AWS_WEB_IDENTITY_TOKEN_FILE",),
        "role_arn": ("AWS_ROLE_ARN",),
    }.items():
        value = next((environment[name] for name in names if environment.get(name)), None)
        if value is not None:
            builder.with_config(key, value)
            options[key] = value
            if key == "endpoint" and value.startswith("http://"):
                builder.with_config("allow_http", "true")
    path = f"{prefix}/{DATABASE}" if prefix else DATABASE
    snapshots = "/".join(part for part in (f"s3://{bucket}", prefix, SNAPSHOTS) if part)
    blobs = open_blob_store(snapshots, **options)
    return Location(url, path, None, builder.build(), blobs)
