from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamfold.snapshotter.config.hocon import HoconError, parse_hocon


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("a = 1", {"a": "1"}),
        ("a : b c d # note", {"a": "b c d"}),
        ("a { b = 1, c = 2 }", {"a": {"b": "1", "c": "2"}}),
        ("a.b.c = x\na.b.d = y", {"a": {"b": {"c": "x", "d": "y"}}}),
        ('{"a": ["x", 2, true, null],}', {"a": ["x", "2", "true", None]}),
        ("a = [ {b = 1}\n {b = 2} ]", {"a": [{"b": "1"}, {"b": "2"}]}),
        ("a { b = 1 }\na { c = 2 }", {"a": {"b": "1", "c": "2"}}),
        ("a = 1\na = 2", {"a": "2"}),
        ('a = "x # no // note \\n\\u00e9"', {"a": "x # no // note \né"}),
        ('a = """two\n"lines" """', {"a": 'two\n"lines" '}),
        ("// all\n# notes\n", {}),
        ("/* all */ a /* is */ = /* b */ 1 /* c\nd */ b = 2", {"a": "1", "b": "2"}),
        ("a { /* named profiles */ }\nb = [ /* none */ ]", {"a": {}, "b": []}),
        ("a = x/y /* not: { */, b = z", {"a": "x/y", "b": "z"}),
        ('a = "/* text */" /***/', {"a": "/* text */"}),
        ("a = localhost:4001", {"a": "localhost:4001"}),
        ('"a.b" = 1', {"a.b": "1"}),
        ("a =\n  1", {"a": "1"}),
        ("a = ./here-and_there/x.y", {"a": "./here-and_there/x.y"}),
        ("a { }\nb = []", {"a": {}, "b": []}),
        ("a [{ b = 1 }\n{ b = 2 }]", {"a": [{"b": "1"}, {"b": "2"}]}),
    ],
)
def test_what_published_files_use_is_read(text: str, expected: dict[str, Any]) -> None:
    assert parse_hocon(text) == expected


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("a = ${HOME}", 1, "substitutions"),
        ("\n\na = x${?B}", 3, "substitutions"),
        ('include "other.conf"', 1, "include"),
        ("a {\n b = 1", 2, "missing"),
        ("a = [1\n", 2, "missing"),
        ("a", 1, "followed by"),
        ("a = ", 1, "value"),
        ("a = 1 }", 1, "comma"),
        ('a = "open', 1, "value"),
        ('a = "x" y', 1, "comma"),
        ("a += 1", 1, "followed by"),
        ("= 1", 1, "name"),
        ("{a = 1} b", 1, "unexpected"),
        ("a = " + "[" * 100, 1, "nested"),
        ('a = """x', 1, "must end"),
        ("a = 1\n/* open", 2, "must end with"),
        ("a = 1 /* open", 1, "must end with"),
        ("a = s3://bucket/x", 1, "quotes"),
    ],
)
def test_everything_else_is_refused_with_its_line(text: str, line: int, what: str) -> None:
    with pytest.raises(HoconError, match=rf"line {line}: .*{what}"):
        parse_hocon(text)


JSON = st.recursive(
    st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1), inner, max_size=3)
    ),
    max_leaves=10,
)


@settings(deadline=None)
@given(st.dictionaries(st.text(min_size=1), JSON, max_size=4), st.sampled_from([None, 2]))
def test_json_is_hocon(value: dict[str, Any], indent: int | None) -> None:
    assert parse_hocon(json.dumps(value, indent=indent)) == value


@settings(deadline=None)
@given(st.text("ab=:{}[],.\"'#/* \n\\$+", max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        parse_hocon(text)
    except HoconError:
        return
