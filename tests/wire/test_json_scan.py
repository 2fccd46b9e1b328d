"""JSON split in steps gives the same pieces and errors as one msgspec call."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest

from streamfold.errors import InvalidError, TooLargeError
from streamfold.wire.json_scan import GROUP, Limits, lay_out, split_json

ENOUGH = Limits(elements=10_000, element_bytes=1 << 20)
TOKENS = (
    b"[", b"]", b"{", b"}", b",", b":", b'"', b"\\", b"\\\\", b'\\"', b" ", b"\n", b"1", b"-", b".5",
    b"e3", b"true", b"null", b'"a"', b'"b c"', b'"\\u00e9"', b"\xc3\xa9", b"\xff", b"[1,2]",
    b'{"a":[1]}', b'"x,[y"',
)  # fmt: skip


class Bodies:
    """JSON, and what is almost JSON, from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def value(self, depth: int = 0) -> Any:
        kind = self.random.random()
        if depth > 3 or kind < 0.4:
            return self.random.choice([1, -2.5, "a,b", '[\\"', ' " ', "", None, True, "é\\"])
        if kind < 0.7:
            return [self.value(depth + 1) for _ in range(self.random.randint(0, 4))]
        return {self.random.choice('ab"\\'): self.value(depth + 1) for _ in range(2)}

    def body(self) -> bytes:
        choose = self.random.choice
        if self.random.random() < 0.5:
            tokens = b"".join(self.random.choices(TOKENS, k=self.random.randint(0, 12)))
            return choose((tokens, b"[%b]" % tokens))
        indent, escape = choose((None, 1)), choose((True, False))
        text = bytearray(json.dumps(self.value(), indent=indent, ensure_ascii=escape).encode())
        for _ in range(choose((0, 0, 1, 2))):
            at = self.random.randrange(len(text) + 1)
            text[at : at + choose((0, 1))] = choose(TOKENS)
        return bytes(text)


def reference(body: bytes) -> tuple[bool, list[bytes]] | None:
    try:
        body.decode()
        text = msgspec.json.format(body, indent=-1)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if not text.startswith(b"["):
        return False, [text]
    return True, list(map(bytes, msgspec.json.decode(text, type=list[msgspec.Raw])))


def scanned(body: bytes, block: int) -> tuple[bool, list[bytes]] | None:
    try:
        pieces = split_json(body, ENOUGH, block=block)
    except InvalidError:
        return None
    return pieces.is_array, pieces.texts


@pytest.mark.parametrize("block", [1, 3, 17, 1 << 18])
def test_a_scan_finds_what_a_parser_finds_wherever_blocks_end(block: int) -> None:
    bodies, valid = Bodies(block), 0
    for _ in range(600):
        body = bodies.body()
        expected = reference(body)
        assert scanned(body, block) == expected, body
        valid += expected is not None
    assert 150 < valid < 450


@pytest.mark.parametrize("element", [b"1", b'"%b"' % (b"x" * GROUP), b'{"a":[1, 2]}'])
def test_elements_are_the_same_however_they_are_grouped(element: bytes) -> None:
    compact = element.replace(b" ", b"")
    assert split_json(b"[%b]" % b" , ".join([element] * 9), ENOUGH).texts == [compact] * 9
    for broken in (b"[%b", b"[%b,]", b"[,%b]", b"[%b}", b"[%b]]", b"[%b] 1"):
        with pytest.raises(InvalidError):
            split_json(broken % b",".join([element] * 9), ENOUGH)


def test_too_many_elements_and_too_long_ones_are_refused_before_they_are_taken_apart() -> None:
    with pytest.raises(TooLargeError, match="more than 3 messages"):
        split_json(b"[1,2,3,4", Limits(3, 100))
    with pytest.raises(TooLargeError, match="at most 5"):
        split_json(b'[1,"123456"]', Limits(3, 5))
    with pytest.raises(TooLargeError, match="at most 5"):
        split_json(b'{"a":1', Limits(3, 5))
    assert split_json(b'{"a":1,"b":2,"c":3,"d":4}', Limits(3, 100)).is_array is False


def test_whitespace_never_joins_what_it_held_apart() -> None:
    for body in (b"1 2", b"[1 2]", b"tru e", b"- 1", b"1 .5", b'{"a" 1}', b"[1\n\t2]"):
        for block in (1, 2, 1 << 18):
            with pytest.raises(InvalidError):
                split_json(body, ENOUGH, block=block)


def test_members_of_an_object_are_laid_out() -> None:
    layout = lay_out(b' { "a" : [1, {"b": ","}] , "c":"}" } ', b"{}", 2)
    assert layout is not None
    assert layout.parts() == [b'"a":[1,{"b":","}]', b'"c":"}"']
    with pytest.raises(InvalidError):
        lay_out(b"[1]", b"{}", 2)
    assert lay_out(b"[1,2,3]", b"[]", 2) is None
