"""Sources that fill streams: PostgreSQL tables, copied once and then followed, each change once."""

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
