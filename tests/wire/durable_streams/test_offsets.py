"""Offset tokens round-trip, and nothing else is accepted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamfold.errors import InvalidError
from streamfold.model.positions import U64_MAX
from streamfold.wire.durable_streams.offsets import (
    OFFSET_SEQ_NUM_MAX,
    Sentinel,
    format_offset,
    parse_offset,
    parse_position,
    parse_read_offset,
)

repeatable = settings(derandomize=True, deadline=None, max_examples=200)
seq_nums = st.integers(0, OFFSET_SEQ_NUM_MAX)

FIRST = "0000000000000000_0000000000000000"

#: From the conformance suite, and from what Python's own parsers let through.
MALFORMED = [
    "",
    " ",
    "-1",
    "now",
    "abc",
    "0_0",
    "0000000000000042",
    FIRST + " ",
    " " + FIRST,
    FIRST + "\n",
    FIRST + "\0",
    FIRST + "\r\n",
    "0000000000000000,0000000000000000",
    "0000000000000000/0000000000000000",
    "../" + FIRST,
    "0000000000000000__000000000000000",
    "000000000000000_00000000000000000",
    "+000000000000000_0000000000000000",
    "-000000000000001_0000000000000000",
    "0000000000000000_000000000000000_",
    "00000000000000x0_0000000000000000",
    "000000000000000\u0660_0000000000000000",  # an Arabic zero
    "\uff10000000000000000_0000000000000000",  # a full-width zero
    "0" * 17 + "_" + "0" * 16,
    "9" * 4301 + "_" + "0" * 16,
]


@repeatable
@given(seq_nums)
def test_a_token_comes_back_as_its_position(seq_num: int) -> None:
    token = format_offset(seq_num)
    assert len(token) == 33
    assert parse_offset(token) == seq_num
    assert parse_position(token) == seq_num
    assert parse_read_offset([token]) == seq_num


@repeatable
@given(seq_nums, seq_nums)
def test_tokens_sort_as_text_like_their_positions(one: int, other: int) -> None:
    assert (format_offset(one) < format_offset(other)) == (one < other)


def test_the_start_of_a_stream_has_the_token_that_the_conformance_suite_writes_out() -> None:
    assert format_offset(0) == FIRST
    assert format_offset(42) == "0000000000000042_0000000000000000"


@pytest.mark.parametrize("seq_num", [-1, OFFSET_SEQ_NUM_MAX + 1, U64_MAX])
def test_a_position_whose_token_would_not_sort_has_none(seq_num: int) -> None:
    with pytest.raises(InvalidError, match=str(seq_num)):
        format_offset(seq_num)


@pytest.mark.parametrize("text", MALFORMED)
def test_a_token_that_was_not_given_out_is_refused(text: str) -> None:
    with pytest.raises(InvalidError, match="opaque"):
        parse_offset(text)


@pytest.mark.parametrize(
    "text", ["0000000000000000_0000000000000001", "9999999999999999_9999999999999999"]
)
def test_an_offset_that_was_counted_up_is_refused_and_says_why(text: str) -> None:
    with pytest.raises(InvalidError, match="exactly as it was received"):
        parse_offset(text)


def test_a_refusal_does_not_repeat_a_long_value() -> None:
    with pytest.raises(InvalidError) as refused:
        parse_offset("x" * 10_000)
    assert len(refused.value.message) < 250


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("42", 42),
        ("00000000000000000042", 42),
        (str(U64_MAX), U64_MAX),
        (format_offset(7), 7),
    ],
)
def test_a_position_may_be_a_plain_number(text: str, expected: int) -> None:
    assert parse_position(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-1",
        "+1",
        " 1",
        "1 ",
        "1_000",
        "1.0",
        "1e3",
        "0x1",
        "\u0661",
        str(U64_MAX + 1),
        "1" * 21,
    ],
)
def test_a_position_that_is_not_a_plain_number_is_refused(text: str) -> None:
    with pytest.raises(InvalidError):
        parse_position(text)


def test_the_sentinels_stand_for_the_start_and_the_tail() -> None:
    assert parse_read_offset([]) is Sentinel.ABSENT
    assert parse_read_offset(["-1"]) is Sentinel.START
    assert parse_read_offset(["now"]) is Sentinel.NOW
    assert parse_read_offset([FIRST]) == 0


@pytest.mark.parametrize(
    "values",
    [[""], ["-1", "-1"], [FIRST, FIRST], ["NOW"], ["-2"], ["-01"], ["now "], [" -1"], ["42"]],
)
def test_an_offset_that_is_empty_repeated_or_malformed_is_refused(values: list[str]) -> None:
    with pytest.raises(InvalidError, match="offset"):
        parse_read_offset(values)


def test_a_read_by_plain_numbers_keeps_the_sentinels() -> None:
    assert parse_read_offset(["42"], parse_position) == 42
    assert parse_read_offset(["-1"], parse_position) is Sentinel.START
    with pytest.raises(InvalidError):
        parse_read_offset(["-2"], parse_position)
