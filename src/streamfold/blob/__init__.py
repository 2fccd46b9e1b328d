"""Object storage behind one small interface: memory, local disk, S3-compatible services."""

from streamfold.blob import process_exit as process_exit  # registers a step at exit
from streamfold.blob.blob_store import DEFAULT_CHUNK_SIZE, BlobChangedError, BlobMeta, BlobStore
from streamfold.blob.destination_types import DESTINATIONS, CredentialProvider, DestinationType
from streamfold.blob.local.store import LocalBlobStore
from streamfold.blob.obstore.retries import RequestLimits
from streamfold.blob.obstore.store import ObstoreBlobStore
from streamfold.blob.open import open_blob_store

__all__ = [
    "BlobChangedError",
    "BlobMeta",
    "BlobStore",
    "DEFAULT_CHUNK_SIZE",
    "open_blob_store",
    "CredentialProvider",
    "DestinationType",
    "DESTINATIONS",
    "RequestLimits",
    "LocalBlobStore",
    "ObstoreBlobStore",
]
