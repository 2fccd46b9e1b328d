"""Names, reads and checks the options of `format("streamfold")`.

Options that Spark's Kafka source also has keep its names, and Kafka's words for streams and records
are accepted as aliases. Unknown names are rejected, because a misspelt option would silently do
nothing.
"""

from __future__ import annotations

import json
import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, TypeAlias

from streamfold.model.units import parse_duration
from streamfold.spark.errors import OptionError
from streamfold.spark.stream.client import Endpoint
from streamfold.spark.stream.stored import StoredBasin
from streamfold.wording import reason_of

#: Where a query starts or ends: one word for all streams, or a number per stream.
Positions: TypeAlias = str | Mapping[str, int]

EARLIEST, LATEST = "earliest", "latest"
#: The numbers for these words in JSON, as in Kafka.
EARLIEST_NUMBER, LATEST_NUMBER = -2, -1

#: Default maximum records per task: seconds of work, repeated if the task fails.
PARTITION_RECORDS: Final = 1_000_000
#: Records that justify their own task, since a task costs about as much as reading 100,000, and the
#: default maximum of such tasks: enough for one machine.
TASK_RECORDS: Final = 250_000
TASKS: Final = 8
#: Default maximum wait for `minRecordsPerTrigger`, as in Kafka.
TRIGGER_DELAY: Final = timedelta(minutes=15)
#: Default seconds for which a failed request is retried.
RETRY_TIMEOUT: Final = 60.0
#: Default maximum bytes of rows per exactly-once batch, because they pass through the driver.
SINK_BYTES: Final = 256 << 20

_EPOCH, _MILLISECOND = datetime(1970, 1, 1, tzinfo=UTC), timedelta(milliseconds=1)

COLUMNS: Final = ("stream", "seq_num", "timestamp", "headers", "body")

_SHARED = (
    "endpoint", "basin", "caFile", "accessToken", "encryptionKey", "retryTimeout", "stream",
)  # fmt: skip
_SELECTIONS = ("stream", "streams", "streamsPattern")
_STARTS = ("startingTimestamp", "startingOffsetsByTimestamp", "startingOffsets")
_ENDS = ("endingTimestamp", "endingOffsetsByTimestamp", "endingOffsets")
_STRATEGY = "startingOffsetsByTimestampStrategy"
_SOURCE = (
    "store", *_SELECTIONS, *_STARTS, _STRATEGY, *_ENDS,
    "failOnDataLoss", "maxRecordsPerTrigger", "maxBytesPerTrigger", "minRecordsPerTrigger",
    "maxTriggerDelay", "minPartitions", "maxRecordsPerPartition", "includeHeaders", "columns",
    "bootstrap",
)  # fmt: skip
#: Kafka's names for equivalent options.
_KAFKA_SOURCE = {
    "subscribe": "streams",
    "subscribePattern": "streamsPattern",
    "maxOffsetsPerTrigger": "maxRecordsPerTrigger",
    "minOffsetsPerTrigger": "minRecordsPerTrigger",
}
_KAFKA_SINK = {"topic": "stream"}
#: Options that apply only to a server, not to storage.
_SERVER = ("endpoint", "caFile", "accessToken")
_SINK = ("orderBy", "txnId", "txnVersion", "maxBatchBytes")
#: Options that Spark adds.
_OF_SPARK = ("path", "checkpointLocation", "queryName")


@dataclass(frozen=True, slots=True)
class Selection:
    """The streams to read: those named, or all whose full name matches a pattern."""

    streams: tuple[str, ...] = ()
    pattern: str | None = None


@dataclass(frozen=True, slots=True)
class Timestamps:
    """Starts or ends a query at each stream's first record that is not older than a time."""

    #: Name of the option, for messages.
    option: str
    #: Milliseconds since the Unix epoch, for all streams or per stream.
    times: int | Mapping[str, int]

    def at(self, stream: str) -> int:
        if isinstance(self.times, int):
            return self.times
        if stream not in self.times:
            raise OptionError(self.option, f"does not name stream {stream!r}: name all streams")
        return self.times[stream]


@dataclass(frozen=True, slots=True)
class SourceOptions:
    #: A server, or the storage of a store.
    origin: Endpoint | StoredBasin
    selection: Selection
    starting: Positions | Timestamps | None
    #: Whether a stream without a record at or after `starting` is an error. If not, it starts at
    #: its tail.
    starting_record_needed: bool
    ending: Positions | Timestamps
    fail_on_data_loss: bool
    max_records_per_trigger: int | None
    max_bytes_per_trigger: int | None
    min_records_per_trigger: int | None
    #: Maximum wait for `min_records_per_trigger`.
    max_trigger_delay: timedelta
    #: None to choose by the number of records.
    min_partitions: int | None
    max_records_per_partition: int
    columns: tuple[str, ...]
    bootstrap: bool

    @property
    def endpoint(self) -> Endpoint:
        """The server. Raises OptionError if streams are read from storage."""
        if isinstance(self.origin, StoredBasin):
            raise OptionError("store", "cannot be given here: give endpoint")
        return self.origin


