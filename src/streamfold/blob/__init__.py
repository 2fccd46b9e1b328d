"""Object storage behind one small interface: memory, local disk, S3-compatible services."""

from streamfold.blob import process_exit as process_exit  # registers a step at exit
from streamfold.blob.base import DEFAULT_CHUNK_SIZE, BlobChangedError, BlobMeta, BlobStore
from streamfold.blob.faults import (
    Fault,
    FaultKind,
    FaultPlan,
    FaultyBlobStore,
    Operation,
    ScriptedFaults,
    SeededFaults,
)
from streamfold.blob.limits import RequestLimits
from streamfold.blob.local import LocalBlobStore
from streamfold.blob.object_store import ObstoreBlobStore
from streamfold.blob.opening import CredentialProvider, open_blob_store

__all__ = [
    "BlobChangedError",
    "BlobMeta",
    "BlobStore",
    "DEFAULT_CHUNK_SIZE",
    "open_blob_store",
    "CredentialProvider",
    "RequestLimits",
    "LocalBlobStore",
    "ObstoreBlobStore",
    "Fault",
    "FaultKind",
    "FaultPlan",
    "FaultyBlobStore",
    "Operation",
    "ScriptedFaults",
    "SeededFaults",
]
