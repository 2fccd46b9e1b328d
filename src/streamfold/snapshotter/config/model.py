"""How a snapshot writer is to run: one model, whatever it was read from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from streamfold.archive.destinations.aws_credentials import Profile
from streamfold.archive.maintenance.garbage_collection import Retention
from streamfold.archive.schema.table_schema import TableSchema
from streamfold.archive.write.thresholds import Thresholds
from streamfold.snapshotter.decoding import (
    STOP,
    ChangeDecoder,
    DebeziumDecoder,
    EnvelopeDecoder,
    UpsertDecoder,
)
from streamfold.snapshotter.decoding.debezium import TIME_UNIT, UNAVAILABLE
from streamfold.snapshotter.pipeline.transactions import TransactionLimits

#: The basin in which a server keeps streams that name none.
DEFAULT_BASIN = "durable-streams"
DEFAULT_INTERVAL = timedelta(seconds=30)
#: Not that of `streamfold serve`, which is likely to run beside it.
DEFAULT_PORT = 8081
#: Limits of a table that says nothing about them: without any, its chain would grow for ever.
DEFAULT_THRESHOLDS = Thresholds(
    min_interval=timedelta(minutes=5),
    max_interval=timedelta(hours=6),
    max_diff_bytes=32 << 20,
    max_diff_fraction=0.25,
    max_churn_records=100_000,
    max_churn_fraction=0.5,
)


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """The stream whose records are changes of the table."""

    #: Origin of the server: http://host:port.
    server: str
    basin: str
    stream: str
    table: str
    #: Schema of the database that the table is in.
    namespace: str | None = None
    client_id: str | None = None
    #: Where a new archive starts: earliest, latest, or a sequence number.
    start: str = "earliest"
    #: Where the access token is: a variable, or a file.
    token_env: str = "S2_ACCESS_TOKEN"  # noqa: S105 - the name of a variable
    token_file: Path | None = None

    @property
    def qualified(self) -> str:
        """The table with its schema, as in `public.orders`."""
        if self.namespace is None or self.table.startswith(f"{self.namespace}."):
            return self.table
        return f"{self.namespace}.{self.table}"


@dataclass(frozen=True, slots=True)
class DestinationSettings:
    """A folder for archives; `url` as `streamfold.blob` takes it, without the table's part."""

    type: str
    url: str
    region: str | None = None
    endpoint: str | None = None
    credentials: str | None = None

    def folder(self, key_prefix: str) -> str:
        """The URL of a table's own folder."""
        return f"{self.url.rstrip('/')}/{key_prefix.strip('/')}".rstrip("/")


@dataclass(frozen=True, slots=True)
class FormatSettings:
    """Formats of artifacts as (id, compression), the first one measured by the limits."""

    snapshot: tuple[tuple[str, str], ...] = (("jsonl", "none"),)
    diff: tuple[tuple[str, str], ...] = (("jsonl", "none"),)


@dataclass(frozen=True, slots=True)
class EventSettings:
    """A sink for events; `raw` is what `streamfold.archive.events.open_sink` takes."""

    type: str
    #: Not for every log: secrets are put into the URLs of webhooks.
    raw: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True, slots=True)
class DecoderSettings:
    """How records tell changes."""

    kind: str = EnvelopeDecoder.kind
    mismatch: str = STOP
    key_header: str | None = None
    deleted_field: str | None = None
    #: Only for Debezium; see there for the usual ones.
    time_unit: str | None = None
    unavailable: str | None = None

    def decoder(self, key_fields: tuple[str, ...]) -> ChangeDecoder:
        """The decoder for a table of this key."""
        if self.kind == DebeziumDecoder.kind:
            unit, marker = self.time_unit or TIME_UNIT, self.unavailable or UNAVAILABLE
            return DebeziumDecoder(key_fields, self.mismatch, unit, marker)
        if self.kind == UpsertDecoder.kind:
            return UpsertDecoder(key_fields, self.mismatch, self.key_header, self.deleted_field)
        return EnvelopeDecoder(key_fields, self.mismatch)


@dataclass(frozen=True, slots=True)
class DeadLetterSettings:
    """Where records go that cannot be decoded: a stream, a folder, or beside the archive."""

    basin: str | None = None
    stream: str | None = None
    #: URL of a folder.
    folder: str | None = None


@dataclass(frozen=True, slots=True)
class TableSettings:
    """One table: from where, how, and to where."""

    source: SourceSettings
    destinations: tuple[DestinationSettings, ...]
    key_fields: tuple[str, ...] = ("id",)
    key_prefix: str = ""
    interval: timedelta = DEFAULT_INTERVAL
    thresholds: Thresholds = DEFAULT_THRESHOLDS
    formats: FormatSettings = field(default_factory=FormatSettings)
    events: tuple[EventSettings, ...] = ()
    retention: Retention = field(default_factory=Retention)
    decoder: DecoderSettings = field(default_factory=DecoderSettings)
    #: None: learned from the first records.
    schema: TableSchema | None = None
    dead_letters: DeadLetterSettings = field(default_factory=DeadLetterSettings)
    transactions: TransactionLimits = field(default_factory=TransactionLimits)
    #: None: chosen from the size of the table.
    buckets: int | None = None

    @property
    def name(self) -> str:
        """What manifest, events and status call the table: with its schema, where one is given."""
        return self.source.qualified


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Where health, status and metrics are served."""

    port: int = DEFAULT_PORT
    host: str = "0.0.0.0"  # noqa: S104 - what containers run must be reachable


@dataclass(frozen=True, slots=True)
class Configuration:
    """Everything that can be set."""

    tables: tuple[TableSettings, ...]
    http: HttpSettings = field(default_factory=HttpSettings)
    #: AWS credentials by the name that destinations and events use.
    credentials: Mapping[str, Profile] = field(default_factory=dict)
