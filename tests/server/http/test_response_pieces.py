"""Answers are handed over in pieces of one size, whatever parts they are made of."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streamfold.server.http.response_stream import Buffer, _pieces

PARTS = st.lists(
    st.binary(max_size=30).map(lambda data: memoryview(data)) | st.binary(max_size=30), max_size=6
)


@given(PARTS, st.integers(1, 20), st.integers(0, 40))
def test_pieces_are_the_parts_without_what_is_kept_back(
    parts: list[Buffer], size: int, kept: int
) -> None:
    whole = b"".join(parts)
    pieces = list(_pieces(parts, size, kept))
    assert b"".join(pieces) == whole[: max(0, len(whole) - kept)]
    assert all(isinstance(piece, bytes) for piece in pieces)
    assert all(len(piece) == size for piece in pieces[:-1])
    assert all(0 < len(piece) <= size for piece in pieces)


def test_bytes_of_one_piece_are_not_copied() -> None:
    part = b"x" * 20
    assert next(_pieces([part], 20, 0)) is part
