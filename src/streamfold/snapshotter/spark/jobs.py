"""Makes the job of each table from a configuration and its secrets, on the driver."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from uuid import uuid4

import msgspec

from streamfold.archive.events import SINKS
from streamfold.archive.formats.format import format_of
from streamfold.archive.write.layout import LAYOUTS
from streamfold.errors import InvalidError
from streamfold.extras import check_installed
from streamfold.snapshotter.config.model import (
    PUBLISH,
    EventSettings,
    SnapshotterConfiguration,
    SourceSettings,
    TableSettings,
)
from streamfold.snapshotter.decoding.decoder import ChangeDecoder
from streamfold.snapshotter.decoding.envelope import EnvelopeDecoder
from streamfold.snapshotter.spark.destinations import (
    DeadLetterFolder,
    DeadLetters,
    DeadLetterStream,
    DestinationSpec,
)
from streamfold.snapshotter.spark.table_job import TableJob
from streamfold.spark.stream.options import parse_source

#: Hexadecimal digits that distinguish two sinks of one type, and two runs with the same pid, as in
#: containers.
_SINK_DIGITS, _RUN_DIGITS = 8, 6
#: Seconds for which tasks retry a silent server; then the table reports it and retries.
_RETRY_SECONDS = "5"


def table_jobs(
    configuration: SnapshotterConfiguration, environment: Mapping[str, str]
) -> list[TableJob]:
    """Make one job per table."""
    run = f"{socket.gethostname()}/{os.getpid()}-{uuid4().hex[:_RUN_DIGITS]}"
    return [_job(table, configuration, environment, run) for table in configuration.tables]


def _job(
    table: TableSettings,
    configuration: SnapshotterConfiguration,
    environment: Mapping[str, str],
    run: str,
) -> TableJob:
    if table.delta:
        check_installed("deltalake", "delta")
    source, profiles = _source(table.source, environment), configuration.credentials
    specs = tuple(
        DestinationSpec(
            settings.folder(table.key_prefix),
            settings.options,
            profiles[settings.credentials] if settings.credentials else None,
        )
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
        credentials=profiles,
        retention=table.retention,
        transactions=table.transactions,
        layout=LAYOUTS[table.layout],
        delta=bool(table.delta),
        skipped=table.dead_letters.records,
    )


def _decoder(table: TableSettings) -> ChangeDecoder:
    """Make the decoder; in a stream of several tables it reads the one that the source names."""
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


def _dead_letters(
    table: TableSettings, source: Mapping[str, str], specs: Sequence[DestinationSpec]
) -> DeadLetters:
    settings = table.dead_letters
    if settings.stream is not None:
        options = {**source, "basin": settings.basin or source["basin"], "stream": settings.stream}
        endpoint = parse_source(options).endpoint
        return DeadLetterStream(endpoint, settings.stream, table.name, table.source.stream)
    if settings.folder is not None:
        url = f"{settings.folder.rstrip('/')}/{table.key_prefix.strip('/')}".rstrip("/")
        return DeadLetterFolder(DestinationSpec(url), table.name, table.source.stream, prefix="")
    return DeadLetterFolder(specs[0], table.name, table.source.stream)


def _sink_name(sink: EventSettings) -> str:
    """Return a stable name for the sink, under which its cursor is stored."""
    identifying = {"type", *SINKS.get(sink.type).target}
    target = {name: value for name, value in sink.raw.items() if name in identifying}
    digest = hashlib.sha256(msgspec.json.encode(target, order="sorted")).hexdigest()
    return f"{sink.type}-{digest[:_SINK_DIGITS]}"
