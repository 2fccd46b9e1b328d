"""Errors that can occur before a change reaches an archive.

StreamfoldError
├── AddressUnavailableError           choose another http.port
└── StreamTrimmedError                copy all rows again, or accept an incomplete table
InvalidError
├── ConfigurationError                fix every line that it lists
└── SchemaIncompatibleError
    └── ValuesIncompatibleError       correct the row and copy the table again, or skip it
"""

from __future__ import annotations

from collections.abc import Sequence

from streamfold.archive.errors import SchemaIncompatibleError
from streamfold.errors import InvalidError, StreamfoldError

#: Problems that a message lists; others are counted.
PROBLEMS_SHOWN = 20


class ConfigurationError(InvalidError):
    """The configuration breaks rules; `problems` has all of them, each with its full path."""

    code = "configuration_invalid"

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class AddressUnavailableError(StreamfoldError):
    """Health, status and metrics cannot be served at the configured address."""

    code = "address_unavailable"

    def __init__(self, host: str, port: int, cause: str) -> None:
        super().__init__(
            f"http.port {port} on {host} cannot be used ({cause}): choose another http.port or "
            "http.host, or stop the process that listens there"
        )


class StreamTrimmedError(StreamfoldError):
    """A new archive would begin on a stream that has lost its first records, and rows with them."""

    code = "stream_trimmed"

    def __init__(self, table: str, stream: str, first: int) -> None:
        super().__init__(
            f"stream {stream!r} begins at record {first}: earlier ones were trimmed or aged out, so "
            f"table {table!r} would lack rows. Have the source write all rows again (`ingest postgres "
            '--recopy`, `publish --recopy`), or set source.on_trimmed = "publish" (`publish '
            "--on-trimmed publish`) to publish what is left, marked as incomplete. If the stream holds "
            "the whole table from a later record on, name that record in source.start"
        )
        self.stream, self.first = stream, first


class ValuesIncompatibleError(SchemaIncompatibleError):
    """Values do not fit their columns; no record of the batch was used."""

    code = "schema_incompatible"

    def __init__(self, seq_num: int, problems: Sequence[str], key: str = "") -> None:
        """`problems` of all records that do not fit; `key` of the first."""
        more = len(problems) - PROBLEMS_SHOWN
        shown = "; ".join(problems[:PROBLEMS_SHOWN]) + (f"; and {more} more" if more > 0 else "")
        row = f" (row {key})" if key else ""
        StreamfoldError.__init__(
            self,
            f"from record {seq_num} on{row}, values do not fit the table's columns: {shown}. Correct "
            "the row and copy the table again (`ingest postgres --recopy`, `publish --recopy`); or "
            f"make dead letters: of this record (`dead_letters.records = [{seq_num}]`, `publish --skip "
            f'TABLE:{seq_num}`), or of all that do not fit (`decoder.mismatch = "dead_letter"`, '
            "`publish --mismatch dead_letter`); or publish a new table if a column got another type",
        )
        self.seq_num, self.problems = seq_num, tuple(problems)
