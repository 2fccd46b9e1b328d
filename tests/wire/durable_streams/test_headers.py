"""Options of PUT and POST, and requests rejected before any stream is read."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamfold.errors import InvalidError
from streamfold.wire.durable_streams.headers import (
    TTL_MAX,
    AppendOptions,
    CreateOptions,
    ProducerTuple,
    format_expires_at,
    parse_append,
    parse_closed,
    parse_create,
    parse_expires_at,
    parse_producer,
)
from streamfold.wire.durable_streams.offsets import format_offset

repeatable = settings(derandomize=True, deadline=None, max_examples=200)

SAFE_MAX = 2**53 - 1
NOT_PLAIN = ["", " ", " 1", "1 ", "+1", "-1", "1.5", "1e3", "1abc", "abc", "0x1", "1_000", "\u0661"]


def create(**headers: str) -> CreateOptions:
    return parse_create({name.replace("_", "-"): value for name, value in headers.items()}.get)


def append(**headers: str) -> AppendOptions:
    return parse_append({name.replace("_", "-"): value for name, value in headers.items()}.get)


def test_without_headers_nothing_is_asked_for() -> None:
    assert create() == CreateOptions(None, None, None, False, None, None, 0, None)
    assert append() == AppendOptions(None, False, None, None)


# ------------------------------------------------------------------------------- lifetimes


@pytest.mark.parametrize(
    ("text", "seconds"), [("0", 0), ("1", 1), ("3600", 3600), (str(TTL_MAX), TTL_MAX)]
)
def test_a_ttl_is_whole_seconds(text: str, seconds: int) -> None:
    assert create(stream_ttl=text).ttl == seconds


@pytest.mark.parametrize(
    "text", [*NOT_PLAIN, "00", "01", "0060", "1\n", str(TTL_MAX + 1), "9" * 16, "1" * 5000]
)
def test_a_ttl_of_any_other_form_is_refused(text: str) -> None:
    with pytest.raises(InvalidError, match="stream-ttl"):
        create(stream_ttl=text)


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2030-01-31T12:00:00Z", datetime(2030, 1, 31, 12, tzinfo=UTC)),
        ("2030-01-31t12:00:00z", datetime(2030, 1, 31, 12, tzinfo=UTC)),
        ("2030-01-31T12:00:00.5Z", datetime(2030, 1, 31, 12, 0, 0, 500_000, UTC)),
        ("2030-01-31T12:00:00.123999999Z", datetime(2030, 1, 31, 12, 0, 0, 123_000, UTC)),
        ("2030-01-31T12:00:00+02:00", datetime(2030, 1, 31, 10, tzinfo=UTC)),
        ("2030-01-31T12:00:00-00:00", datetime(2030, 1, 31, 12, tzinfo=UTC)),
        ("2030-01-31T12:00:00.25-23:59", datetime(2030, 2, 1, 11, 59, 0, 250_000, UTC)),
        ("2028-02-29T00:00:00Z", datetime(2028, 2, 29, tzinfo=UTC)),
        ("1969-12-31T23:59:59.9999Z", datetime(1969, 12, 31, 23, 59, 59, 999_000, UTC)),
    ],
)
def test_an_expiry_is_a_moment_by_rfc_3339(text: str, moment: datetime) -> None:
    expected = (moment - datetime.fromtimestamp(0, UTC)) // timedelta(milliseconds=1)
    assert create(stream_expires_at=text).expires_at == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tomorrow",
        "1893456000",
        "2030-01-31",
        "2030-01-31T12:00:00",
        "2030-01-31 12:00:00Z",
        "2030-01-31T12:00Z",
        "2030-01-31T12:00:00,5Z",
        "2030-01-31T12:00:00.Z",
        "2030-01-31T12:00:00+0200",
        "2030-01-31T12:00:00+02",
        "2030-01-31T12:00:00+24:00",
        "2030-01-31T12:00:00+02:60",
        "2030-01-31T12:00:00+02:00:00",
        "20300131T120000Z",
        "2030-W05-4T12:00:00Z",
        "2030-02-29T12:00:00Z",
        "2030-13-01T12:00:00Z",
        "2030-01-31T24:00:00Z",
        "2030-01-31T12:60:00Z",
        "2030-01-31T12:00:60Z",
        "0000-01-01T00:00:00Z",
        "0001-01-01T00:00:00+01:00",
        "9999-12-31T23:59:59-01:00",
        "2030-01-31T12:00:00Z ",
        "2030-01-31T12:00:00Z\n",
        "\u0662030-01-31T12:00:00Z",
        "+2030-01-31T12:00:00Z",
    ],
)
def test_an_expiry_of_any_other_form_is_refused(text: str) -> None:
    with pytest.raises(InvalidError, match="stream-expires-at"):
        create(stream_expires_at=text)


@repeatable
@given(
    st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30)),
    st.integers(-23 * 60 - 59, 23 * 60 + 59),
)
def test_an_expiry_is_shown_as_the_moment_that_was_given(local: datetime, minutes: int) -> None:
    moment = local.replace(tzinfo=timezone(timedelta(minutes=minutes)))
    ms = parse_expires_at(moment.isoformat())
    assert ms is not None
    shown = format_expires_at(ms)
    assert parse_expires_at(shown) == ms
    assert timedelta(0) <= moment - datetime.fromisoformat(shown) < timedelta(milliseconds=1)


def test_an_expiry_is_shown_in_utc_with_milliseconds() -> None:
    assert format_expires_at(0) == "1970-01-01T00:00:00.000Z"
    assert format_expires_at(-62_135_596_800_000) == "0001-01-01T00:00:00.000Z"


def test_two_lifetimes_are_refused() -> None:
    with pytest.raises(InvalidError, match="stream-ttl and stream-expires-at"):
        create(stream_ttl="60", stream_expires_at="2030-01-31T12:00:00Z")


# ------------------------------------------------------------------------ flags and content


@pytest.mark.parametrize(
    ("value", "closed"),
    [("true", True), ("TRUE", True), ("True", True), ("false", False), ("1", False), ("", False)],
)
def test_only_true_closes_and_nothing_is_refused(value: str, closed: bool) -> None:
    assert create(stream_closed=value).closed is closed
    assert append(stream_closed=value).closed is closed
    assert parse_closed({"stream-closed": value}.get) is closed


def test_trimming_on_snapshots_is_asked_for_in_plain_words() -> None:
    assert create(stream_trim_on_snapshot="true").trim_on_snapshot
    assert create(stream_trim_on_snapshot="True").trim_on_snapshot
    assert not create(stream_trim_on_snapshot="false").trim_on_snapshot
    for value in ("", "yes", "1"):
        with pytest.raises(InvalidError, match="stream-trim-on-snapshot"):
            create(stream_trim_on_snapshot=value)


def test_a_content_type_is_kept_as_written() -> None:
    assert create(content_type="Text/Plain; charset=UTF-8").content_type == (
        "Text/Plain; charset=UTF-8"
    )
    assert append(content_type="Text/Plain; charset=UTF-8").content_type == (
        "Text/Plain; charset=UTF-8"
    )


def test_an_append_with_an_empty_content_type_has_none() -> None:
    assert append(content_type="").content_type is None
    assert append(content_type="garbage").content_type == "garbage"


# -------------------------------------------------------------------------------- producers


def producer(name: str = "p", epoch: str = "0", seq: str = "0") -> ProducerTuple | None:
    headers = {"producer-id": name, "producer-epoch": epoch, "producer-seq": seq}
    return parse_producer(headers.get)


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("7", 7), ("007", 7), ("0" * 5000 + "7", 7), (str(SAFE_MAX), SAFE_MAX)],
)
def test_epochs_and_sequences_are_digits(text: str, number: int) -> None:
    assert producer(epoch=text) == ProducerTuple("p", number, 0)
    assert producer(seq=text) == ProducerTuple("p", 0, number)


@pytest.mark.parametrize("text", [*NOT_PLAIN, str(SAFE_MAX + 1), "9" * 5000, "0" * 5000 + "x"])
def test_epochs_and_sequences_of_any_other_form_are_refused(text: str) -> None:
    with pytest.raises(InvalidError, match="producer-epoch"):
        producer(epoch=text)
    with pytest.raises(InvalidError, match="producer-seq"):
        producer(seq=text)


@pytest.mark.parametrize(
    "given_headers",
    [
        {"producer-id": "p"},
        {"producer-epoch": "0"},
        {"producer-seq": "0"},
        {"producer-id": "p", "producer-epoch": "0"},
        {"producer-id": "p", "producer-seq": "0"},
        {"producer-epoch": "0", "producer-seq": "0"},
    ],
)
def test_a_part_of_the_producer_headers_is_refused(given_headers: dict[str, str]) -> None:
    with pytest.raises(InvalidError, match="or none of them"):
        parse_producer(given_headers.get)


def test_a_producer_needs_an_id_of_at_most_256_bytes() -> None:
    assert producer("\u00e9" * 128) == ProducerTuple("\u00e9" * 128, 0, 0)
    for name in ("", "x" * 257, "\u00e9" * 129, "\udcff"):
        with pytest.raises(InvalidError, match="producer-id"):
            producer(name)


def test_an_append_has_its_producer_and_sequence() -> None:
    options = append(
        content_type="text/plain",
        stream_closed="true",
        stream_seq="09",
        producer_id="p",
        producer_epoch="1",
        producer_seq="2",
    )
    assert options == AppendOptions("text/plain", True, "09", ProducerTuple("p", 1, 2))


def test_a_stream_seq_is_any_text_of_at_most_256_bytes() -> None:
    assert append(stream_seq=" a,b ").stream_seq == " a,b "
    assert append(stream_seq="x" * 256).stream_seq == "x" * 256
    for value in ("", "x" * 257, "\u00e9" * 129, "a\udc80"):
        with pytest.raises(InvalidError, match="stream-seq"):
            append(stream_seq=value)


@repeatable
@given(st.text(min_size=1, max_size=8), st.text(min_size=1, max_size=8))
def test_stream_seqs_compare_as_text_like_their_bytes(one: str, other: str) -> None:
    kept = append(stream_seq=one).stream_seq, append(stream_seq=other).stream_seq
    assert kept[0] is not None
    assert kept[1] is not None
    assert (kept[0] < kept[1]) == (one.encode() < other.encode())


# ------------------------------------------------------------------------------------ forks


def test_a_fork_names_its_source_and_where_it_leaves_it() -> None:
    options = create(
        stream_forked_from="/v1/stream/a%2Fb",
        stream_fork_offset=format_offset(5),
        stream_fork_sub_offset="3",
    )
    assert options.forked_from == "/v1/stream/a%2Fb"
    assert options.fork_offset == 5
    assert options.fork_sub_offset == 3
    assert create(stream_forked_from="/a").fork_offset is None
    assert create(stream_forked_from="/a", stream_fork_sub_offset="0").fork_sub_offset == 0


def test_the_first_offset_of_a_fork_is_not_taken_for_none() -> None:
    assert create(stream_forked_from="/a", stream_fork_offset=format_offset(0)).fork_offset == 0


@pytest.mark.parametrize("text", [*NOT_PLAIN, "05", "00", str(SAFE_MAX + 1), "9" * 5000])
def test_a_sub_offset_of_any_other_form_is_refused(text: str) -> None:
    with pytest.raises(InvalidError, match="stream-fork-sub-offset"):
        create(stream_forked_from="/a", stream_fork_sub_offset=text)


@pytest.mark.parametrize("text", ["", "-1", "now", "5", "9999999999999999_9999999999999999"])
def test_a_fork_offset_must_be_a_token(text: str) -> None:
    with pytest.raises(InvalidError, match="stream-fork-offset"):
        create(stream_forked_from="/a", stream_fork_offset=text)


@pytest.mark.parametrize("text", ["0", "1", "-1"])
def test_a_sub_offset_without_a_source_is_refused(text: str) -> None:
    with pytest.raises(InvalidError, match="stream-forked-from"):
        create(stream_fork_sub_offset=text)


def test_a_fork_offset_without_a_source_is_refused() -> None:
    with pytest.raises(InvalidError, match="stream-forked-from"):
        create(stream_fork_offset=format_offset(0))


def test_an_empty_source_is_refused() -> None:
    with pytest.raises(InvalidError, match="stream-forked-from"):
        create(stream_forked_from="")
