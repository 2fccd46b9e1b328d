"""Where artifacts may end: after complete transactions, and at the latest when a limit is reached."""

from __future__ import annotations

import itertools
import json
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamfold.snapshotter.decoding import ChangeDecoder, DebeziumDecoder, EnvelopeDecoder
from streamfold.snapshotter.transactions import (
    CLOSED,
    OUTSIDE,
    SILENT,
    Membership,
    OpenTransaction,
    Tail,
    TransactionLimits,
    TransactionWait,
    follow,
    tail_of,
)
from streamfold.testing.change_decoder_kit import records

A, B = Membership("a"), Membership("b")
MARKED = Membership("a", marked=True)
LIMITS = TransactionLimits(
    max_records=100, max_wait=timedelta(seconds=60), quiet=timedelta(seconds=5)
)


def tail(*memberships: Membership | None, first: int = 0) -> Tail:
    """The tail of records from `first` on, some of which say nothing."""
    said = [(n, m) for n, m in enumerate(memberships, first) if m is not None]
    return tail_of(reversed(said))


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ((), SILENT),
        ((None, None), SILENT),
        ((OUTSIDE,), CLOSED),
        ((A, A, OUTSIDE), CLOSED),
        ((A, OUTSIDE, None), CLOSED),
        ((A, A), Tail("a", 0, False, joins=True, silent=False)),
        ((None, A, None, A, None), Tail("a", 1, False, joins=True, silent=False)),
        ((OUTSIDE, A), Tail("a", 1, False, joins=False, silent=False)),
        ((A, A, B, B), Tail("b", 2, False, joins=False, silent=False)),
        ((A, B, A), Tail("a", 2, False, joins=False, silent=False)),
        ((MARKED, A), Tail("a", 0, True, joins=True, silent=False)),
    ],
)
def test_a_batch_ends_in_the_transaction_of_its_last_records(
    said: tuple[Membership | None, ...], expected: Tail
) -> None:
    assert tail(*said) == expected


@pytest.mark.parametrize(
    ("held", "then", "expected"),
    [
        (None, SILENT, None),
        (OpenTransaction("a", 3, True), SILENT, OpenTransaction("a", 3, True)),
        (OpenTransaction("a", 3, True), CLOSED, None),
        (OpenTransaction("a", 3, True), tail(A, first=9), OpenTransaction("a", 3, True)),
        (OpenTransaction("a", 3, False), tail(MARKED, first=9), OpenTransaction("a", 3, True)),
        (OpenTransaction("a", 3, True), tail(B, first=9), OpenTransaction("b", 9, False)),
        # The same name again, after an end: another transaction.
        (OpenTransaction("a", 3, True), tail(OUTSIDE, A, first=9), OpenTransaction("a", 10, False)),
    ],
)
def test_an_open_transaction_continues_into_the_next_batch(
    held: OpenTransaction | None, then: Tail, expected: OpenTransaction | None
) -> None:
    assert follow(held, then) == expected


@given(
    said=st.lists(st.sampled_from([None, OUTSIDE, A, B, MARKED]), max_size=30),
    edges=st.lists(st.integers(0, 30), max_size=6),
)
@settings(derandomize=True, max_examples=300, deadline=None)
def test_it_does_not_matter_where_batches_are_cut(
    said: list[Membership | None], edges: list[int]
) -> None:
    """Against a walk over single records, which knows nothing of batches."""
    expected: OpenTransaction | None = None
    for number, membership in enumerate(said):
        if membership is None:
            continue
        if membership.id is None:
            expected = None
        elif expected is None or expected.id != membership.id:
            expected = OpenTransaction(membership.id, number, membership.marked)
        else:
            expected = expected._replace(marked=expected.marked or membership.marked)
    found: OpenTransaction | None = None
    cuts = sorted({0, len(said), *(edge for edge in edges if edge <= len(said))})
    for start, end in itertools.pairwise(cuts):
        found = follow(found, tail(*said[start:end], first=start))
    assert found == expected


def test_a_transaction_whose_end_is_not_marked_is_complete_after_quiet() -> None:
    waiting = TransactionWait(LIMITS)
    waiting.read([tail(A)], now=0)
    waiting.read([tail(A, first=1)], now=4)
    assert not waiting.is_complete(8)
    assert waiting.is_complete(9)
    assert not waiting.is_cut(1, 9)


