"""Malformed rows are reported as damage, never as unexpected errors."""

from __future__ import annotations

import pytest

from streamfold.errors import DataCorruptError
from streamfold.store import rows
from streamfold.store.rows import BasinRow, StateRow


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\x81\xadfencing_token\xa3\xff\xff\xff",  # not UTF-8
        pytest.param(
            b"\x81\xa1a" + b"\x91" * 5_000 + b"\xc0", id="an unknown field, nested deeply"
        ),
        b"\x81\xaatrim_point\xa1x",
    ],
)
def test_a_row_that_cannot_be_read_is_damage(value: bytes) -> None:
    with pytest.raises(DataCorruptError, match="StateRow cannot be read"):
        rows.decode(value, StateRow)


def test_a_row_of_a_later_version_keeps_what_is_known() -> None:
    assert rows.decode(b"\x82\xaatrim_point\x05\xa3new\x91\xc0", StateRow) == StateRow(trim_point=5)
    with pytest.raises(DataCorruptError, match="BasinRow"):
        rows.decode(b"\x80", BasinRow)
