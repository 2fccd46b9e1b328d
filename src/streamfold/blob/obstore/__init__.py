"""Blobs in everything that obstore reaches: memory, S3-compatible services, GCS, Azure."""
