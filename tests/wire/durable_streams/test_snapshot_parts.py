"""Requests that publish the parts of a snapshot."""

from __future__ import annotations

import pytest

from streamfold.errors import InvalidError
from streamfold.wire.durable_streams.snapshot_parts import (
    PARTS_MAX,
    PartsCommit,
    parse_manifest,
    parse_parts_commit,
)

DIGEST = "5a" * 32


def commit(**headers: str) -> PartsCommit | None:
    return parse_parts_commit(lambda name: headers.get(name.replace("-", "_")))


def test_a_request_without_the_header_is_no_commit() -> None:
    assert commit(stream_snapshot_digest=DIGEST) is None


@pytest.mark.parametrize("count", [1, PARTS_MAX])
def test_a_commit_has_a_number_of_parts_and_a_digest(count: int) -> None:
    found = commit(stream_snapshot_parts=str(count), stream_snapshot_digest=DIGEST)
    assert found == PartsCommit(count, DIGEST)


@pytest.mark.parametrize(
    "count", ["", "0", "-1", "+1", "1.0", "one", str(PARTS_MAX + 1), "9" * 5000]
)
def test_other_numbers_are_refused(count: str) -> None:
    with pytest.raises(InvalidError, match="stream-snapshot-parts"):
        commit(stream_snapshot_parts=count, stream_snapshot_digest=DIGEST)


@pytest.mark.parametrize("digest", ["", DIGEST[:-1], DIGEST + "0", DIGEST.upper(), "g" * 64])
def test_other_digests_are_refused(digest: str) -> None:
    with pytest.raises(InvalidError, match="stream-snapshot-digest"):
        commit(stream_snapshot_parts="1", stream_snapshot_digest=digest)


def test_a_list_has_a_line_for_each_part() -> None:
    assert parse_manifest(b"b\na\n", 2) == ["b", "a"]


@pytest.mark.parametrize(
    "body",
    [b"", b"a", b"a\nb", b"a\n", b"a\nb\nc\n", b"a\n\n", b"\na\n", b"a\na\n", b"a\r\nb\n",
     b"a b\nc\n", b"\xc3\xa9\nb\n", b"a" * 65 + b"\nb\n"],
)  # fmt: skip
def test_other_lists_are_refused(body: bytes) -> None:
    with pytest.raises(InvalidError):
        parse_manifest(body, 2)
