"""Plain rows by key."""

from __future__ import annotations

import json
from typing import Any

import pytest

from streamfold.snapshotter.decoding import Decoded, UpsertDecoder, parse_ddl
from streamfold.testing.change_decoder_kit import records

PEOPLE = parse_ddl("id BIGINT NOT NULL, name STRING", ["id"])


def decode(decoder: UpsertDecoder, *bodies: Any, keys: Any = None) -> Decoded:
    raw = [body if isinstance(body, bytes) else json.dumps(body).encode() for body in bodies]
    headers = None
    if keys is not None:
        headers = [[] if key is None else [{"name": b"key", "value": key}] for key in keys]
    return decoder.decode(records(raw, headers=headers), PEOPLE)


def brief(found: Decoded) -> list[tuple[Any, ...]]:
    return [
        (c["op"], c["key"]["id"], (c["after"] or {}).get("name")) for c in found.changes.to_pylist()
    ]


def test_a_row_is_an_update_of_its_key() -> None:
    found = decode(UpsertDecoder(("id",)), {"id": 1, "name": "a"}, {"id": 1, "name": "b"})
    assert brief(found) == [("update", 1, "a"), ("update", 1, "b")]


@pytest.mark.parametrize("key", [b"7", b'{"id": 7}', b' {"id":7}'])
@pytest.mark.parametrize("body", [b"", b"null", b"  "])
def test_an_empty_body_deletes_the_row_that_a_header_names(key: bytes, body: bytes) -> None:
    decoder = UpsertDecoder(("id",), key_header="key")
    assert brief(decode(decoder, body, keys=[key])) == [("delete", 7, None)]


def test_an_empty_body_without_a_key_is_a_dead_letter() -> None:
    for decoder in (UpsertDecoder(("id",)), UpsertDecoder(("id",), key_header="key")):
        found = decode(decoder, b"", {"id": 1})
        assert found.dead_letters["seq_num"].to_pylist() == [0]
        assert found.changes["seq_num"].to_pylist() == [1]


@pytest.mark.parametrize(
    "number", [b"1e401", b"1e999999999999999999999", b"-1e-999999999999999999999"]
)
def test_a_number_that_no_column_holds_makes_a_dead_letter_of_its_record(number: bytes) -> None:
    found = decode(UpsertDecoder(("id",)), b'{"id":1,"name":%b}' % number, {"id": 2})
    assert found.dead_letters["seq_num"].to_pylist() == [0]
    assert found.changes["seq_num"].to_pylist() == [1]


def test_a_header_that_is_not_a_key_is_a_dead_letter() -> None:
    decoder = UpsertDecoder(("id",), key_header="key")
    found = decode(decoder, b"", {"id": 1}, keys=[b"{", None])
    assert found.dead_letters["seq_num"].to_pylist() == [0]
    assert "key" in found.dead_letters["reason"][0].as_py()


@pytest.mark.parametrize(
    ("flag", "op"),
    [
        (True, "delete"),
        ("true", "delete"),
        (False, "update"),
        ("false", "update"),
        (None, "update"),
    ],
)
def test_a_field_may_say_that_the_row_is_deleted(flag: Any, op: str) -> None:
    decoder = UpsertDecoder(("id",), deleted_field="__deleted")
    found = decode(decoder, {"id": 1, "name": "a", "__deleted": flag})
    assert [change[0] for change in brief(found)] == [op]
    assert found.schema == PEOPLE


def test_the_field_is_found_however_its_name_is_spelt() -> None:
    decoder = UpsertDecoder(("id",), deleted_field="__deleted")
    assert brief(decode(decoder, b'{"id":1,"\\u005f_deleted":true}')) == [("delete", 1, None)]


def test_a_field_that_says_neither_is_a_dead_letter() -> None:
    decoder = UpsertDecoder(("id",), deleted_field="__deleted")
    found = decode(decoder, {"id": 1, "__deleted": 3}, {"id": 2})
    assert found.dead_letters["seq_num"].to_pylist() == [0]


def test_the_name_of_the_field_inside_a_value_means_nothing() -> None:
    decoder = UpsertDecoder(("id",), deleted_field="__deleted")
    assert brief(decode(decoder, {"id": 1, "name": "__deleted"})) == [("update", 1, "__deleted")]
