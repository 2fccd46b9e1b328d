"""Everything that one table's writer is told: plain values, most of which travel to tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from streamfold.archive.destinations.aws_credentials import Profile
from streamfold.archive.formats.format import Format
from streamfold.archive.maintenance.garbage_collection import Retention
from streamfold.archive.schema.table_schema import TableSchema
from streamfold.archive.write.thresholds import Thresholds
from streamfold.snapshotter.decoding.decoder import ChangeDecoder
from streamfold.snapshotter.pipeline.transactions import TransactionLimits
from streamfold.snapshotter.spark.dead_letters import DeadLetterFolder, DeadLetters
from streamfold.snapshotter.spark.destinations import Place
from streamfold.spark.buckets import BUCKET_BYTES

#: Records of one diff at most: some hundred megabytes of changes, and seconds of work.
MAX_RECORDS = 2_000_000


@dataclass(frozen=True, slots=True)
class TableJob:
    """One table: where its changes come from, how they are read, and where it is published."""

    table: str
    stream: str
    #: Options of `format("streamfold")`: endpoint, basin, secrets.
    source: Mapping[str, str] = field(repr=False)
    decoder: ChangeDecoder
    places: tuple[Place, ...]
    formats: tuple[Format, ...]
    diff_formats: tuple[Format, ...]
    dead_letters: DeadLetters
    writer_id: str
    #: What earlier versions called the table in its manifest.
    former_names: tuple[str, ...] = ()
    #: Declared, or None to have it learned from the first records.
    schema: TableSchema | None = None
    #: Where a table without an archive begins: earliest, latest, or a seq_num.
    start: str = "earliest"
    interval: timedelta = timedelta(seconds=30)
    thresholds: Thresholds = field(default_factory=Thresholds)
    #: Buckets of the first base at least; None to choose by size.
    buckets: int | None = None
    #: Bytes of a base from which on it has another bucket.
    bucket_bytes: int = BUCKET_BYTES
    max_records: int = MAX_RECORDS
    #: How long the end of a transaction is waited for.
    transactions: TransactionLimits = field(default_factory=TransactionLimits)
    #: Sinks of events by name, as `open_sink` takes them, and the credentials that they name.
    events: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    credentials: Mapping[str, Profile] = field(default_factory=dict)
    retention: Retention | None = None

    @property
    def destinations(self) -> list[str]:
        """URIs that failures are counted by: of the archive, and of dead letters in a folder."""
        letters = self.dead_letters
        places = [*self.places, *([letters.place] if isinstance(letters, DeadLetterFolder) else [])]
        return list(dict.fromkeys(place.uri for place in places))
