"""The options of `format("streamfold")`: read, checked and named here alone.

Names follow Spark's Kafka source for what both have. An unknown name is refused, since a misspelt one
would silently do nothing.
"""

from __future__ import annotations

import json
import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final, TypeAlias

from streamfold.spark.errors import OptionError
from streamfold.spark.stream.client import Endpoint
from streamfold.spark.stream.stored import StoredBasin
from streamfold.wording import reason_of

#: Where a query starts or ends in each stream: a word for all, or a number for each.
Positions: TypeAlias = str | Mapping[str, int]

EARLIEST, LATEST = "earliest", "latest"
#: Numbers in JSON for these words, as with Kafka.
EARLIEST_NUMBER, LATEST_NUMBER = -2, -1

#: Default for the most records that one task reads: seconds of work, repeated if it fails.
PARTITION_RECORDS: Final = 1_000_000
#: Records that are worth their own task, which costs about as much as reading 100,000, and the default
#: for the most such tasks: enough for one machine.
TASK_RECORDS: Final = 250_000
TASKS: Final = 8
#: Seconds for which a failed request is retried.
RETRY_TIMEOUT: Final = 60.0
#: Most bytes of rows in one exactly-once batch: they pass through the driver.
SINK_BYTES: Final = 256 << 20

COLUMNS: Final = ("stream", "seq_num", "timestamp", "headers", "body")

_SHARED = (
    "endpoint", "basin", "caFile", "accessToken", "encryptionKey", "retryTimeout", "stream",
)  # fmt: skip
_SOURCE = (
    "store",
    "streams", "streamsPattern", "startingOffsets", "startingTimestamp", "endingOffsets",
    "failOnDataLoss", "maxRecordsPerTrigger", "maxBytesPerTrigger", "minPartitions",
    "maxRecordsPerPartition", "includeHeaders", "columns", "bootstrap",
)  # fmt: skip
#: Options of a server, which storage does not have.
_SERVER = ("endpoint", "caFile", "accessToken")
_SINK = ("orderBy", "txnId", "txnVersion", "maxBatchBytes")
#: Options that Spark adds.
_OF_SPARK = ("path", "checkpointLocation", "queryName")


@dataclass(frozen=True, slots=True)
class Selection:
    """Which streams: these, or all whose whole name matches."""

    streams: tuple[str, ...] = ()
    pattern: str | None = None


@dataclass(frozen=True, slots=True)
class SourceOptions:
    #: Where the streams are read: from a server, or from the storage of a store.
    origin: Endpoint | StoredBasin
    selection: Selection
    starting: Positions | None
    #: Milliseconds since the Unix epoch; instead of `starting`.
    starting_timestamp: int | None
    ending: Positions
    fail_on_data_loss: bool
    max_records_per_trigger: int | None
    max_bytes_per_trigger: int | None
    #: None: as many as suit the number of records.
    min_partitions: int | None
    max_records_per_partition: int
    columns: tuple[str, ...]
    bootstrap: bool

    @property
    def endpoint(self) -> Endpoint:
        """The server; raises if streams are read from storage."""
        if isinstance(self.origin, StoredBasin):
            raise OptionError("store", "cannot be given here: give endpoint")
        return self.origin


@dataclass(frozen=True, slots=True)
class SinkOptions:
    endpoint: Endpoint
    #: None: the rows' column `stream` names it.
    stream: str | None
    order_by: str | None
    #: Identifies a batch write, so that it happens once; a streaming query has its own id.
    txn_id: str | None
    txn_version: int
    max_batch_bytes: int


class _Options:
    """Options by name, ignoring case, and the rules that they must keep."""

    def __init__(self, given: Mapping[str, str], known: tuple[str, ...]) -> None:
        self._given = {name.lower(): value for name, value in given.items()}
        names = {name.lower() for name in (*known, *_OF_SPARK)}
        for name in self._given:
            if name not in names:
                raise OptionError(name, f"is not known; the options are {', '.join(sorted(known))}")

    def text(self, name: str, *variables: str) -> str | None:
        found = self._given.get(name.lower()) or next(
            (os.environ[variable] for variable in variables if os.environ.get(variable)), None
        )
        return found or None

    def required(self, name: str, *variables: str) -> str:
        found = self.text(name, *variables)
        if found is None:
            others = "".join(f", or set the variable {variable}" for variable in variables)
            raise OptionError(name, f"is missing: give it{others}")
        return found

    def flag(self, name: str, default: bool) -> bool:
        found = (self.text(name) or str(default)).lower()
        if found not in ("true", "false"):
            raise OptionError(name, f"is {found!r}, it must be true or false")
        return found == "true"

    def number(self, name: str, least: int = 1) -> int | None:
        found = self.text(name)
        if found is None:
            return None
        if not re.fullmatch(r"\d{1,18}", found) or int(found) < least:
            raise OptionError(name, f"is {found!r}, it must be a whole number of at least {least}")
        return int(found)

    def seconds(self, name: str, default: float) -> float:
        found = self.text(name)
        if found is not None and not re.fullmatch(r"\d{1,6}(\.\d{1,3})?", found):
            raise OptionError(name, f"is {found!r}, it must be a number of seconds")
        return default if found is None else float(found)

    def endpoint(self) -> Endpoint:
        return Endpoint(
            self.required("endpoint", "S2_BASIN_ENDPOINT"),
            self.required("basin"),
            self.text("accessToken", "S2_ACCESS_TOKEN") or "",
            self.text("encryptionKey", "S2_ENCRYPTION_KEY") or "",
            self.seconds("retryTimeout", RETRY_TIMEOUT),
            self.certificates("caFile"),
        )

    def certificates(self, name: str) -> str:
        """Read the file that the option names: tasks may run where it does not exist."""
        path = self.text(name)
        if path is None:
            return ""
        try:
            found = Path(path).read_text("ascii")
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=found)
        except (OSError, ValueError) as error:
            rule = "must be a file of certificates (PEM) that the driver can read"
            raise OptionError(name, f"is {path!r}, it {rule}: {reason_of(error)}") from None
        return found


