"""Bootstrap bodies, parsed back by the standard library, and digests of snapshots."""

from __future__ import annotations

import random
from email import message_from_bytes, policy

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from streamfold.errors import InvalidError
from streamfold.wire.durable_streams.responses import (
    PART_END,
    SnapshotDigest,
    boundary,
    closing,
    multipart_type,
    part_head,
)

repeatable = settings(derandomize=True, deadline=None, max_examples=100)

GOLDEN = "1aa4691106e222f5cbdf8dfa48e0acede3c87ce511904f0bbe72a2bc247f9010"
BOUNDARY = boundary(bytes(range(16)))


def whole(parts: list[tuple[str, bytes]]) -> bytes:
    body = b"".join(part_head(BOUNDARY, kind) + data + PART_END for kind, data in parts)
    return body + closing(BOUNDARY)


def parse(body: bytes) -> list[tuple[str, bytes]]:
    head = f"Content-Type: {multipart_type(BOUNDARY)}\r\n\r\n".encode()
    message = message_from_bytes(head + body, policy=policy.HTTP)
    assert not message.defects
    parts = []
    for part in message.iter_parts():
        data = part.get_payload(decode=True)
        assert isinstance(data, bytes)
        assert part.keys() == ["Content-Type"]
        parts.append((str(part["Content-Type"]), data))
    return parts


def test_the_bytes_are_the_ones_of_the_protocol() -> None:
    body = whole([("image/png", b"SNAP"), ("application/json", b'{"a":1}\n')])
    separator = BOUNDARY.encode()
    assert body == (
        b"--" + separator + b"\r\nContent-Type: image/png\r\n\r\nSNAP\r\n"
        b"--" + separator + b'\r\nContent-Type: application/json\r\n\r\n{"a":1}\n\r\n'
        b"--" + separator + b"--\r\n"
    )


@repeatable
@given(
    st.lists(
        st.tuples(
            # The standard library takes other types apart further, or recodes them.
            st.just("application/octet-stream"),
            st.binary(max_size=60)
            | st.sampled_from([b"\r\n", b"--", b"\r\n--x--\r\n", b"--" + BOUNDARY[:-1].encode()]),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_parts_come_back_as_they_were(parts: list[tuple[str, bytes]]) -> None:
    assert parse(whole(parts)) == parts


def test_a_stream_without_snapshot_and_updates_is_one_empty_part() -> None:
    assert parse(whole([("application/octet-stream", b"")])) == [("application/octet-stream", b"")]


def test_a_boundary_is_what_rfc_2046_allows_and_differs_with_its_bytes() -> None:
    rng = random.Random(5)
    made = {boundary(rng.randbytes(16)) for _ in range(100)}
    assert len(made) == 100
    assert all(len(one) <= 70 and one.isascii() and " " not in one for one in made)
    assert len(boundary(bytes(29))) <= 70


@pytest.mark.parametrize("size", [0, 8, 15, 30])
def test_a_boundary_that_can_be_guessed_is_refused(size: int) -> None:
    with pytest.raises(InvalidError, match="random bytes"):
        boundary(bytes(size))


@pytest.mark.parametrize(
    "kind", ["text/plain\r\nX-Evil: 1", "text/plain\n\nbody", "a/\u00e9", "a\0"]
)
def test_a_type_cannot_add_headers(kind: str) -> None:
    with pytest.raises(InvalidError, match="is not valid in a header"):
        part_head(BOUNDARY, kind)


# ---------------------------------------------------------------------------------- digests


def test_a_digest_covers_the_length_of_the_type_the_type_and_the_bytes() -> None:
    digest = SnapshotDigest("text/plain")
    digest.update(b"hello")
    framed = b"\x0a\0\0\0\0\0\0\0" + b"text/plain" + b"hello"
    assert digest.hexdigest() == blake3(framed).hexdigest()


def test_a_digest_never_changes_between_versions() -> None:
    digest = SnapshotDigest("application/json")
    digest.update(b'{"a":1}')
    assert digest.hexdigest() == GOLDEN


@repeatable
@given(st.lists(st.binary(max_size=20), max_size=6))
def test_pieces_make_no_difference(pieces: list[bytes]) -> None:
    by_piece, at_once = SnapshotDigest("a/b"), SnapshotDigest("a/b")
    for piece in pieces:
        by_piece.update(piece)
    at_once.update(b"".join(pieces))
    assert by_piece.hexdigest() == at_once.hexdigest()


def test_bytes_cannot_move_between_type_and_snapshot() -> None:
    one, other = SnapshotDigest("text/plain"), SnapshotDigest("text/plai")
    one.update(b"x")
    other.update(b"nx")
    assert one.hexdigest() != other.hexdigest()
