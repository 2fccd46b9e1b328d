"""PostgreSQL values become the same JSON as in the reference, or are rejected like there."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from streamfold.ingest.postgres import values
from tests.ingest import reference_values
from tests.ingest.test_first_copy import TYPED

OIDS = sorted(TYPED)
#: Bytes that values consist of, so that many of them nearly are one.
PIECES = st.sampled_from(
    (b"0", b"1", b"9", b"2026", b"-", b"-01", b"-31", b" ", b":00", b"12:00:00", b".", b".5",
     b"e+", b"e5", b"+00", b" BC", b"\\x", b"ff", b"infinity", b"NaN", b"t", b'"', b"\\", b"\x01",
     "é".encode(), b"\xff")
)  # fmt: skip
texts = st.one_of(
    st.lists(PIECES, max_size=8).map(b"".join),
    st.sampled_from([value for typed in TYPED.values() for value in typed]),
)


def outcome(to_json: values.ToJson, raw: bytes) -> bytes | str:
    try:
        return to_json(raw)
    except ValueError:
        return "refused"


@settings(derandomize=True, deadline=None, max_examples=500)
@given(st.sampled_from(OIDS), texts)
@example(1114, b"294276-12-31 23:59:59.999999")  # PostgreSQL's last, beyond 64 bits of microseconds
@example(1184, b"4713-01-01 00:00:00+00 BC")
def test_values_are_those_of_the_reference(oid: int, raw: bytes) -> None:
    expected = outcome(reference_values.to_json(oid), raw)
    assert outcome(values.to_json(oid), raw) == expected
