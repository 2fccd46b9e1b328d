"""Conformance tests for change decoders. Subclass and supply a decoder and record bodies.

    class TestMine(ChangeDecoderConformance):
        @pytest.fixture
        def decoder(self): return MyDecoder(("id",))
        def body(self, change): return my_bytes(change)

The kit's table has the key field `id` and the columns `name`, `amount` and `at`.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from streamfold.archive.schema import TableSchema
from streamfold.errors import InvalidError
from streamfold.extras import needing_extra
from streamfold.snapshotter.decoding import (
    OPS,
    ChangeDecoder,
    Decoded,
    decoded_schema,
    parse_ddl,
)

with needing_extra("testing"):
    import pyarrow as pa
    import pytest

TABLE = parse_ddl("id BIGINT NOT NULL, name STRING, amount DECIMAL(12,2), at TIMESTAMP", ["id"])
ROW: dict[str, Any] = {"id": 7, "name": "Ada", "amount": "12.50", "at": "2026-01-31T12:00:00Z"}


@dataclass(frozen=True, slots=True)
class Sample:
    """A change to encode as a record body. `op` is insert, update or delete."""

    op: str
    row: dict[str, Any] = field(default_factory=lambda: dict(ROW))


def records(bodies: Sequence[bytes], first: int = 0, headers: Any = None) -> pa.Table:
    """Return records of one stream, laid out as the Spark source delivers them."""
    pair = pa.struct([("name", pa.binary()), ("value", pa.binary())])
    columns = {
        "seq_num": pa.array(range(first, first + len(bodies)), pa.int64()),
        "timestamp": pa.array([0] * len(bodies), pa.timestamp("us", "UTC")),
        "headers": pa.array(headers or [[] for _ in bodies], pa.list_(pair)),
        "body": pa.array(list(bodies), pa.binary()),
    }
    return pa.table(columns)


class ChangeDecoderConformance:
    """Conformance suite. Subclass it for your decoder and set `ops` to the ones it supports."""

    ops: tuple[str, ...] = ("insert", "update", "delete")

    @pytest.fixture
    def decoder(self) -> ChangeDecoder:
        raise NotImplementedError("return the decoder under test")

    def body(self, sample: Sample) -> bytes:
        """Return the record body for this change. A delete may contain only the key."""
        raise NotImplementedError("return what the source would send")

    def decoded(
        self, decoder: ChangeDecoder, samples: Sequence[Sample], schema: TableSchema | None = TABLE
    ) -> Decoded:
        return decoder.decode(records([self.body(sample) for sample in samples]), schema)

    def test_is_a_decoder_and_can_be_sent_to_an_executor(self, decoder: ChangeDecoder) -> None:
        assert isinstance(decoder, ChangeDecoder)
        assert pickle.loads(pickle.dumps(decoder)) == decoder  # noqa: S301 - our own bytes

    def test_no_records_give_no_changes(self, decoder: ChangeDecoder) -> None:
        decoded = decoder.decode(records([]), TABLE)
        assert decoded.changes.schema == decoded_schema(TABLE)
        assert (len(decoded.changes), len(decoded.dead_letters), decoded.ignored) == (0, 0, 0)

    def test_no_records_give_no_schema(self, decoder: ChangeDecoder) -> None:
        assert decoder.decode(records([]), None).schema is None

    def test_every_op_names_its_key_and_brings_its_row(self, decoder: ChangeDecoder) -> None:
        decoded = self.decoded(decoder, [Sample(op) for op in self.ops])
        assert decoded.dead_letters.to_pylist() == []
        changes = decoded.changes.to_pylist()
        assert [change["key"] for change in changes] == [{"id": 7}] * len(self.ops)
        for op, change in zip(self.ops, changes, strict=True):
            assert change["op"] in OPS
            assert (change["op"] == "delete") == (op == "delete") == (change["after"] is None)

    def test_changes_have_exactly_the_schema_that_they_come_with(
        self, decoder: ChangeDecoder
    ) -> None:
        for schema in (TABLE, None):
            decoded = self.decoded(decoder, [Sample("insert"), Sample("delete")], schema)
            assert decoded.schema is not None
            assert decoded.changes.schema == decoded_schema(decoded.schema)
            decoded.changes.validate(full=True)

    def test_values_are_exact(self, decoder: ChangeDecoder) -> None:
        row = ROW | {"id": 2**63 - 1, "amount": "9999999999.99"}
        decoded = self.decoded(decoder, [Sample("insert", row)])
        after = decoded.changes.to_pylist()[0]["after"]
        assert (after["id"], str(after["amount"])) == (2**63 - 1, "9999999999.99")
        assert after["at"].isoformat() == "2026-01-31T12:00:00+00:00"

    def test_order_and_positions_are_those_of_the_stream(self, decoder: ChangeDecoder) -> None:
        samples = [Sample("update", ROW | {"id": number % 3}) for number in range(20)]
        decoded = self.decoded(decoder, samples)
        assert decoded.changes["seq_num"].to_pylist() == list(range(20))
        assert [c["key"]["id"] for c in decoded.changes.to_pylist()] == [n % 3 for n in range(20)]

    def test_the_same_records_give_the_same_answer(self, decoder: ChangeDecoder) -> None:
        samples = [Sample(op, ROW | {"id": n}) for n, op in enumerate(self.ops)]
        assert self.decoded(decoder, samples).changes == self.decoded(decoder, samples).changes

    @pytest.mark.parametrize(
        "body", [b"\x00\xff", b"{", b"[]", b"7", b'"text"', b"{}", b'{"op":"?"}', b'{"a":1}{"b":2}']
    )
    def test_what_cannot_be_decoded_is_a_dead_letter_and_its_neighbours_are_not(
        self, decoder: ChangeDecoder, body: bytes
    ) -> None:
        good = self.body(Sample("insert"))
        decoded = decoder.decode(records([good, body, good], first=40), TABLE)
        assert decoded.changes["seq_num"].to_pylist() == [40, 42]
        letters = decoded.dead_letters.to_pylist()
        assert [(letter["seq_num"], letter["body"]) for letter in letters] == [(41, body)]
        assert letters[0]["reason"]

    def test_two_halves_are_not_one_record(self, decoder: ChangeDecoder) -> None:
        whole = self.body(Sample("insert"))
        halves = [whole[: len(whole) // 2], whole[len(whole) // 2 :], whole + whole]
        decoded = decoder.decode(records([*halves, whole]), TABLE)
        assert decoded.changes["seq_num"].to_pylist() == [3]
        assert decoded.dead_letters["seq_num"].to_pylist() == [0, 1, 2]

    def test_text_that_is_not_utf8_is_a_dead_letter(self, decoder: ChangeDecoder) -> None:
        bad = self.body(Sample("insert")).replace(b"Ada", b"\xff\xfe")
        decoded = decoder.decode(records([bad, self.body(Sample("insert"))]), TABLE)
        assert decoded.dead_letters["seq_num"].to_pylist() == [0]
        assert decoded.changes["seq_num"].to_pylist() == [1]

    def test_line_ends_inside_a_body_mean_nothing(self, decoder: ChangeDecoder) -> None:
        body = self.body(Sample("insert"))
        spread = body.replace(b",", b",\r\n\t").replace(b"{", b"{\n", 1)
        plain, spaced = (decoder.decode(records([b, body]), TABLE).changes for b in (body, spread))
        assert plain == spaced

    def test_a_record_without_its_key_is_a_dead_letter(self, decoder: ChangeDecoder) -> None:
        decoded = self.decoded(decoder, [Sample("insert", ROW | {"id": None}), Sample("insert")])
        assert decoded.dead_letters["seq_num"].to_pylist() == [0]

    def test_commands_of_the_stream_are_not_changes(self, decoder: ChangeDecoder) -> None:
        headers = [[{"name": b"", "value": b"trim"}], [{"name": b"a", "value": b"b"}]]
        bodies = [b"\x00" * 8, self.body(Sample("insert"))]
        decoded = decoder.decode(records(bodies, headers=headers), TABLE)
        assert (decoded.changes["seq_num"].to_pylist(), decoded.ignored) == ([1], 1)
        assert len(decoded.dead_letters) == 0

    def test_a_new_column_widens_the_schema(self, decoder: ChangeDecoder) -> None:
        decoded = self.decoded(decoder, [Sample("insert"), Sample("update", ROW | {"age": 36})])
        assert decoded.schema == TABLE.merged(
            TableSchema.of([*TABLE.arrow, pa.field("age", pa.int64())], ["id"])
        )
        assert [c["after"]["age"] for c in decoded.changes.to_pylist()] == [None, 36]

    def test_an_incompatible_value_stops_and_names_the_column(self, decoder: ChangeDecoder) -> None:
        samples = [Sample("insert"), Sample("insert", ROW | {"name": 5, "at": "never"})]
        with pytest.raises(InvalidError, match=r"(?s)record 1 .*at.*name") as failure:
            self.decoded(decoder, samples)
        assert failure.value.code == "schema_incompatible"

    def test_records_out_of_order_are_refused(self, decoder: ChangeDecoder) -> None:
        backwards = records([self.body(Sample("insert"))] * 2).take([1, 0])
        with pytest.raises(InvalidError, match="seq_num"):
            decoder.decode(backwards, TABLE)
