"""Query strings of reads, listings and metrics."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamfold.errors import InvalidError
from streamfold.model.metrics import Interval
from streamfold.model.positions import U64_MAX, StartKind
from streamfold.wire.s2.errors import BadHeaderError, BadQueryError
from streamfold.wire.s2.sse import EventId
from streamfold.wire.s2.urls import (
    ListQuery,
    MetricsQuery,
    ReadQuery,
    parse_basin_list_query,
    parse_metrics_query,
    parse_read_query,
    parse_stream_list_query,
    parse_token_list_query,
)


def test_a_read_without_parameters_starts_at_the_tail() -> None:
    assert parse_read_query("") == ReadQuery(StartKind.TAIL_OFFSET, 0)


@pytest.mark.parametrize("kind", list(StartKind))
@pytest.mark.parametrize("value", [0, 7, U64_MAX])
def test_a_read_starts_where_it_says(kind: StartKind, value: int) -> None:
    read = parse_read_query(f"{kind}={value}")
    assert (read.kind, read.start) == (kind, value)


def test_a_read_has_every_bound_it_names() -> None:
    query = "seq_num=1&count=2&bytes=3&until=4&wait=5&clamp=true&colour=red"
    assert parse_read_query(query) == ReadQuery(StartKind.SEQ_NUM, 1, True, 2, 3, 4, 5)
    assert parse_read_query("clamp=false&count=0&bytes=0&wait=0") == ReadQuery(
        max_records=0, max_bytes=0, wait=0
    )


@pytest.mark.parametrize("name", ["seq_num", "timestamp", "tail_offset", "count", "bytes", "until"])
@pytest.mark.parametrize(
    "value", ["", "x", "-1", "%2B1", "1.0", "1_0", "+1", "%D9%A1", str(U64_MAX + 1), "9" * 5000]
)
def test_a_number_that_cannot_be_read_is_a_bad_query(name: str, value: str) -> None:
    with pytest.raises(BadQueryError, match=name):
        parse_read_query(f"{name}={value}")


@pytest.mark.parametrize(
    "query",
    ["wait=4294967296", "clamp=yes", "clamp=", "clamp=True", "count=1&count=1", "seq_num=%ff"],
)
def test_other_values_that_cannot_be_read_are_a_bad_query(query: str) -> None:
    with pytest.raises(BadQueryError):
        parse_read_query(query)


@pytest.mark.parametrize(
    "query",
    [
        "seq_num=0&timestamp=0",
        "seq_num=0&tail_offset=0",
        "timestamp=0&tail_offset=0",
        "seq_num=0&timestamp=0&tail_offset=0",
    ],
)
def test_two_starts_are_invalid(query: str) -> None:
    with pytest.raises(InvalidError, match="two starts"):
        parse_read_query(query)


def test_an_unreadable_value_outweighs_two_starts() -> None:
    with pytest.raises(BadQueryError):
        parse_read_query("seq_num=0&timestamp=x")


@pytest.mark.parametrize("until", [0, 4, 5])
def test_a_timestamp_at_or_after_until_is_invalid(until: int) -> None:
    with pytest.raises(InvalidError, match="until"):
        parse_read_query(f"timestamp=5&until={until}")


def test_until_is_compared_with_timestamps_only() -> None:
    assert parse_read_query("timestamp=5&until=6").until == 6
    assert parse_read_query("seq_num=5&until=4").until == 4


@pytest.mark.parametrize(
    ("query", "follows"),
    [
        ("", True),
        ("wait=0", True),
        ("wait=1", True),
        ("count=1", False),
        ("bytes=1", False),
        ("until=1", False),
        ("count=1&wait=0", False),
        ("count=1&wait=1", True),
        ("until=1&wait=1", True),
    ],
)
def test_a_read_follows_when_unbounded_or_when_asked_to_wait(query: str, follows: bool) -> None:
    assert parse_read_query(query).may_follow is follows


@pytest.mark.parametrize(
    ("query", "bounds"),
    [
        ("", (1000, 1 << 20, 0)),
        ("count=5000&bytes=9999999&wait=100", (1000, 1 << 20, 60)),
        ("count=5&bytes=7&wait=1", (5, 7, 1)),
        ("count=0&bytes=0", (0, 0, 0)),
    ],
)
def test_a_unary_read_is_bounded_in_silence(query: str, bounds: tuple[int, int, int]) -> None:
    read = parse_read_query(query).unary()
    assert (read.max_records, read.max_bytes, read.wait) == bounds
    assert read.may_follow is (bounds[2] > 0)


def test_a_resumed_read_starts_after_what_was_delivered() -> None:
    read = parse_read_query("timestamp=9&count=10&bytes=100&clamp=true&wait=3")
    assert read.resumed(EventId.parse("41,4,60")) == ReadQuery(
        StartKind.SEQ_NUM, 42, True, 6, 40, None, 3
    )


def test_limits_of_a_resumed_read_do_not_go_below_zero() -> None:
    read = parse_read_query("count=10&bytes=100").resumed(EventId(0, 11, 101))
    assert (read.max_records, read.max_bytes) == (0, 0)


def test_a_resumed_read_without_limits_has_none() -> None:
    read = ReadQuery().resumed(EventId(0, 11, 101))
    assert (read.max_records, read.max_bytes) == (None, None)
    assert read.may_follow


@pytest.mark.parametrize(
    "value", ["", "1", "1,2", "1,2,3,4", "a,b,c", "-1,0,0", "1,,3", f"{U64_MAX},1,1", "1,9e9,1"]
)
def test_an_event_id_that_was_never_given_out_is_a_bad_header(value: str) -> None:
    with pytest.raises(BadHeaderError, match="last-event-id"):
        EventId.parse(value)


@settings(derandomize=True, max_examples=50, deadline=None)
@given(st.integers(0, U64_MAX - 1), st.integers(0, U64_MAX), st.integers(0, U64_MAX))
def test_event_ids_survive_their_text(seq_num: int, count: int, metered: int) -> None:
    event_id = EventId(seq_num, count, metered)
    assert EventId.parse(str(event_id)) == event_id


def test_a_listing_without_parameters_shows_the_first_page() -> None:
    for parse in (parse_basin_list_query, parse_stream_list_query, parse_token_list_query):
        assert parse("") == ListQuery("", "", 1000)
        assert parse("prefix=&start_after=&limit=5") == ListQuery("", "", 5)


@pytest.mark.parametrize(("limit", "page"), [(0, 1000), (1, 1), (1000, 1000), (1500, 1000)])
def test_a_limit_of_nothing_or_too_much_means_a_full_page(limit: int, page: int) -> None:
    assert parse_basin_list_query(f"limit={limit}").limit == page


def test_names_in_a_listing_are_decoded() -> None:
    query = parse_stream_list_query("prefix=a%2Fb+%C3%BC&start_after=a%2Fb%20z")
    assert (query.prefix, query.start_after) == ("a/b ü", "a/b z")


@pytest.mark.parametrize("name", ["prefix", "start_after"])
def test_names_that_could_not_exist_are_a_bad_query(name: str) -> None:
    with pytest.raises(BadQueryError):
        parse_basin_list_query(f"{name}=UPPER")
    with pytest.raises(BadQueryError):
        parse_stream_list_query(f"{name}={'x' * 513}")
    with pytest.raises(BadQueryError):
        parse_stream_list_query(f"{name}=%00")
    with pytest.raises(BadQueryError):
        parse_token_list_query(f"{name}={'x' * 97}")
    with pytest.raises(BadQueryError):
        parse_stream_list_query(f"{name}=%ff")


@pytest.mark.parametrize("limit", ["", "-1", "many"])
def test_a_limit_that_is_not_a_number_is_a_bad_query(limit: str) -> None:
    with pytest.raises(BadQueryError, match="limit"):
        parse_stream_list_query(f"limit={limit}")


def test_metrics_are_asked_for_by_set_and_span() -> None:
    query = parse_metrics_query("set=storage&start=1&end=2&interval=hour")
    assert query == MetricsQuery("storage", 1, 2, Interval.HOUR)
    assert parse_metrics_query("set=storage") == MetricsQuery("storage", None, None, None)


@pytest.mark.parametrize("query", ["", "set=x&start=4294967296", "set=x&interval=week"])
def test_metrics_that_cannot_be_read_are_a_bad_query(query: str) -> None:
    with pytest.raises(BadQueryError):
        parse_metrics_query(query)


def test_a_span_that_ends_before_it_starts_is_invalid() -> None:
    with pytest.raises(InvalidError):
        parse_metrics_query("set=storage&start=2&end=1")
