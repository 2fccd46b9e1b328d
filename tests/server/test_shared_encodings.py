from __future__ import annotations

from streamfold.model.positions import SeqNum, StreamPosition, Timestamp
from streamfold.server.live_reads import KEPT, KEPT_BYTES, SharedEncodings
from streamfold.store.read.requests import ReadBatch


class Encoder:
    """Encodes a batch as itself, and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, batch: ReadBatch) -> bytes:
        self.calls += 1
        return batch.payload()


def batch(part: bytes, tail: int | None = None) -> ReadBatch:
    position = None if tail is None else StreamPosition(SeqNum(tail), Timestamp(0))
    return ReadBatch((part,), 0, 1, len(part), position)


def test_a_batch_is_encoded_once_for_all_who_hold_the_same_records() -> None:
    shared, encode = SharedEncodings(), Encoder()
    part = bytes(range(100))
    for _ in range(3):
        assert shared.get(batch(part), "json", encode) == part
    same = batch(part)
    for _ in range(3):
        assert shared.get(same, "json", encode) == part
    assert encode.calls == 1


def test_another_form_and_another_tail_are_encoded_for_themselves() -> None:
    shared, encode = SharedEncodings(), Encoder()
    one, reported = batch(b"x" * 100), batch(b"x" * 100, 1)
    for form in ("json", "base64"):
        for each in (one, reported):
            shared.get(each, form, encode)
            shared.get(each, form, encode)
    assert encode.calls == 4


def test_equal_bytes_that_are_not_the_same_object_are_never_shared() -> None:
    shared, encode = SharedEncodings(), Encoder()
    mine, yours = bytes(bytearray(b"opened with a key")), bytes(bytearray(b"opened with a key"))
    assert mine is not yours
    shared.get(batch(mine), "json", encode)
    shared.get(batch(yours), "json", encode)
    assert encode.calls == 2


def test_an_object_that_reuses_the_id_of_a_dropped_one_is_not_taken_for_it() -> None:
    shared, encode = SharedEncodings(), Encoder()
    for number in range(10 * KEPT):  # each may be where one of those before it was
        part = b"%0100d" % number
        assert shared.get(batch(part), "json", encode) == part


def test_large_batches_are_shared_and_bounded_by_their_bytes() -> None:
    shared, encode = SharedEncodings(), Encoder()
    size = KEPT_BYTES // 8
    parts = [bytes([number]) * size for number in range(6)]
    for part in parts:
        shared.get(batch(part), "json", encode)
    assert encode.calls == 6
    shared.get(batch(parts[-3]), "json", encode)
    assert encode.calls == 6
    shared.get(batch(parts[0]), "json", encode)
    assert encode.calls == 7
    huge = b"h" * (2 * KEPT_BYTES)
    assert shared.get(batch(huge), "json", encode) == huge
    assert shared.get(batch(huge), "json", encode) == huge
