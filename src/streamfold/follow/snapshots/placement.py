"""Functions with which an application says where its snapshots are kept."""

from __future__ import annotations

from typing import Any, TypeVar, overload

from streamfold.blob import BlobStore, open_blob_store
from streamfold.errors import InvalidError
from streamfold.follow.encoding.codecs import Codec, JsonCodec
from streamfold.follow.encoding.record_forms import form_named
from streamfold.follow.snapshots.blob_snapshots import BlobSnapshots
from streamfold.follow.snapshots.naming import find_naming
from streamfold.follow.snapshots.snapshot_store import Snapshots, SnapshotStore, Writing

S = TypeVar("S")


@overload
def external(
    place: str | BlobStore | SnapshotStore,
    *,
    codec: None = ...,
    prefix: str = ...,
    naming: str = ...,
    **options: str,
) -> Snapshots[Any]: ...
@overload
def external(
    place: str | BlobStore | SnapshotStore,
    *,
    codec: Codec[S],
    prefix: str = ...,
    naming: str = ...,
    **options: str,
) -> Snapshots[S]: ...
def external(
    place: str | BlobStore | SnapshotStore,
    *,
    codec: Codec[Any] | None = None,
    prefix: str = "",
    naming: str = "streamfold",
    **options: str,
) -> Snapshots[Any]:
    """Snapshots outside the stream: at a URL (`s3://bucket/orders`, `file:///folder`), or in a store.

    `naming="plain"` writes `1000.json` with nothing but the state in it; both namings are always
    read. `options` go to `open_blob_store`. Give each stream a folder or prefix of its own.
    """
    return Snapshots(_codec(codec), _store(place, prefix, options, naming), Writing.EXTERNAL)


@overload
def in_stream(*, shape: str = ..., trim: bool = ...) -> Snapshots[Any]: ...
@overload
def in_stream(*, codec: Codec[S], shape: str = ..., trim: bool = ...) -> Snapshots[S]: ...
def in_stream(
    *, codec: Codec[Any] | None = None, shape: str = "streamfold", trim: bool = True
) -> Snapshots[Any]:
    """Snapshots in the stream itself: one record, or several once the state outgrows it.

    Taking one trims the records that it covers, unless `trim` is False; give readers the same.
    `shape="plain"` writes the record as a JSON object, `{"type": "snapshot", "covers_before": …,
    "state": …}`; both shapes are always read.
    """
    chosen = form_named(shape)
    return Snapshots(_codec(codec), None, Writing.IN_STREAM, chosen, trim)


@overload
def auto(
    place: str | BlobStore | SnapshotStore | None = ...,
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
    place: str | BlobStore | SnapshotStore | None = ...,
    *,
    codec: Codec[S],
    prefix: str = ...,
    naming: str = ...,
    shape: str = ...,
    trim: bool = ...,
    **options: str,
) -> Snapshots[S]: ...
def auto(
    place: str | BlobStore | SnapshotStore | None = None,
    *,
    codec: Codec[Any] | None = None,
    prefix: str = "",
    naming: str = "streamfold",
    shape: str = "streamfold",
    trim: bool = True,
    **options: str,
) -> Snapshots[Any]:
    """Snapshots in the stream while they fit one record, and then outside if a store is given."""
    store = None if place is None else _store(place, prefix, options, naming)
    return Snapshots(_codec(codec), store, Writing.AUTO, form_named(shape), trim)


def _codec(codec: Codec[Any] | None) -> Codec[Any]:
    return codec if codec is not None else JsonCodec[Any]()


def _store(
    place: str | BlobStore | SnapshotStore,
    prefix: str,
    options: dict[str, str],
    naming: str = "streamfold",
) -> SnapshotStore:
    chosen = find_naming(naming)
    if isinstance(place, SnapshotStore):
        if chosen is not place.naming:
            raise InvalidError(f"a store of snapshots has its own naming: leave out {naming!r}")
        return place
    blobs = open_blob_store(place, **options) if isinstance(place, str) else place
    return BlobSnapshots(blobs, prefix, chosen)