def test_a_marked_end_is_waited_for_until_a_limit() -> None:
    waiting = TransactionWait(LIMITS)
    waiting.read([tail(OUTSIDE, MARKED)], now=0)
    waiting.read([tail(A, first=2)], now=50)
    assert not waiting.is_complete(59)
    assert not waiting.is_cut(50, 59)
    assert waiting.is_cut(50, 60)  # by time, from its first record on
    assert waiting.is_cut(100, 51)  # by records: 1 to 100
    waiting.read([CLOSED], now=70)
    assert waiting.transaction is None
    assert not waiting.is_cut(1000, 1000)


def test_the_clock_of_a_transaction_begins_with_it() -> None:
    waiting = TransactionWait(LIMITS)
    waiting.read([tail(MARKED)], now=0)
    waiting.read([tail(Membership("b", marked=True), first=1)], now=59)
    assert not waiting.is_cut(1, 118)
    assert waiting.is_cut(1, 119)


ROW: dict[str, Any] = {"id": 1, "name": "n"}
ENVELOPES: dict[str, Any] = {
    "plain": {"op": "c", "after": ROW},
    "of a": {"op": "c", "after": ROW, "txn": "a"},
    "of 7": {"op": "c", "after": ROW, "txn": 7},
    "of a, marked": {"op": "c", "after": ROW, "txn": {"id": "a"}},
    "last of a": {"op": "d", "key": {"id": 1}, "txn": {"id": "a", "last": True}},
    "end of a": {"op": "e", "txn": "a"},
    "end of none": {"op": "e"},
    "end with a row": {"op": "e", "txn": "a", "key": {"id": 1}},
    "first copy": {"op": "r", "after": ROW},
}
META = {"total_order": 1, "data_collection_order": 1}
DEBEZIUM: dict[str, Any] = {
    "plain": {"op": "c", "after": ROW},
    "numbered by the database": {"op": "c", "after": ROW, "source": {"txId": 5}},
    "of a": {"op": "c", "after": ROW, "transaction": {"id": "a", **META}},
    "of b": {"schema": None, "payload": {"op": "c", "after": ROW, "transaction": {"id": "b"}}},
    "begin of a": {"status": "BEGIN", "id": "a", "event_count": None},
    "end of a": {"status": "END", "id": "a", "event_count": 2},
    "tombstone": None,
    "first copy": {"op": "r", "after": ROW},
    "message": {"op": "m", "message": {}},
}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (("plain",), CLOSED),
        (("first copy",), SILENT),
        (("of a", "first copy"), Tail("a", 0, False, True, False)),
        (("of a", "plain"), CLOSED),
        (("plain", "of 7"), Tail("7", 1, False, False, False)),
        (("of a, marked", "of a"), Tail("a", 0, True, True, False)),
        (("of a, marked", "last of a"), CLOSED),
        (("of a", "end of a"), CLOSED),
        (("last of a", "of a"), Tail("a", 1, False, False, False)),
    ],
)
def test_envelopes_say_where_transactions_end(said: tuple[str, ...], expected: Tail) -> None:
    assert _decoded_tail(EnvelopeDecoder(("id",)), [ENVELOPES[name] for name in said]) == expected


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (("plain", "numbered by the database"), CLOSED),
        (("begin of a",), Tail("a", 0, True, True, False)),
        (("plain", "begin of a", "of a"), Tail("a", 1, True, False, False)),
        (("begin of a", "of a", "end of a"), CLOSED),
        (("begin of a", "of a", "end of a", "tombstone"), CLOSED),
        (("of a", "tombstone", "message", "first copy"), Tail("a", 0, False, True, False)),
        (("of a", "of b"), Tail("b", 1, False, False, False)),
        (("tombstone", "message"), SILENT),
    ],
)
def test_debezium_says_where_transactions_end(said: tuple[str, ...], expected: Tail) -> None:
    assert _decoded_tail(DebeziumDecoder(("id",)), [DEBEZIUM[name] for name in said]) == expected


def _decoded_tail(decoder: ChangeDecoder, values: list[Any]) -> Tail:
    return decoder.decode(records([json.dumps(value).encode() for value in values]), None).tail


def test_the_end_of_a_transaction_is_not_a_change() -> None:
    names = ("of a", "end of a", "end of none", "end with a row", "last of a")
    bodies = [json.dumps(ENVELOPES[name]).encode() for name in names]
    found = EnvelopeDecoder(("id",)).decode(records(bodies), None)
    assert found.changes["seq_num"].to_pylist() == [0, 4]
    assert found.changes["txn"].to_pylist() == ["a", "a"]
    assert found.ignored == 1
    assert found.dead_letters["seq_num"].to_pylist() == [2, 3]
