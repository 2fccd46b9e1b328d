"""Parses and checks request paths and query strings."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar
from urllib.parse import parse_qsl

from streamfold.errors import InvalidError
from streamfold.model import access_tokens
from streamfold.model.access_tokens import parse_token_id_prefix
from streamfold.model.metrics import Interval
from streamfold.model.names import (
    BasinName,
    StreamName,
    parse_basin_name,
    parse_basin_prefix,
    parse_bucket_name,
    parse_stream_name,
    parse_stream_prefix,
)
from streamfold.model.positions import U64_MAX, StartKind
from streamfold.model.records import BATCH_BYTES_MAX, BATCH_RECORDS_MAX
from streamfold.wire.s2.errors import BadPathError, BadQueryError
from streamfold.wire.s2.sse import EventId
from streamfold.wire.text import SHOWN, decode_segment, parse_unsigned

Name = TypeVar("Name", bound=str)
#: Names per page of a listing: both maximum and default.
PAGE_MAX = 1000
#: Forks or producers per page. Each fork takes a read of its own, and the names are long.
RELATED_MAX = 100
#: Maximum seconds that a unary read waits, even if it asks for more.
UNARY_WAIT_MAX = 60
U32_MAX = 2**32 - 1
#: Maximum parameters of one query. No request has more than eight.
PARAMETERS_MAX = 100
E = TypeVar("E", bound=enum.StrEnum)


def parse_basin(segment: str) -> BasinName:
    """Parse the name of an existing basin. Durable Streams allows more names than S2."""
    return _parse_segment(segment, partial(parse_bucket_name, what="basin name"))


def parse_new_basin(segment: str) -> BasinName:
    """Parse the name of a basin to create, by S2's rule."""
    return _parse_segment(segment, parse_basin_name)


def parse_stream(segment: str) -> StreamName:
    return _parse_segment(segment, parse_stream_name)


def parse_token_id(segment: str) -> str:
    return _parse_segment(segment, access_tokens.parse_token_id)


def _parse_segment(segment: str, parse_name: Callable[[str], Name]) -> Name:
    text = decode_segment(segment)
    if text is None:
        raise BadPathError(f"path segment {segment[:SHOWN]!r} is not percent-encoded UTF-8")
    try:
        return parse_name(text)
    except InvalidError as error:
        raise BadPathError(error.message) from None


@dataclass(frozen=True, slots=True)
class ReadQuery:
    """Where a read starts and ends. None sets no bound."""

    kind: StartKind = StartKind.TAIL_OFFSET
    start: int = 0
    #: Whether a start beyond the tail becomes the tail instead of raising an error.
    clamp: bool = False
    max_records: int | None = None
    #: Metered bytes.
    max_bytes: int | None = None
    #: Exclusive upper bound on timestamps.
    until: int | None = None
    #: Seconds to wait at the tail for more records.
    wait: int | None = None

    @property
    def may_follow(self) -> bool:
        """Whether the read continues at the tail instead of ending there."""
        unbounded = self.max_records is None and self.max_bytes is None and self.until is None
        return unbounded or bool(self.wait)

    def unary(self) -> ReadQuery:
        """Return this read, limited to what fits in one response and to the wait of one request."""
        return replace(
            self,
            max_records=_at_most(self.max_records, BATCH_RECORDS_MAX),
            max_bytes=_at_most(self.max_bytes, BATCH_BYTES_MAX),
            wait=min(self.wait or 0, UNARY_WAIT_MAX),
        )

    def resumed(self, last: EventId) -> ReadQuery:
        """Return the rest of this read after everything up to `last` was delivered."""
        return replace(
            self,
            kind=StartKind.SEQ_NUM,
            start=last.seq_num + 1,
            max_records=_less(self.max_records, last.count),
            max_bytes=_less(self.max_bytes, last.metered),
        )


@dataclass(frozen=True, slots=True)
class ListQuery:
    """The names to list: those with `prefix`, after `start_after`, at most `limit`."""

    prefix: str
    start_after: str
    limit: int


@dataclass(frozen=True, slots=True)
class MetricsQuery:
    """The metrics to return. Times are Unix seconds."""

    metric_set: str
    start: int | None
    end: int | None
    interval: Interval | None


