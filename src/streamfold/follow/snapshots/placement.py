"""Functions that choose where an application's snapshots are stored, and snapshots on blob stores."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final, TypeVar, overload

from streamfold.blob import BlobMeta, BlobStore, location_url, open_blob_store
from streamfold.errors import BlobExistsError, InvalidError
from streamfold.follow.encoding.codecs import Codec, JsonCodec
from streamfold.follow.encoding.record_forms import form_named
from streamfold.follow.snapshots.snapshot_store import (
    CONTAINER,
    NAMINGS,
    Naming,
    Placement,
    SnapshotInfo,
    Snapshots,
    SnapshotStore,
    Writing,
    find_naming,
)

logger = logging.getLogger(__name__)

#: A key with a digit in it may be intended as a snapshot.
_LOOKS_LIKE_ONE: Final = re.compile(r"[0-9]")
#: Maximum number of blobs named in warnings: ten are enough to recognise a wrong folder.
_WARNINGS_MAX: Final = 10
S = TypeVar("S")


class BlobSnapshots(SnapshotStore):
    """Stores snapshots under a blob store's `prefix`. Leaves other blobs there alone.

    Reads every naming and writes the given one.
    """

    def __init__(self, blobs: BlobStore, prefix: str = "", naming: Naming = CONTAINER) -> None:
        self._blobs = blobs
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._naming = naming
        self._warned: set[str] = set()

    @property
    def naming(self) -> Naming:
        return self._naming

    async def list(self) -> list[SnapshotInfo]:
        infos = []
        async for meta in self._blobs.list(self._prefix):
            info = self._info(meta)
            if info is not None:
                infos.append(info)
            else:
                self._warn(meta.key.removeprefix(self._prefix))
        return sorted(infos, key=lambda info: info.cursor, reverse=True)

    def load(self, info: SnapshotInfo) -> AsyncIterator[bytes]:
        return self._blobs.stream(info.name)

    async def save(self, cursor: int, codec: str, blob: bytes) -> bool:
        try:
            await self._blobs.put_if_absent(self._prefix + self._naming.key(cursor, codec), blob)
        except BlobExistsError:
            return False
        return True

    async def delete(self, info: SnapshotInfo) -> None:
        await self._blobs.delete(info.name)

    def _info(self, meta: BlobMeta) -> SnapshotInfo | None:
        key = meta.key.removeprefix(self._prefix)
        for naming in NAMINGS.values():
            if (parsed := naming.parse(key)) is not None:
                cursor, codec = parsed
                created = int(meta.last_modified.timestamp() * 1000)
                return SnapshotInfo(
                    Placement.EXTERNAL, meta.key, cursor, codec, meta.size, created, naming.name
                )
        return None

    def _warn(self, key: str) -> None:
        """Warn once about a blob that may be intended as a snapshot."""
        if len(self._warned) == _WARNINGS_MAX or key in self._warned or "/" in key:
            return
        if _LOOKS_LIKE_ONE.search(key):
            self._warned.add(key)
            logger.warning(
                "%s%s looks like a snapshot, but its name is not understood and it is ignored: "
                "call it CURSOR.CODEC, for example 1000.json",
                self._prefix,
                key,
            )


@overload
def external(
    location: str | Path | BlobStore | SnapshotStore,
    *,
    codec: None = ...,
    prefix: str = ...,
    naming: str = ...,
    **options: str,
) -> Snapshots[Any]: ...
@overload
def external(
    location: str | Path | BlobStore | SnapshotStore,
    *,
    codec: Codec[S],
    prefix: str = ...,
    naming: str = ...,
    **options: str,
) -> Snapshots[S]: ...
def external(
    location: str | Path | BlobStore | SnapshotStore,
    *,
    codec: Codec[Any] | None = None,
    prefix: str = "",
    naming: str = "streamfold",
    **options: str,
) -> Snapshots[Any]:
    """Store snapshots outside the stream, at `location`: a folder, a URL or a store.

    `codec` turns states into bytes, by default as JSON. Keys begin with `prefix`. `naming="plain"`
    writes `1000.json`, which contains only the state. Both namings are always read. `options` go to
    `open_blob_store`. Give each stream its own folder or prefix, such as `s3://bucket/orders`.
    """
    return Snapshots(_codec(codec), _store(location, prefix, options, naming), Writing.EXTERNAL)


@overload
def in_stream(*, shape: str = ..., trim: bool = ...) -> Snapshots[Any]: ...
@overload
def in_stream(*, codec: Codec[S], shape: str = ..., trim: bool = ...) -> Snapshots[S]: ...
def in_stream(
    *, codec: Codec[Any] | None = None, shape: str = "streamfold", trim: bool = True
) -> Snapshots[Any]:
    """Store snapshots in the stream itself: one record, or several once the state outgrows it.

    Taking a snapshot trims the records that it covers, unless `trim` is False. Give readers the same
    `trim`. `shape="plain"` writes the record as a JSON object, `{"type": "snapshot",
    "covers_before": …, "state": …}`. Both shapes are always read.
    """
    chosen = form_named(shape)
    return Snapshots(_codec(codec), None, Writing.IN_STREAM, chosen, trim)


@overload
def auto(
    location: str | Path | BlobStore | SnapshotStore | None = ...,
    *,
    codec: None = ...,
    prefix: str = ...,
    naming: str = ...,
    shape: str = ...,
    trim: bool = ...,
    **options: str,
) -> Snapshots[Any]: ...
@overload
def auto(
    location: str | Path | BlobStore | SnapshotStore | None = ...,
    *,
    codec: Codec[S],
    prefix: str = ...,
    naming: str = ...,
    shape: str = ...,
    trim: bool = ...,
    **options: str,
) -> Snapshots[S]: ...
def auto(
    location: str | Path | BlobStore | SnapshotStore | None = None,
    *,
    codec: Codec[Any] | None = None,
    prefix: str = "",
    naming: str = "streamfold",
    shape: str = "streamfold",
    trim: bool = True,
    **options: str,
) -> Snapshots[Any]:
    """Store snapshots in the stream while they fit one record, then at `location`, if there is one.

    `shape` and `trim` are as in `in_stream`, and the other parameters as in `external`.
    """
    store = None if location is None else _store(location, prefix, options, naming)
    return Snapshots(_codec(codec), store, Writing.AUTO, form_named(shape), trim)


def _codec(codec: Codec[Any] | None) -> Codec[Any]:
    return codec if codec is not None else JsonCodec[Any]()


def _store(
    location: str | Path | BlobStore | SnapshotStore,
    prefix: str,
    options: dict[str, str],
    naming: str = "streamfold",
) -> SnapshotStore:
    chosen = find_naming(naming)
    if isinstance(location, SnapshotStore):
        if chosen is not location.naming:
            raise InvalidError(f"a store of snapshots has its own naming: leave out {naming!r}")
        return location
    if isinstance(location, str | Path):
        location = open_blob_store(location_url(location), **options)
    return BlobSnapshots(location, prefix, chosen)
