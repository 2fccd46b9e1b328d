from __future__ import annotations

import json

import pytest

from streamfold.snapshotter.decoding import (
    ChangeDecoder,
    DebeziumDecoder,
    EnvelopeDecoder,
    UpsertDecoder,
)
from streamfold.testing.change_decoder_kit import ChangeDecoderConformance, Sample

LETTERS = {"insert": "c", "update": "u", "delete": "d", "read": "r"}


class TestEnvelope(ChangeDecoderConformance):
    ops = ("insert", "update", "delete", "read")

    @pytest.fixture
    def decoder(self) -> ChangeDecoder:
        return EnvelopeDecoder(("id",))

    def body(self, sample: Sample) -> bytes:
        letter = LETTERS[sample.op]
        image = {"key": {"id": sample.row["id"]}} if letter == "d" else {"after": sample.row}
        return json.dumps({"op": letter, **image}).encode()


class TestDebezium(ChangeDecoderConformance):
    ops = ("insert", "update", "delete", "read")

    @pytest.fixture
    def decoder(self) -> ChangeDecoder:
        return DebeziumDecoder(("id",))

    def body(self, sample: Sample) -> bytes:
        gone = sample.op == "delete"
        images = {"before": {"id": sample.row["id"]} if gone else None}
        images["after"] = None if gone else sample.row
        return json.dumps({"op": LETTERS[sample.op], **images, "source": {"lsn": 5}}).encode()


class TestDebeziumWithSchema(TestDebezium):
    def body(self, sample: Sample) -> bytes:
        payload = json.loads(super().body(sample))
        return json.dumps({"schema": {"type": "struct"}, "payload": payload}).encode()


class TestUpserts(ChangeDecoderConformance):
    ops = ("update", "delete")

    @pytest.fixture
    def decoder(self) -> ChangeDecoder:
        return UpsertDecoder(("id",), deleted_field="__deleted")

    def body(self, sample: Sample) -> bytes:
        row = {"id": sample.row["id"], "__deleted": True} if sample.op == "delete" else sample.row
        return json.dumps(row).encode()