@dataclass(frozen=True, slots=True)
class SinkOptions:
    endpoint: Endpoint
    #: None if the column `stream` names each row's stream.
    stream: str | None
    order_by: str | None
    #: Identifies a batch write, so that it takes effect once. A streaming query has its own id.
    txn_id: str | None
    txn_version: int
    max_batch_bytes: int


class _Options:
    """Options by case-insensitive name, with their validation rules."""

    def __init__(
        self, raw: Mapping[str, str], options: tuple[str, ...], kafka: Mapping[str, str]
    ) -> None:
        self._raw = {name.lower(): value for name, value in raw.items()}
        names = {name.lower() for name in (*options, *kafka, *_OF_SPARK)}
        for name in self._raw:
            if name not in names:
                raise OptionError(
                    name, f"is not known; the options are {', '.join(sorted(options))}"
                )
        #: Kafka's names for options that were given by those names, for messages.
        self._aliases: dict[str, str] = {}
        for alias, name in kafka.items():
            if alias.lower() not in self._raw:
                continue
            if name.lower() in self._raw:
                raise OptionError(alias, f"is Kafka's name of {name}: give one of them")
            self._raw[name.lower()] = self._raw.pop(alias.lower())
            self._aliases[name] = alias

    def wrong(self, name: str, rule: str) -> OptionError:
        """Return an error that uses the option name the user gave."""
        return OptionError(self._aliases.get(name, name), rule)

    def one_of(self, names: tuple[str, ...]) -> str | None:
        """Return which of these options is given, or None. Raises OptionError for several."""
        present = [name for name in names if self.text(name) is not None]
        if len(present) > 1:
            other = self._aliases.get(present[1], present[1])
            raise self.wrong(present[0], f"cannot be combined with {other}: give one of them")
        return next(iter(present), None)

    def text(self, name: str, *variables: str) -> str | None:
        text = self._raw.get(name.lower()) or next(
            (os.environ[variable] for variable in variables if os.environ.get(variable)), None
        )
        return text or None

    def required(self, name: str, *variables: str) -> str:
        text = self.text(name, *variables)
        if text is None:
            others = "".join(f", or set the variable {variable}" for variable in variables)
            raise self.wrong(name, f"is missing: give it{others}")
        return text

    def flag(self, name: str, default: bool) -> bool:
        word = (self.text(name) or str(default)).lower()
        if word not in ("true", "false"):
            raise self.wrong(name, f"is {word!r}, it must be true or false")
        return word == "true"

    def number(self, name: str, least: int = 1) -> int | None:
        text = self.text(name)
        if text is None:
            return None
        if not re.fullmatch(r"\d{1,18}", text) or int(text) < least:
            raise self.wrong(name, f"is {text!r}, it must be a whole number of at least {least}")
        return int(text)

    def seconds(self, name: str, default: float) -> float:
        text = self.text(name)
        if text is not None and not re.fullmatch(r"\d{1,6}(\.\d{1,3})?", text):
            raise self.wrong(name, f"is {text!r}, it must be a number of seconds")
        return default if text is None else float(text)

    def duration(self, name: str, default: timedelta) -> timedelta:
        text = self.text(name)
        try:
            return default if text is None else parse_duration(text)
        except ValueError as error:
            raise self.wrong(name, f"is {text!r}, it {error}") from None

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
        """Return the contents of the named file, because tasks may run where it does not exist."""
        path = self.text(name)
        if path is None:
            return ""
        try:
            certificates = Path(path).read_text("ascii")
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=certificates)
        except (OSError, ValueError) as error:
            rule = "must be a file of certificates (PEM) that the driver can read"
            raise OptionError(name, f"is {path!r}, it {rule}: {reason_of(error)}") from None
        return certificates


def parse_source(raw: Mapping[str, str]) -> SourceOptions:
    """Parse the options of a read and the environment, on the driver for all tasks."""
    return _parse_source(_Options(raw, _SHARED + _SOURCE, _KAFKA_SOURCE))


def parse_streaming(raw: Mapping[str, str]) -> SourceOptions:
    """Parse the options of a streaming read, which has no end."""
    options = _Options(raw, _SHARED + _SOURCE, _KAFKA_SOURCE)
    if (ending := options.one_of(_ENDS)) is not None:
        raise OptionError(
            ending, "is for batches, and a streaming query would ignore it: leave it out"
        )
    return _parse_source(options)


