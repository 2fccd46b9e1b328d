"""The job of one table, made on the driver from a configuration and copied to tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from streamfold.archive.buckets import BUCKET_BYTES
from streamfold.archive.destinations.aws_credentials import Profile
from streamfold.archive.formats.format import Format
from streamfold.archive.maintenance.garbage_collection import Retention
from streamfold.archive.schema import TableSchema
from streamfold.archive.write.layout import STREAMFOLD, Layout
from streamfold.archive.write.thresholds import Thresholds
from streamfold.snapshotter.decoding.decoder import ChangeDecoder
from streamfold.snapshotter.spark.destinations import (
    DeadLetterFolder,
    DeadLetters,
    DestinationSpec,
)
from streamfold.snapshotter.transactions import TransactionLimits
from streamfold.spark.stream.client import Endpoint
from streamfold.spark.stream.options import parse_source

#: The most records in one diff: some hundred megabytes of changes, and seconds of work.
MAX_RECORDS = 2_000_000


@dataclass(frozen=True, slots=True)
class TableJob:
    """One table: its source, its decoder and its destinations."""

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
    #: None to learn it from the first records.
    schema: TableSchema | None = None
    #: Where a table without an archive starts: earliest, latest, or a seq_num.
    start: str = "earliest"
    #: Whether to publish such a table although its stream has lost its first records.
    publish_trimmed: bool = False
    interval: timedelta = timedelta(seconds=30)
    thresholds: Thresholds = field(default_factory=Thresholds)
    #: Minimum buckets of the first base; None to choose by size.
    buckets: int | None = None
    #: Target bytes of a base per bucket.
    bucket_bytes: int = BUCKET_BYTES
    max_records: int = MAX_RECORDS
    transactions: TransactionLimits = field(default_factory=TransactionLimits)
    #: Event sinks by name, as for `open_sink`, and credentials by name.
    events: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    credentials: Mapping[str, Profile] = field(default_factory=dict)
    retention: Retention | None = None
    layout: Layout = STREAMFOLD
    #: Records that become dead letters in any case.
    skipped: tuple[int, ...] = ()
    #: Whether to write a Delta Lake log over the files of bases.
    delta: bool = False
    #: Where the stream is, from `source`.
    endpoint: Endpoint = field(init=False)

    def __post_init__(self) -> None:
        options = {**self.source, "stream": self.stream}
        object.__setattr__(self, "endpoint", parse_source(options).endpoint)

    @property
    def destinations(self) -> list[str]:
        """The URIs by which failures are counted: of the archive and of dead letters."""
        specs, letters = list(self.destination_specs), self.dead_letters
        if isinstance(letters, DeadLetterFolder):
            specs.append(letters.destination)
        return list(dict.fromkeys(spec.uri for spec in specs))

    def for_tasks(self) -> TableJob:
        """Return the job without secrets that only the driver needs."""
        return replace(self, events={}, credentials={})
