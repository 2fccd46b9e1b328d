"""Makes the job of each table from a configuration; reads secrets, on the driver."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import msgspec

from streamfold.archive.buckets import BUCKET_BYTES
from streamfold.archive.destinations.aws_credentials import Profile
from streamfold.archive.events import SINKS
from streamfold.archive.formats.format import Format, format_of
from streamfold.archive.maintenance.garbage_collection import Retention
from streamfold.archive.schema import TableSchema
from streamfold.archive.write.layout import LAYOUTS, STREAMFOLD, Layout
from streamfold.archive.write.thresholds import Thresholds
from streamfold.errors import InvalidError
from streamfold.extras import check_installed
from streamfold.snapshotter.config import (
    Configuration,
    DestinationSettings,
    EventSettings,
    SourceSettings,
    TableSettings,
)
from streamfold.snapshotter.config.model import PUBLISH
from streamfold.snapshotter.decoding.decoder import ChangeDecoder
from streamfold.snapshotter.decoding.envelope import EnvelopeDecoder
from streamfold.snapshotter.spark.destinations import (
    DeadLetterFolder,
    DeadLetters,
    DeadLetterStream,
    DestinationSpec,
)
from streamfold.snapshotter.transactions import TransactionLimits
from streamfold.spark.stream.client import Endpoint
from streamfold.spark.stream.options import parse_source

#: The most records in one diff: some hundred megabytes of changes, and seconds of work.
MAX_RECORDS = 2_000_000


@dataclass(frozen=True, slots=True)
class TableJob:
    """One table: where its changes come from, how to read them, and where to publish it."""

    table: str
    stream: str
    #: Options of `format("streamfold")`: endpoint, basin, secrets.
    source: Mapping[str, str] = field(repr=False)
    decoder: ChangeDecoder
    destination_specs: tuple[DestinationSpec, ...]
    formats: tuple[Format, ...]
    diff_formats: tuple[Format, ...]
    dead_letters: DeadLetters
    writer_id: str
    #: The table's name in manifests of earlier versions.
    former_names: tuple[str, ...] = ()
    #: Declared, or None to learn it from the first records.
    schema: TableSchema | None = None
    #: Where a table without an archive starts: earliest, latest, or a seq_num.
    start: str = "earliest"
    #: Whether such a table is published although its stream has lost its beginning.
    publish_trimmed: bool = False
    interval: timedelta = timedelta(seconds=30)
    thresholds: Thresholds = field(default_factory=Thresholds)
    #: The least buckets of the first base; None to choose by size.
    buckets: int | None = None
    #: Target bytes of a base per bucket.
    bucket_bytes: int = BUCKET_BYTES
    max_records: int = MAX_RECORDS
    #: How long to wait for the end of a transaction.
    transactions: TransactionLimits = field(default_factory=TransactionLimits)
    #: Event sinks by name, as for `open_sink`, and the credentials that they name.
    events: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    credentials: Mapping[str, Profile] = field(default_factory=dict)
    retention: Retention | None = None
    layout: Layout = STREAMFOLD
    #: Records that become dead letters, whatever they hold.
    skipped: tuple[int, ...] = ()
    #: Whether every destination gets a Delta Lake log over the files of its bases.
    delta: bool = False

    @property
    def destinations(self) -> list[str]:
        """Return the URIs that failures are counted by: of the archive and of dead letters."""
        letters = self.dead_letters
        specs = [
            *self.destination_specs,
            *([letters.destination] if isinstance(letters, DeadLetterFolder) else []),
        ]
        return list(dict.fromkeys(spec.uri for spec in specs))


#: Hexadecimal digits that distinguish two sinks of one type.
_SINK_DIGITS = 8
#: Hexadecimal digits that distinguish two runs with the same pid, as in containers.
_RUN_DIGITS = 6
#: Seconds for which tasks retry a silent server; then the table reports it and retries.
_RETRY_SECONDS = "5"


def table_jobs(configuration: Configuration, environment: Mapping[str, str]) -> list[TableJob]:
    """Make one job per table."""
    run = _run_name()
    return [_job(table, configuration, environment, run) for table in configuration.tables]


def _run_name() -> str:
    """Return a name for this run, unique on this machine even if a later run has the same pid."""
    return f"{socket.gethostname()}/{os.getpid()}-{uuid4().hex[:_RUN_DIGITS]}"


def _job(
    table: TableSettings, configuration: Configuration, environment: Mapping[str, str], run: str
) -> TableJob:
    if table.delta:
        check_installed("deltalake", "delta")
    source = _source(table.source, environment)
    specs = tuple(
        _destination_spec(settings, table.key_prefix, configuration.credentials)
        for settings in table.destinations
    )
    return TableJob(
        table=table.name,
        stream=table.source.stream,
        source=source,
        decoder=_decoder(table),
        destination_specs=specs,
        formats=tuple(format_of(*chosen) for chosen in table.formats.snapshot),
        diff_formats=tuple(format_of(*chosen) for chosen in table.formats.diff),
        dead_letters=_dead_letters(table, source, specs),
        writer_id=f"{table.source.client_id}@{run}" if table.source.client_id else run,
        former_names=(table.source.table,),
        schema=table.schema,
        start=table.source.start,
        publish_trimmed=table.source.on_trimmed == PUBLISH,
        interval=table.interval,
        thresholds=table.thresholds,
        buckets=table.buckets,
        events={_sink_name(sink): dict(sink.raw) for sink in table.events},
        credentials=configuration.credentials,
        retention=table.retention,
        transactions=table.transactions,
        layout=LAYOUTS[table.layout],
        delta=bool(table.delta),
        skipped=table.dead_letters.records,
    )


def _decoder(table: TableSettings) -> ChangeDecoder:
    """Make the decoder; of a stream with several tables it takes the one that the source names."""
    decoder = table.decoder.decoder(table.key_fields)
    if isinstance(decoder, EnvelopeDecoder) and decoder.table is None:
        name = table.source.qualified
        return replace(decoder, table=name if "." in name else f"public.{name}")
    return decoder


def _source(source: SourceSettings, environment: Mapping[str, str]) -> dict[str, str]:
    options = {"endpoint": source.server, "basin": source.basin, "retryTimeout": _RETRY_SECONDS}
    token = environment.get(source.token_env, "")
    if source.token_file is not None:
        try:
            token = source.token_file.read_text(encoding="utf-8")
        except OSError as error:
            raise InvalidError(
                f"source.token_file {source.token_file} cannot be read ({error.strerror}): give a "
                "file with the access token"
            ) from None
    return options | ({"accessToken": token.strip()} if token.strip() else {})


def _destination_spec(
    settings: DestinationSettings, key_prefix: str, profiles: Mapping[str, Profile]
) -> DestinationSpec:
    return DestinationSpec(
        settings.folder(key_prefix),
        settings.options,
        profiles[settings.credentials] if settings.credentials else None,
    )


def _dead_letters(
    table: TableSettings, source: Mapping[str, str], specs: Sequence[DestinationSpec]
) -> DeadLetters:
    settings = table.dead_letters
    if settings.stream is not None:
        given = {**source, "basin": settings.basin or source["basin"], "stream": settings.stream}
        endpoint: Endpoint = parse_source(given).endpoint
        return DeadLetterStream(endpoint, settings.stream, table.name, table.source.stream)
    if settings.folder is not None:
        spec = DestinationSpec(
            f"{settings.folder.rstrip('/')}/{table.key_prefix.strip('/')}".rstrip("/")
        )
        return DeadLetterFolder(spec, table.name, table.source.stream, prefix="")
    return DeadLetterFolder(specs[0], table.name, table.source.stream)


def _sink_name(sink: EventSettings) -> str:
    """Return a stable name for the sink: its cursor in storage is stored under it."""
    identifying = {"type", *SINKS.get(sink.type).target}
    target = {name: value for name, value in sink.raw.items() if name in identifying}
    digest = hashlib.sha256(msgspec.json.encode(target, order="sorted")).hexdigest()
    return f"{sink.type}-{digest[:_SINK_DIGITS]}"
