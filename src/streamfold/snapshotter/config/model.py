"""The snapshotter's configuration, whatever it was read from; it shows no secrets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec

from streamfold.archive.destinations.aws_credentials import Profile
from streamfold.archive.maintenance.garbage_collection import Retention
from streamfold.archive.schema import TableSchema
from streamfold.archive.write.layout import STREAMFOLD
from streamfold.archive.write.thresholds import Thresholds
from streamfold.model.units import duration_text, size_text
from streamfold.snapshotter.decoding import DECODERS, ChangeDecoder, DecoderOptions, EnvelopeDecoder
from streamfold.snapshotter.decoding.envelope import EnvelopeOptions
from streamfold.snapshotter.transactions import TransactionLimits

#: The server's default basin.
DEFAULT_BASIN = "durable-streams"
DEFAULT_INTERVAL = timedelta(seconds=30)
#: Different from the port of `streamfold serve`, which often runs on the same machine.
DEFAULT_PORT = 8081
#: Default limits of a table, whose chain would grow without bound otherwise.
DEFAULT_THRESHOLDS = Thresholds(
    min_interval=timedelta(minutes=5),
    max_interval=timedelta(hours=6),
    max_diff_bytes=32 << 20,
    max_diff_fraction=0.25,
    max_churn_records=100_000,
    max_churn_fraction=0.5,
)
#: Values of `source.on_trimmed`.
REFUSE, PUBLISH = "refuse", "publish"
#: Names in files that are shorter in the model.
_WRITTEN = {"interval": "diff.interval", "thresholds": "snapshot", "namespace": "schema"}
#: Shared secrets, never shown.
_HIDDEN = ("external_id",)


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """The stream of a table's changes."""

    #: Origin of the server: http://host:port.
    server: str
    basin: str
    stream: str
    table: str
    #: The table's schema in its database.
    namespace: str | None = None
    client_id: str | None = None
    #: Where a new archive starts: earliest, latest, or a sequence number.
    start: str = "earliest"
    #: What a new archive does if the stream has lost its first records: refuse or publish.
    on_trimmed: str = REFUSE
    #: The variable or file that holds the access token.
    token_env: str = "S2_ACCESS_TOKEN"  # noqa: S105 - the name of a variable
    token_file: Path | None = None

    @property
    def qualified(self) -> str:
        """The table's name with its schema, as in `public.orders`."""
        if self.namespace is None or self.table.startswith(f"{self.namespace}."):
            return self.table
        return f"{self.namespace}.{self.table}"


@dataclass(frozen=True, slots=True)
class DestinationSettings:
    """A folder for archives, without the table's own folder; `url` as for `streamfold.blob`."""

    type: str
    url: str
    #: Options of `open_blob_store`.
    options: Mapping[str, str] = field(default_factory=dict)
    #: The profile to use, on AWS.
    credentials: str | None = None

    def folder(self, key_prefix: str) -> str:
        """The URL of a table's own folder."""
        return f"{self.url.rstrip('/')}/{key_prefix.strip('/')}".rstrip("/")


@dataclass(frozen=True, slots=True)
class FormatSettings:
    """Artifact formats as (id, compression); limits apply to the first."""

    snapshot: tuple[tuple[str, str], ...] = (("jsonl", "none"),)
    diff: tuple[tuple[str, str], ...] = (("jsonl", "none"),)


@dataclass(frozen=True, slots=True)
class EventSettings:
    """An event sink; `raw` is what `streamfold.archive.events.open_sink` takes."""

    type: str
    #: Hidden from logs, since webhook URLs may hold secrets.
    raw: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class DecoderSettings:
    """How records encode changes."""

    kind: str = EnvelopeDecoder.kind
    options: DecoderOptions = field(default_factory=EnvelopeOptions)

    def decoder(self, key_fields: tuple[str, ...]) -> ChangeDecoder:
        """Make the decoder for a table with this key."""
        return DECODERS.get(self.kind).open(key_fields, self.options)


@dataclass(frozen=True, slots=True)
class DeadLetterSettings:
    """Where undecodable records go: a stream, a folder, or beside the archive."""

    basin: str | None = None
    stream: str | None = None
    #: URL of a folder.
    folder: str | None = None
    #: Records that go there in any case.
    records: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TableSettings:
    """One table: its source, decoding and destinations."""

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
    layout: str = STREAMFOLD.name
    #: Whether to maintain a Delta Lake log over the files of bases; None for no.
    delta: bool | None = None

    @property
    def name(self) -> str:
        """The table's name in manifest, events and status, with its schema if there is one."""
        return self.source.qualified


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """The address that serves health, status and metrics."""

    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = DEFAULT_PORT
    host: str = "0.0.0.0"  # noqa: S104 - reachable in a container


@dataclass(frozen=True, slots=True)
class SnapshotterConfiguration:
    """The whole configuration."""

    tables: tuple[TableSettings, ...]
    http: HttpSettings = field(default_factory=HttpSettings)
    #: AWS credentials by the name that destinations and events use.
    credentials: Mapping[str, Profile] = field(default_factory=dict)


def describe(configuration: SnapshotterConfiguration) -> str:
    """Return a line `path = value` for every setting in effect, in the order of the model."""
    return "\n".join(f"{path} = {value}" for path, value in _lines("", configuration))


def _lines(path: str, value: object) -> Iterator[tuple[str, str]]:
    if value is None or value in ((), {}):
        return
    if isinstance(value, TableSchema):
        for column in value.arrow:
            yield f"{path}.{column.name}", f"{column.type}{'' if column.nullable else ' not null'}"
    elif isinstance(value, msgspec.Struct):
        yield from _named(path, {n: getattr(value, n) for n in value.__struct_fields__})
    elif is_dataclass(value):
        yield from _named(path, {f.name: getattr(value, f.name) for f in fields(value)})
    elif isinstance(value, Mapping):
        yield from _named(path, value)
    elif isinstance(value, tuple) and not _is_plain(value):
        for number, item in enumerate(value):
            yield from _lines(f"{path}[{number}]", item)
    else:
        yield path, _text(path.rpartition(".")[2], value)


def _named(path: str, values: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if name == "raw" and isinstance(value, Mapping):  # options of a sink are beside its type
            yield from _named(path, {k: v for k, v in value.items() if k != "type"})
        elif name == "options":
            yield from _lines(path, value)
        else:
            written = _WRITTEN.get(name, name)
            yield from _lines(f"{path}.{written}" if path else written, value)


def _is_plain(value: tuple[object, ...]) -> bool:
    return all(isinstance(item, str | tuple) for item in value)


def _text(name: str, value: object) -> str:
    if name in _HIDDEN:
        return "(set)"
    if isinstance(value, timedelta):
        return duration_text(value)
    if isinstance(value, tuple):
        return ", ".join(_format_text(item) for item in value)
    if name.endswith("_bytes") and isinstance(value, int):
        return size_text(value)
    if isinstance(value, str) and "://" in value:
        return _bare_url(value)
    return str(value)


def _format_text(item: object) -> str:
    if isinstance(item, tuple):
        form, compression = item
        return str(form) if compression == "none" else f"{form} ({compression})"
    return str(item)


def _bare_url(url: str) -> str:
    """Return the URL without user and query, which may hold secrets."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    query = "?…" if parts.query else ""
    return f"{parts.scheme}://{host}{parts.path}{query}"
