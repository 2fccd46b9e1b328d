"""Paths and query strings of requests, parsed and checked."""

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
from streamfold.model.positions import U64_MAX
from streamfold.model.records import BATCH_BYTES_MAX, BATCH_RECORDS_MAX
from streamfold.wire.s2.errors import BadPathError, BadQueryError
from streamfold.wire.s2.sse import EventId
from streamfold.wire.text import SHOWN, decode_segment, parse_unsigned

Name = TypeVar("Name", bound=str)
#: Names in one page of a listing, at most and by default.
PAGE_MAX = 1000
#: Forks or producers in one page: each fork takes a read of its own, and their names are long.
RELATED_MAX = 100
#: Seconds that a unary read waits at most, however long it asked for.
UNARY_WAIT_MAX = 60
U32_MAX = 2**32 - 1
#: Parameters of one query: no request has more than eight.
PARAMETERS_MAX = 100
E = TypeVar("E", bound=enum.StrEnum)


def parse_basin(segment: str) -> BasinName:
    """The name of a basin that may exist; Durable Streams allows more names than S2."""
    return _parse_segment(segment, partial(parse_bucket_name, what="basin name"))


def parse_new_basin(segment: str) -> BasinName:
    """The name of a basin to create, by S2's rule."""
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


class StartKind(enum.StrEnum):
    """What a read's start counts; the value is the parameter's name."""

    SEQ_NUM = "seq_num"
    TIMESTAMP = "timestamp"
    TAIL_OFFSET = "tail_offset"


@dataclass(frozen=True, slots=True)
class ReadQuery:
    """Where a read starts, and what ends it; None sets no bound."""

    kind: StartKind = StartKind.TAIL_OFFSET
    start: int = 0
    #: A start beyond the tail becomes the tail instead of a failure.
    clamp: bool = False
    max_records: int | None = None
    #: Metered.
    max_bytes: int | None = None
    #: Exclusive bound on timestamps.
    until: int | None = None
    #: Seconds to wait at the tail for more.
    wait: int | None = None

    @property
    def may_follow(self) -> bool:
        """Whether the read continues at the tail instead of ending there."""
        unbounded = self.max_records is None and self.max_bytes is None and self.until is None
        return unbounded or bool(self.wait)

    def unary(self) -> ReadQuery:
        """The same read, within what one response holds and one request waits."""
        return replace(
            self,
            max_records=_at_most(self.max_records, BATCH_RECORDS_MAX),
            max_bytes=_at_most(self.max_bytes, BATCH_BYTES_MAX),
            wait=min(self.wait or 0, UNARY_WAIT_MAX),
        )

    def resumed(self, last: EventId) -> ReadQuery:
        """The rest of this read, after everything up to `last` was delivered."""
        return replace(
            self,
            kind=StartKind.SEQ_NUM,
            start=last.seq_num + 1,
            max_records=_less(self.max_records, last.count),
            max_bytes=_less(self.max_bytes, last.metered),
        )


@dataclass(frozen=True, slots=True)
class ListQuery:
    """Which names to list: those with `prefix`, after `start_after`, at most `limit`."""

    prefix: str
    start_after: str
    limit: int


@dataclass(frozen=True, slots=True)
class MetricsQuery:
    """Which metrics to show; times are Unix seconds."""

    metric_set: str
    start: int | None
    end: int | None
    interval: Interval | None


def parse_read_query(query: str) -> ReadQuery:
    """The parameters of a read; checked without looking at any stream."""
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
    """What a page of forks starts after, as the page before it says, and its limit."""
    params = _parse(query)
    return _number(params, "start_after", U64_MAX - 1) or 0, _related_limit(params)


def parse_producer_list_query(query: str) -> tuple[str, int]:
    """The id that a page of producers starts after, and its limit."""
    params = _parse(query)
    return params.get("start_after", ""), _related_limit(params)


def parse_metrics_query(query: str) -> MetricsQuery:
    """The parameters of a metrics request; the server decides which sets exist."""
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