def parse_read_query(query: str) -> ReadQuery:
    """Parse and check a read's parameters without looking at any stream."""
    params = _parse(query)
    starts = [kind for kind in StartKind if kind in params]
    values = {kind: _number(params, kind) for kind in starts}
    read = ReadQuery(
        clamp=_flag(params, "clamp"),
        max_records=_number(params, "count"),
        max_bytes=_number(params, "bytes"),
        until=_number(params, "until"),
        wait=_number(params, "wait", U32_MAX),
    )
    if len(starts) > 1:
        raise InvalidError(f"{' and '.join(starts)} are two starts of one read: give one of them")
    for kind, value in values.items():
        read = replace(read, kind=kind, start=value or 0)
    _check_until(read)
    return read


def parse_basin_list_query(query: str) -> ListQuery:
    return _list_query(query, parse_basin_prefix)


def parse_stream_list_query(query: str) -> ListQuery:
    return _list_query(query, parse_stream_prefix)


def parse_token_list_query(query: str) -> ListQuery:
    return _list_query(query, parse_token_id_prefix)


def parse_fork_list_query(query: str) -> tuple[int, int]:
    """Return where a page of forks starts, as the previous page reported it, and its limit."""
    params = _parse(query)
    return _number(params, "start_after", U64_MAX - 1) or 0, _related_limit(params)


def parse_producer_list_query(query: str) -> tuple[str, int]:
    """Return the producer id that a page starts after, and the page's limit."""
    params = _parse(query)
    return params.get("start_after", ""), _related_limit(params)


def parse_metrics_query(query: str) -> MetricsQuery:
    """Parse a metrics request's parameters. The server decides which sets exist."""
    params = _parse(query)
    if "set" not in params:
        raise BadQueryError("the query has no set: name the metrics to show")
    start, end = _number(params, "start", U32_MAX), _number(params, "end", U32_MAX)
    if start is not None and end is not None and start > end:
        raise InvalidError(f"start {start} is after end {end}: swap them")
    return MetricsQuery(params["set"], start, end, _choice(params, "interval", Interval))


def _parse(query: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(
            query, keep_blank_values=True, errors="strict", max_num_fields=PARAMETERS_MAX
        )
    except UnicodeDecodeError:
        raise BadQueryError("the query is not percent-encoded UTF-8") from None
    except ValueError:
        raise BadQueryError(f"the query has more than {PARAMETERS_MAX} parameters") from None
    params = dict(pairs)
    if len(params) != len(pairs):
        raise BadQueryError("the query has a parameter twice: give each once")
    return params


def _list_query(query: str, parse_prefix: Callable[[str], str]) -> ListQuery:
    params = _parse(query)
    limit = _number(params, "limit") or PAGE_MAX
    try:
        prefix = parse_prefix(params.get("prefix", ""))
        start_after = parse_prefix(params.get("start_after", ""))
    except InvalidError as error:
        raise BadQueryError(error.message) from None
    return ListQuery(prefix, start_after, min(limit, PAGE_MAX))


def _related_limit(params: dict[str, str]) -> int:
    return min(_number(params, "limit") or RELATED_MAX, RELATED_MAX)


def _check_until(read: ReadQuery) -> None:
    if read.kind is StartKind.TIMESTAMP and read.until is not None and read.start >= read.until:
        raise InvalidError(
            f"timestamp {read.start} is not before until {read.until}: nothing could be read"
        )


def _number(params: dict[str, str], name: str, largest: int = U64_MAX) -> int | None:
    text = params.get(name)
    if text is None:
        return None
    number = parse_unsigned(text, largest)
    if number is None:
        raise BadQueryError(f"{name}={text[:40]!r} must be a whole number from 0 to {largest}")
    return number


def _flag(params: dict[str, str], name: str) -> bool:
    text = params.get(name, "false")
    if text not in ("true", "false"):
        raise BadQueryError(f"{name}={text[:40]!r} must be true or false")
    return text == "true"


def _choice(params: dict[str, str], name: str, choices: type[E]) -> E | None:
    text = params.get(name)
    if text is None:
        return None
    if text not in list(choices):
        raise BadQueryError(f"{name}={text[:40]!r} must be one of {', '.join(choices)}")
    return choices(text)


def _at_most(value: int | None, bound: int) -> int:
    return bound if value is None else min(value, bound)


def _less(limit: int | None, used: int) -> int | None:
    return None if limit is None else max(0, limit - used)