def parse_source(given: Mapping[str, str]) -> SourceOptions:
    """Parse the options of a read, including the environment, on the driver for all tasks."""
    options = _Options(given, _SHARED + _SOURCE)
    starting, since = options.text("startingOffsets"), options.text("startingTimestamp")
    if starting is not None and since is not None:
        raise OptionError(
            "startingTimestamp", "cannot be combined with startingOffsets: give one of them"
        )
    return SourceOptions(
        origin=_origin(options),
        selection=_selection(options),
        starting=None if starting is None else _positions("startingOffsets", starting),
        starting_timestamp=None if since is None else _milliseconds(since),
        ending=_ending(options),
        fail_on_data_loss=options.flag("failOnDataLoss", True),
        max_records_per_trigger=options.number("maxRecordsPerTrigger"),
        max_bytes_per_trigger=options.number("maxBytesPerTrigger"),
        min_partitions=options.number("minPartitions"),
        max_records_per_partition=options.number("maxRecordsPerPartition") or PARTITION_RECORDS,
        columns=_columns(options),
        bootstrap=options.flag("bootstrap", False),
    )


def parse_streaming(given: Mapping[str, str]) -> SourceOptions:
    """Parse the options of a streaming read, which has no end."""
    options = parse_source(given)
    if _Options(given, _SHARED + _SOURCE).text("endingOffsets") is not None:
        raise OptionError(
            "endingOffsets", "is for batches, and a streaming query would ignore it: leave it out"
        )
    return options


def parse_sink(given: Mapping[str, str]) -> SinkOptions:
    options = _Options(given, _SHARED + _SINK)
    return SinkOptions(
        endpoint=options.endpoint(),
        stream=options.text("stream"),
        order_by=options.text("orderBy"),
        txn_id=options.text("txnId"),
        txn_version=options.number("txnVersion", 0) or 0,
        max_batch_bytes=options.number("maxBatchBytes") or SINK_BYTES,
    )


def _origin(options: _Options) -> Endpoint | StoredBasin:
    url = options.text("store")
    if url is None:
        return options.endpoint()
    if given := [name for name in _SERVER if options.text(name) is not None]:
        raise OptionError(
            given[0], "is for servers, and cannot be combined with store: give one of them"
        )
    if not url.startswith(("file:///", "s3://")):
        raise OptionError("store", f"is {url!r}, it must be file:///folder or s3://bucket/prefix")
    key = options.text("encryptionKey", "S2_ENCRYPTION_KEY") or ""
    return StoredBasin(url, options.required("basin"), key)


def _selection(options: _Options) -> Selection:
    names = ("stream", "streams", "streamsPattern")
    given = [name for name in names if options.text(name) is not None]
    if len(given) != 1:
        raise OptionError(
            "stream", f"or streams or streamsPattern: give one, not {given or 'none'}"
        )
    value = options.required(given[0])
    if given[0] == "streamsPattern":
        try:
            re.compile(value)
        except re.error as error:
            raise OptionError("streamsPattern", f"is not a regular expression: {error}") from None
        return Selection(pattern=value)
    if given[0] == "stream":
        return Selection((value,))
    streams = tuple(dict.fromkeys(name.strip() for name in value.split(",") if name.strip()))
    if not streams:
        raise OptionError("streams", "is empty: give names, separated by commas")
    return Selection(streams)


def _ending(options: _Options) -> Positions:
    found = _positions("endingOffsets", options.text("endingOffsets") or LATEST)
    if found == EARLIEST or (not isinstance(found, str) and EARLIEST_NUMBER in found.values()):
        raise OptionError(
            "endingOffsets", "cannot be earliest, where nothing would be read: give latest or JSON"
        )
    return found


def _positions(name: str, text: str) -> Positions:
    if text in (EARLIEST, LATEST):
        return text
    rule = f'must be {EARLIEST}, {LATEST} or JSON such as {{"stream": 42}}'
    try:
        found = json.loads(text)
    except ValueError:
        raise OptionError(name, f"is {text[:80]!r}, it {rule}") from None
    if not isinstance(found, dict) or not all(
        type(number) is int and number >= EARLIEST_NUMBER for number in found.values()
    ):
        raise OptionError(name, f"is {text[:80]!r}, it {rule}")
    return found


def _milliseconds(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 18:
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise OptionError(
            "startingTimestamp",
            f"is {text[:40]!r}, it must be milliseconds since 1970 or a time with a zone such as "
            "2026-01-31T12:00:00Z",
        )
    return max(0, int(moment.timestamp() * 1000))


def _columns(options: _Options) -> tuple[str, ...]:
    text = options.text("columns")
    chosen = COLUMNS if text is None else tuple(name.strip() for name in text.split(","))
    if not set(chosen) <= set(COLUMNS) or len(set(chosen)) != len(chosen):
        raise OptionError("columns", f"is {text!r}, it must name some of {', '.join(COLUMNS)}")
    if options.flag("includeHeaders", True):
        return chosen
    if chosen == ("headers",):
        raise OptionError("includeHeaders", "is false, and columns has headers alone: give others")
    return tuple(name for name in chosen if name != "headers")
