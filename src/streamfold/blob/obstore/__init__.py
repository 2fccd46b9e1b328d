"""Stores blobs in everything that obstore supports: memory, S3-compatible services, GCS, Azure."""
