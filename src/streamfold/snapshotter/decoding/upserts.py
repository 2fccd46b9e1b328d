"""Decodes plain rows, of which the last one of a key counts.

The body of a record is the row. A row is deleted by an empty body with the key in a header, or by a
field of the row that says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
import pyarrow as pa

from streamfold.archive.schema import TableSchema
from streamfold.snapshotter.decoding.arrow_rows import ABSENT, RowReading
from streamfold.snapshotter.decoding.assembly import STOP, Assembly
from streamfold.snapshotter.decoding.decoder import Decoded, DecoderOptions, DecoderType
from streamfold.snapshotter.decoding.records import UNREADABLE, RawChanges, RecordIntake

_decode = msgspec.json.Decoder(msgspec.Raw).decode
_decode_row = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.encode
#: How sources mark deleted rows; some have only text.
_YES, _NO = (b"true", b'"true"'), (b"false", b'"false"', b"null")


@dataclass(frozen=True, slots=True)
class UpsertDecoder:
    """Decodes plain rows."""

    key_fields: tuple[str, ...]
    mismatch: str = STOP
    #: Header with the key as JSON, for empty bodies: an object, or the value of a single field.
    key_header: str | None = None
    #: Field of a row that says whether it is deleted; not a column.
    deleted_field: str | None = None

    kind = "upserts"

    def decode(self, records: pa.RecordBatch | pa.Table, schema: TableSchema | None) -> Decoded:
        intake = RecordIntake.of(records)
        indices, bodies = intake.parsed(_body)
        rows = [*bodies]
        deleted = [body == ABSENT for body in bodies]
        if self.deleted_field is not None:
            self._take_flags(intake, indices, rows, deleted)
        changes = RawChanges(
            indices,
            ["delete" if gone else "update" for gone in deleted],
            self._keys(intake, indices),
            [row if gone else ABSENT for row, gone in zip(rows, deleted, strict=True)],
            [ABSENT if gone else row for row, gone in zip(rows, deleted, strict=True)],
            [()] * len(indices),
            [None] * len(indices),
        )
        changes = changes.only(
            np.array([index not in intake.letters for index in indices], np.bool_)
        )
        return Assembly(self.key_fields, RowReading(), self.mismatch).decoded(
            intake, changes, schema
        )

    def _keys(self, intake: RecordIntake, indices: Sequence[int]) -> list[msgspec.Raw]:
        if self.key_header is None:
            return [ABSENT] * len(indices)
        headers = intake.header_values(self.key_header.encode())
        keys = []
        for index in indices:
            try:
                keys.append(self._key(headers[index]))
            except UNREADABLE as error:
                intake.refuse(index, f"header {self.key_header!r}: {error}")
                keys.append(ABSENT)
        return keys

    def _key(self, header: bytes | None) -> msgspec.Raw:
        if header is None:
            return ABSENT
        raw = _decode(header)
        if bytes(raw).lstrip()[:1] == b"{" or len(self.key_fields) > 1:
            return raw
        return msgspec.Raw(_encode({self.key_fields[0]: raw}))

    def _take_flags(
        self,
        intake: RecordIntake,
        indices: Sequence[int],
        rows: list[msgspec.Raw],
        deleted: list[bool],
    ) -> None:
        """Remove the field from the rows that have it; other rows are not parsed."""
        name = str(self.deleted_field)
        spelt = name.encode()
        for number in [n for n, row in enumerate(rows) if _may_hold(row, spelt)]:
            try:
                rows[number], deleted[number] = self._without_flag(rows[number], name)
            except UNREADABLE as error:
                intake.refuse(indices[number], str(error))

    def _without_flag(self, body: msgspec.Raw, name: str) -> tuple[msgspec.Raw, bool]:
        row = _decode_row(body)
        flag = bytes(row.pop(name, ABSENT))
        if flag not in _YES + _NO:
            raise ValueError(f"field {name!r} is neither true nor false")
        return msgspec.Raw(_encode(row)), flag in _YES


def _may_hold(row: msgspec.Raw, name: bytes) -> bool:
    text = bytes(row)
    return name in text or b"\\u" in text


def _body(body: bytes) -> msgspec.Raw:
    """Return the row; ABSENT for an empty body."""
    return _decode(body) if body and not body.isspace() else ABSENT


class UpsertOptions(DecoderOptions, frozen=True, kw_only=True):
    key_header: Annotated[
        str | None,
        msgspec.Meta(
            description="header with the key as JSON: an object, or the value of a single key field; "
            "needed for empty bodies"
        ),
    ] = None
    deleted_field: Annotated[
        str | None,
        msgspec.Meta(
            description="field that says with `true` that the row is deleted, such as `__deleted`; it "
            "is not a column"
        ),
    ] = None


def _open(keys: tuple[str, ...], options: UpsertOptions) -> UpsertDecoder:
    return UpsertDecoder(keys, options.mismatch, options.key_header, options.deleted_field)


UPSERTS = DecoderType(
    id=UpsertDecoder.kind,
    summary="rows, of which the last one of a key counts",
    options=UpsertOptions,
    open=_open,
)
