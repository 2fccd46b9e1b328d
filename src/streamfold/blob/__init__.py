"""Object storage behind one small interface: memory, local disk, S3-compatible services."""

from streamfold.blob import process_exit as process_exit  # registers a step at exit
from streamfold.blob.blob_store import DEFAULT_CHUNK_SIZE, BlobChangedError, BlobMeta, BlobStore
from streamfold.blob.destinations import (
    DESTINATIONS,
    CredentialProvider,
    DestinationType,
    location_url,
    open_blob_store,
)
from streamfold.blob.local_store import LocalBlobStore
from streamfold.blob.obstore.requests import RequestLimits
from streamfold.blob.obstore.store import ObstoreBlobStore

__all__ = [
    "BlobChangedError",
    "BlobMeta",
    "BlobStore",
    "DEFAULT_CHUNK_SIZE",
    "location_url",
    "open_blob_store",
    "CredentialProvider",
    "DestinationType",
    "DESTINATIONS",
    "RequestLimits",
    "LocalBlobStore",
    "ObstoreBlobStore",
]