def _parse_source(options: _Options) -> SourceOptions:
    least, most = options.number("minRecordsPerTrigger"), options.number("maxRecordsPerTrigger")
    if least is not None and most is not None and least > most:
        raise options.wrong(
            "minRecordsPerTrigger", f"is {least}, which is more than the {most} of a batch at most"
        )
    if least is None and options.text("maxTriggerDelay") is not None:
        raise OptionError(
            "maxTriggerDelay", "is the longest wait for minRecordsPerTrigger: give that, too"
        )
    starting, bootstrap = _starting(options), options.flag("bootstrap", False)
    if bootstrap and isinstance(starting, Timestamps):
        raise OptionError(
            "bootstrap",
            f"cannot be combined with {starting.option}, which starts at a record that exists: "
            "give one of them",
        )
    return SourceOptions(
        origin=_origin(options),
        selection=_selection(options),
        starting=starting,
        starting_record_needed=_strategy(options) == "error",
        ending=_ending(options),
        fail_on_data_loss=options.flag("failOnDataLoss", True),
        max_records_per_trigger=most,
        max_bytes_per_trigger=options.number("maxBytesPerTrigger"),
        min_records_per_trigger=least,
        max_trigger_delay=options.duration("maxTriggerDelay", TRIGGER_DELAY),
        min_partitions=options.number("minPartitions"),
        max_records_per_partition=options.number("maxRecordsPerPartition") or PARTITION_RECORDS,
        columns=_columns(options),
        bootstrap=bootstrap,
    )


def parse_sink(raw: Mapping[str, str]) -> SinkOptions:
    options = _Options(raw, _SHARED + _SINK, _KAFKA_SINK)
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
    if names := [name for name in _SERVER if options.text(name) is not None]:
        raise OptionError(
            names[0], "is for servers, and cannot be combined with store: give one of them"
        )
    if not url.startswith(("file:///", "s3://")):
        raise OptionError("store", f"is {url!r}, it must be file:///folder or s3://bucket/prefix")
    key = options.text("encryptionKey", "S2_ENCRYPTION_KEY") or ""
    return StoredBasin(url, options.required("basin"), key)


def _selection(options: _Options) -> Selection:
    name = options.one_of(_SELECTIONS)
    if name is None:
        raise OptionError("stream", "is missing: give it, or streams, or streamsPattern")
    value = options.required(name)
    if name == "stream":
        return Selection((value,))
    if name == "streamsPattern":
        try:
            re.compile(value)
        except re.error as error:
            raise options.wrong(name, f"is not a regular expression: {error}") from None
        return Selection(pattern=value)
    streams = tuple(dict.fromkeys(part.strip() for part in value.split(",") if part.strip()))
    if not streams:
        raise options.wrong(name, "is empty: give names, separated by commas")
    return Selection(streams)


def _starting(options: _Options) -> Positions | Timestamps | None:
    name = options.one_of(_STARTS)
    return None if name is None else _boundary(name, options.required(name))


def _ending(options: _Options) -> Positions | Timestamps:
    name = options.one_of(_ENDS)
    if name is None:
        return LATEST
    ending = _boundary(name, options.required(name))
    if ending == EARLIEST or (isinstance(ending, Mapping) and EARLIEST_NUMBER in ending.values()):
        raise OptionError(
            name, "cannot be earliest, where nothing would be read: give latest or JSON"
        )
    return ending


def _strategy(options: _Options) -> str:
    strategy = options.text(_STRATEGY) or LATEST
    if strategy not in ("error", LATEST):
        raise OptionError(_STRATEGY, f"is {strategy!r}, it must be error or {LATEST}")
    return strategy


def _boundary(name: str, text: str) -> Positions | Timestamps:
    """Parse where a query starts or ends."""
    if name.endswith("ByTimestamp"):
        rule = 'must be JSON such as {"stream": 1767225600000}, with milliseconds since 1970'
        times = _json_object(name, text, rule)
        return Timestamps(name, {s: _milliseconds(name, str(t)) for s, t in times.items()})
    if name.endswith("Timestamp"):
        return Timestamps(name, _milliseconds(name, text))
    if text in (EARLIEST, LATEST):
        return text
    rule = f'must be {EARLIEST}, {LATEST} or JSON such as {{"stream": 42}}'
    positions = _json_object(name, text, rule)
    if not all(type(number) is int and number >= EARLIEST_NUMBER for number in positions.values()):
        raise OptionError(name, f"is {text[:80]!r}, it {rule}")
    return positions


def _json_object(name: str, text: str, rule: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise OptionError(name, f"is {text[:80]!r}, it {rule}")
    return value


def _milliseconds(name: str, text: str) -> int:
    """Return a time in milliseconds since 1970, rounded up."""
    if text.isascii() and text.isdigit() and len(text) <= 18:
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise OptionError(
            name,
            f"is {text[:40]!r}, it must be milliseconds since 1970 or a time with a zone such as "
            "2026-01-31T12:00:00Z",
        )
    return max(0, -((_EPOCH - moment) // _MILLISECOND))


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
