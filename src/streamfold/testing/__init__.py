"""Conformance kits: subclass one, give it your backend, and get our guarantees tested."""

from streamfold.extras import needing_extra

with needing_extra("testing"):
    from streamfold.testing.blob_kit import BlobStoreConformance

__all__ = ["BlobStoreConformance"]
