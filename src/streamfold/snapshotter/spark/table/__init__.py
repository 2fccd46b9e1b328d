"""One table's writer on the driver: its query, its batches, its archive."""
