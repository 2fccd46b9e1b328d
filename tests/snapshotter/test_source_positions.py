from __future__ import annotations

import pyarrow as pa

from streamfold.archive import SourceRange
from streamfold.snapshotter.source_positions import SourcePositions, SourceSpan, joined

#: Headers of a record: those of a change, of a row of a first copy, of its end.
Headers = list[tuple[str, str]]


def change(lsn: str) -> Headers:
    return [("lsn", lsn), ("index", "0")]


def copied(lsn: str, rows: int = 1) -> Headers:
    return [("lsn", lsn), ("copy", str(rows)), ("key", '["1"]')]


def copy_end(lsn: str, *more: tuple[str, str]) -> Headers:
    return [("lsn", lsn), ("copy", "end"), *more]


def span(*records: Headers) -> SourceSpan | None:
    kind = pa.list_(pa.struct([("name", pa.binary()), ("value", pa.binary())]))
    plain = [[{"name": n.encode(), "value": v.encode()} for n, v in r] for r in records]
    found = SourcePositions.of(pa.array(plain, kind))
    return None if found is None else found.span(0, len(records), 0)


def test_the_span_of_changes_is_from_the_least_to_the_newest_commit() -> None:
    found = span(change("0/9"), change("0/A0"), change("1/0"), [("", "fence")], change("0/ff"))
    assert found == SourceSpan(0x9, 1 << 32, copying=False, restarts=False)


def test_records_without_positions_have_no_span() -> None:
    assert span([], [("kind", "x")]) is None
    assert span([("lsn", "12")], [("lsn", "0/"), ("copy", "1")]) is None


def test_a_copy_is_complete_at_its_end_and_as_new_as_its_last_snapshot() -> None:
    assert span(copied("0/5"), copied("0/5")) == SourceSpan(5, 5, copying=True, restarts=False)
    ended = span(copied("0/5"), copy_end("0/5", ("snapshot", "0/8")))
    assert ended == SourceSpan(5, 8, copying=False, restarts=False)


def test_nothing_before_a_repeated_copy_counts() -> None:
    found = span(change("0/90"), copied("0/0", 0), copied("0/50"))
    assert found == SourceSpan(0, 0x50, copying=True, restarts=True, begins=True)
    assert found.range_after(SourceRange(last="0/90")).last == "0/50"


def test_the_start_of_a_copy_is_known_by_its_record_without_rows() -> None:
    start, rest = span(copied("0/5", 0), copied("0/5", 1)), span(copied("0/5", 10))
    assert start is not None
    assert rest is not None
    assert (start.begins, rest.begins) == (True, False)
    assert start.then(rest).begins
    assert rest.then(start).begins


def test_spans_of_consecutive_runs_join_and_never_go_back() -> None:
    runs = [
        span(copied("0/5")),
        None,
        span(copy_end("0/5", ("snapshot", "0/9"))),
        span(change("0/7")),
    ]
    assert joined(runs) == SourceSpan(5, 9, copying=False, restarts=False)
    assert joined([None, None]) is None
    last = span(change("0/7"))
    assert last is not None
    assert last.range_after(SourceRange(last="0/9")).last == "0/9"
