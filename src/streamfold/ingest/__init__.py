"""Fills streams from PostgreSQL tables: copies each table once, then appends each change once."""

from streamfold.ingest.errors import (
    RowTooLargeError,
    SlotLostError,
    SourceUnavailableError,
    SourceUnusableError,
)

__all__ = [
    "SourceUnusableError",
    "SourceUnavailableError",
    "SlotLostError",
    "RowTooLargeError",
]
