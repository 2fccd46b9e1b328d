"""Reads return the stored records without commands."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamfold.errors import DataCorruptError
from streamfold.model.positions import SeqNum, Timestamp
from streamfold.model.records import Header, SequencedRecord, is_command
from streamfold.server.durable_streams.content import bodies_of, join
from streamfold.store.read.requests import ReadBatch
from tests.records.reference import encode_records
from tests.server.durable_streams.conftest import token

#: A header without a name, first, makes a record a command.
HEADERS = st.lists(
    st.builds(Header, st.sampled_from((b"", b"name")), st.binary(max_size=3)), max_size=3
)
CONTENTS = st.lists(st.tuples(HEADERS, st.binary(max_size=10)), max_size=6)


def bodies(records: Sequence[SequencedRecord]) -> list[bytes]:
    return [record.body for record in records if not is_command(record)]


def batch_of(contents: list[tuple[list[Header], bytes]]) -> ReadBatch:
    records = [
        SequencedRecord(SeqNum(7 + index), Timestamp(5), tuple(headers), body)
        for index, (headers, body) in enumerate(contents)
    ]
    return ReadBatch((encode_records(records),), 7, len(records), 0, None)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.lists(CONTENTS, max_size=3))
def test_bodies_are_those_of_the_records_that_are_not_commands(
    pages: list[list[tuple[list[Header], bytes]]],
) -> None:
    batches = [batch_of(contents) for contents in pages]
    parts = [body for batch in batches for body in bodies(batch.records())]
    assert [body for batch in batches for body in bodies_of(batch)] == parts
    assert join(batches, "application/json") == b"[%b]" % b",".join(parts)
    assert join(batches, "text/plain") == b"".join(parts)


def test_offsets_of_state_messages_skip_commands_whatever_decodes_the_records() -> None:
    change = b'{"headers":{"operation":"insert"}}'
    command = ([Header(b"", b"fence")], b"token")
    plain, mixed = batch_of([([], change)] * 2), batch_of([([], change), command, ([], change)])
    offsets = [
        [message["headers"]["offset"] for message in json.loads(join([batch], "application/json"))]
        for batch in (plain, mixed)
    ]
    assert offsets == [[token(8), token(9)], [token(8), token(10)]]


@settings(derandomize=True, max_examples=100, deadline=None)
@given(CONTENTS.filter(bool), st.data())
def test_damaged_records_give_no_bodies_that_python_would_not_give(
    contents: list[tuple[list[Header], bytes]], data: st.DataObject
) -> None:
    damaged = bytearray(batch_of(contents).payload())
    damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    batch = ReadBatch((bytes(damaged),), 7, len(contents), 0, None)
    try:
        expected = bodies(batch.records())
    except DataCorruptError:
        with pytest.raises(DataCorruptError):
            bodies_of(batch)
    else:
        assert bodies_of(batch) == expected
