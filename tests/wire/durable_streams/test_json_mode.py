"""JSON streams: only JSON gets in, and its text comes out again."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamfold.errors import InvalidError
from streamfold.wire.durable_streams.content import (
    PLAIN_BYTES,
    check_message,
    join_messages,
    split_messages,
)
from streamfold.wire.json_scan import NESTED_MAX, Limits

repeatable = settings(derandomize=True, deadline=None, max_examples=200)

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
blanks = st.text(" \t\r\n", max_size=3)

NOT_JSON = [
    b"nope",
    b"tru",
    b"True",
    b"undefined",
    b"NaN",
    b"[NaN]",
    b"Infinity",
    b'{"a":-Infinity}',
    b"-",
    b"+1",
    b"01",
    b"-01",
    b"1.",
    b".5",
    b"1e",
    b"1e+",
    b"0x1",
    b"1_000",
    b"1 2",
    b"[1] [2]",
    b"{}{}",
    b"[1,]",
    b"[,1]",
    b"[1 2]",
    b"[1",
    b"]",
    b'{"a":1,}',
    b'{"a"}',
    b"{a:1}",
    b"{1:2}",
    b"{'a':1}",
    b'{"a":1 "b":2}',
    b'"a',
    b'"\\x"',
    b'"\\u12g4"',
    b'"\\u00"',
    b'"\t"',
    b'"a\nb"',
    b'"\x00"',
    b"1\x00",
    b"\x0b1",
    b"\xa01",
    b"// c\n1",
    b"/* c */ 1",
    b"\xef\xbb\xbf1",
    b'\xef\xbb\xbf{"a":1}',
    b"\xff\xfe1\x00",
]
NOT_UTF_8 = [
    b'"\xff"',
    b'{"\xff":1}',
    b'"\xc0\x80"',
    b'"\xed\xa0\x80"',
    b'"\xf4\x90\x80\x80"',
    b'"\xe2\x82"',
    b'["\xe9"]',
]
LONE_SURROGATES = [
    b'"\\ud800"',
    b'"\\udc00"',
    b'"\\ud800\\u0041"',
    b'"\\ud800 \\udc00"',
    b'"\\ud800\\ud800"',
    b'"\\udc00\\ud800"',
    b'{"\\ud800x":1}',
]

LIMITS = Limits(elements=1_000, element_bytes=1_000_000)


def one(body: bytes) -> list[bytes]:
    return split_messages(body, LIMITS, allow_empty=False)


@pytest.mark.parametrize("body", NOT_JSON + NOT_UTF_8 + LONE_SURROGATES)
def test_what_is_not_json_is_refused_however_deep_it_is(body: bytes) -> None:
    for refused in (body, b"[" + body + b"]", b'[{"a":[1,' + body + b"]}]", b" " + body + b"\n"):
        with pytest.raises(InvalidError):
            split_messages(refused, LIMITS, allow_empty=True)
        with pytest.raises(InvalidError):
            check_message(refused)


@pytest.mark.parametrize("body", [b"", b" ", b"\r\n\t"])
def test_an_empty_body_is_not_a_message(body: bytes) -> None:
    with pytest.raises(InvalidError):
        split_messages(body, LIMITS, allow_empty=True)
    with pytest.raises(InvalidError):
        check_message(body)


def _is_valid(body: bytes) -> bool:
    """By Python's parser, set to accept neither NaN nor lone surrogates."""

    def refuse(constant: str) -> Any:
        raise ValueError(constant)

    try:
        json.dumps(json.loads(body.decode(), parse_constant=refuse), ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return False
    return True


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"a":'])
@pytest.mark.parametrize("depth", [NESTED_MAX + 1, 1_000, 100_000])
def test_json_nested_too_deeply_is_refused(opening: bytes, depth: int) -> None:
    deep = nested(opening, depth)
    for body in (deep, deep + b" " * PLAIN_BYTES):  # the second one is split in steps
        with pytest.raises(InvalidError, match="nested too deeply: 512 "):
            one(body)
        with pytest.raises(InvalidError, match="nested too deeply: 512 "):
            check_message(body)
    with pytest.raises(InvalidError):
        one(opening * depth)


def nested(opening: bytes, depth: int) -> bytes:
    closing = opening.translate(bytes.maketrans(b"[{", b"]}"), b'"a:')[::-1]
    return opening * depth + b"1" + closing * depth


@pytest.mark.parametrize("depth", [200, NESTED_MAX])
def test_json_of_reasonable_depth_is_taken(depth: int) -> None:
    body = nested(b"[", depth)
    for taken in (body, body + b" " * PLAIN_BYTES):
        assert one(taken) == [body[1:-1]]
        check_message(taken)


def test_brackets_that_nest_nothing_are_not_counted() -> None:
    wide = b"[" + b",".join([b'{"a":[]}'] * 900) + b"]"
    text = b'["' + b"[{" * 900 + b'"]'
    assert len(one(wide)) == 900
    assert one(text) == [text[1:-1]]
    check_message(wide)
    check_message(text)


@pytest.mark.parametrize(
    ("body", "messages"),
    [
        (b'{"a":1}', [b'{"a":1}']),
        (b"1", [b"1"]),
        (b"null", [b"null"]),
        (b'"[1,2]"', [b'"[1,2]"']),
        (b"[1,2]", [b"1", b"2"]),
        (b"[[1,2],[3,4]]", [b"[1,2]", b"[3,4]"]),
        (b"[[[1,2,3]]]", [b"[[1,2,3]]"]),
        (b"[[]]", [b"[]"]),
        (b'[{"a":1},"x",null,true]', [b'{"a":1}', b'"x"', b"null", b"true"]),
        (b' [ 1 ,\r\n\t{ "a" : [ ] } ] \n', [b"1", b'{"a":[]}']),
    ],
)
def test_an_array_is_flattened_one_level(body: bytes, messages: list[bytes]) -> None:
    assert one(body) == messages


def test_an_empty_array_may_create_but_not_append() -> None:
    assert split_messages(b" [ ] ", LIMITS, allow_empty=True) == []
    with pytest.raises(InvalidError, match="empty array"):
        one(b"[]")


@pytest.mark.parametrize(
    "text",
    [
        b"123456789012345678901234567890",
        b"0.1000",
        b"-0",
        b"-0.0e-0",
        b"1E5",
        b"1e+05",
        b"1e999",
        b"9" * 5000,
        b"1." + b"3" * 5000,
        b'{"a":1,"a":2,"b":0,"a":3}',
        b'{"z":1,"a":2}',
        b'"\\/\\u00e9\\u0041\\ud83d\\ude00"',
        b'"  spaces \\t kept  "',
        b'{" a : [ ":" { , "}',
        '"é\u2028\U0001f600\x7f"'.encode(),
        b'""',
        b"{}",
    ],
)
def test_the_text_of_a_message_is_kept(text: bytes) -> None:
    assert one(text) == [text]
    assert one(b"[ " + text + b" , " + text + b" ]") == [text, text]
    check_message(text)


@repeatable
@given(values)
def test_messages_mean_what_the_body_meant(value: Any) -> None:
    body = json.dumps(value, ensure_ascii=False, indent=2).encode(errors="surrogatepass")
    messages = split_messages(body, LIMITS, allow_empty=True)
    expected = value if isinstance(value, list) else [value]
    assert [json.loads(message) for message in messages] == expected
    assert json.loads(join_messages(messages)) == expected


@repeatable
@given(st.lists(values, min_size=1, max_size=6), st.data())
def test_only_whitespace_between_tokens_is_lost(array: list[Any], data: st.DataObject) -> None:
    tight = [json.dumps(value, separators=(",", ":")) for value in array]
    tokens = re.findall(r'"(?:[^"\\]|\\.)*"|[\[\]{},:]|[^\s"\[\]{},:]+', f"[{','.join(tight)}]")
    loose = "".join(token + data.draw(blanks) for token in tokens)
    assert one(loose.encode()) == [text.encode() for text in tight]


@repeatable
@given(
    st.binary(max_size=30)
    | st.text('[]{}:,"\\ud80c1.eE+- \ntruefalsn', max_size=30).map(str.encode)
)
def test_anything_else_is_refused_as_invalid(body: bytes) -> None:
    try:
        messages = split_messages(body, LIMITS, allow_empty=True)
    except InvalidError:
        assert not _is_valid(body)
    else:
        assert _is_valid(body)
        assert _is_valid(join_messages(messages))


@pytest.mark.parametrize("check", [check_message, one])
def test_a_refusal_says_where(check: Callable[[bytes], object]) -> None:
    with pytest.raises(InvalidError, match="byte 3"):
        check(b"[1,}")
    with pytest.raises(InvalidError, match="byte 2"):
        check(b'["\xff"]')


def test_a_read_is_one_array() -> None:
    assert join_messages([]) == b"[]"
    assert join_messages([b"1"]) == b"[1]"
    assert join_messages(iter([b"[]", b'{"a":1}'])) == b'[[],{"a":1}]'
