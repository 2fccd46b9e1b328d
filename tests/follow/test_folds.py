from __future__ import annotations

import io
import json
from typing import Any

import pytest

from streamfold.errors import InvalidError
from streamfold.follow import Progress, TerminalBar
from streamfold.follow.folds import counter, find_fold, last_value, merge_patch
from streamfold.model.positions import SeqNum, Timestamp
from streamfold.model.records import Header, SequencedRecord


def record(body: str | bytes, **headers: str) -> SequencedRecord:
    pairs = tuple(Header(name.encode(), value.encode()) for name, value in headers.items())
    return SequencedRecord(
        SeqNum(7), Timestamp(0), pairs, body.encode() if isinstance(body, str) else body
    )


# The examples of RFC 7396, appendix A.
MERGES: list[tuple[Any, Any, Any]] = [
    ({"a": "b"}, {"a": "c"}, {"a": "c"}),
    ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
    ({"a": "b"}, {"a": None}, {}),
    ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
    ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
    ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
    ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
    ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
    (["a", "b"], ["c", "d"], ["c", "d"]),
    ({"a": "b"}, ["c"], ["c"]),
    ({"a": "foo"}, None, None),
    ({"a": "foo"}, "bar", "bar"),
    ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
    ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
    ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
]


@pytest.mark.parametrize(("target", "patch", "result"), MERGES)
def test_merge_patch_does_what_its_rfc_shows(target: Any, patch: Any, result: Any) -> None:
    assert merge_patch(target, record(json.dumps(patch))) == result


def test_last_value_by_field_keeps_the_newest_and_removes() -> None:
    fold, state = last_value("id"), dict[str, Any]()
    for body in ('{"id":1,"n":1}', '{"id":2,"n":1}', '{"id":1,"n":2}', '{"id":2}'):
        state = fold(state, record(body))
    assert state == {"1": {"id": 1, "n": 2}}


def test_last_value_by_header_keeps_the_newest_and_removes() -> None:
    fold, state = last_value(header="k"), dict[str, Any]()
    for body, key in (("1", "a"), ("[2]", "b"), ("3", "a"), ("", "b")):
        state = fold(state, record(body, k=key))
    assert state == {"a": 3}


def test_counter_adds() -> None:
    total = 0
    for body in ("", "5", "-2", "+10"):
        total = counter(total, record(body))
    assert total == 14


@pytest.mark.parametrize(
    ("fold", "body", "text"),
    [
        (counter, "many", "whole numbers"),
        (merge_patch, "{", "not JSON"),
        (merge_patch, b'"\xff"', "not JSON"),
        pytest.param(merge_patch, "[" * 100_000, "not JSON", id="deeply nested"),
        (last_value("id"), "[]", "not a JSON object"),
        (last_value("id"), '{"x":1}', "no field 'id'"),
        (last_value(header="k"), "1", "no header 'k'"),
    ],
)
def test_a_record_that_does_not_fit_is_named(fold: Any, body: str | bytes, text: str) -> None:
    with pytest.raises(InvalidError, match=rf"record 7.*{text}"):
        fold({} if fold is not counter else 0, record(body))


def test_folds_are_found_by_name() -> None:
    assert find_fold("counter").initial() == 0
    assert find_fold("last-value", key_field="id").initial() == {}
    assert find_fold("streamfold.follow.folds:counter", initial="5").initial() == 5
    with pytest.raises(InvalidError, match="is unknown"):
        find_fold("sum")
    with pytest.raises(InvalidError, match="cannot be loaded"):
        find_fold("streamfold.follow.folds:absent")
    for initial in ("{", "\udcff", "[" * 100_000):
        with pytest.raises(InvalidError, match="first state is not JSON"):
            find_fold("counter", initial=initial)


class Terminal(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def draw(*, terminal: bool, seconds: float) -> str:
    """What a restore shows that takes so long."""
    clock = iter([0.0, 0.0, seconds, seconds + 1, seconds + 1, seconds + 1])
    out = Terminal(terminal)
    bar = TerminalBar(out, lambda: next(clock))
    bar(Progress("load", 1, 10))
    bar(Progress("replay", 500, 1000))
    bar(Progress("done", 1000, 1000))
    return out.getvalue()


def test_a_bar_is_shown_only_for_long_restores_on_a_terminal() -> None:
    assert "500/1,000 records" in draw(terminal=True, seconds=5)
    assert draw(terminal=True, seconds=5).endswith("\r\x1b[K")
    assert draw(terminal=True, seconds=0.5) == ""
    assert draw(terminal=False, seconds=5) == ""
