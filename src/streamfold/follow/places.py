"""The words with which an application says where its snapshots live."""

from __future__ import annotations

from typing import Any, TypeVar, overload

from streamfold.blob import BlobStore, open_blob_store
from streamfold.follow.codecs import Codec, JsonCodec
from streamfold.follow.external import BlobSnapshots
from streamfold.follow.snapshots import Snapshots, SnapshotStore, Writing

S = TypeVar("S")


@overload
def external(
    place: str | BlobStore | SnapshotStore,
    *,
    codec: None = ...,
    prefix: str = ...,
    **options: str,
) -> Snapshots[Any]: ...
@overload
def external(
    place: str | BlobStore | SnapshotStore, *, codec: Codec[S], prefix: str = ..., **options: str
) -> Snapshots[S]: ...
def external(
    place: str | BlobStore | SnapshotStore,
    *,
    codec: Codec[Any] | None = None,
    prefix: str = "",
    **options: str,
) -> Snapshots[Any]:
    """Snapshots outside the stream: at a URL (`s3://bucket/orders`, `file:///folder`), or in a store.

    `options` go to `open_blob_store`. The same place must not be used for two streams: give each a
    folder or prefix of its own.
    """
    return Snapshots(_codec(codec), _store(place, prefix, options), Writing.EXTERNAL)


@overload
def in_stream() -> Snapshots[Any]: ...
@overload
def in_stream(*, codec: Codec[S]) -> Snapshots[S]: ...
def in_stream(*, codec: Codec[Any] | None = None) -> Snapshots[Any]:
    """Snapshots in the stream itself: one record, or several once the state outgrows it.

    Taking one trims the records that it covers.
    """
    return Snapshots(_codec(codec), None, Writing.IN_STREAM)


@overload
def auto(
    place: str | BlobStore | SnapshotStore | None = ...,
    *,
    codec: None = ...,
    prefix: str = ...,
    **options: str,
) -> Snapshots[Any]: ...
@overload
def auto(
    place: str | BlobStore | SnapshotStore | None = ...,
    *,
    codec: Codec[S],
    prefix: str = ...,
    **options: str,
) -> Snapshots[S]: ...
def auto(
    place: str | BlobStore | SnapshotStore | None = None,
    *,
    codec: Codec[Any] | None = None,
    prefix: str = "",
    **options: str,
) -> Snapshots[Any]:
    """Snapshots in the stream while they fit one record, and then outside if a place is given."""
    store = None if place is None else _store(place, prefix, options)
    return Snapshots(_codec(codec), store, Writing.AUTO)


def _codec(codec: Codec[Any] | None) -> Codec[Any]:
    return codec if codec is not None else JsonCodec[Any]()


def _store(
    place: str | BlobStore | SnapshotStore, prefix: str, options: dict[str, str]
) -> SnapshotStore:
    if isinstance(place, SnapshotStore):
        return place
    blobs = open_blob_store(place, **options) if isinstance(place, str) else place
    return BlobSnapshots(blobs, prefix)
