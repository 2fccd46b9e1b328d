"""s2s frames: published vectors, arbitrary splits, and everything that must be refused."""

from __future__ import annotations

import tracemalloc
from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from s2_sdk._s2s import _protocol as sdk
from s2_sdk._types import Compression as SdkCompression

from streamfold.errors import SeqNumMismatchError
from streamfold.model.positions import STREAM_START, SeqNum, StreamPosition, Timestamp
from streamfold.wire.compression import Compression, compress
from streamfold.wire.s2.errors import BadFrameError, Failure, OversizedError, describe_failure
from streamfold.wire.s2.frames import (
    BODY_MAX,
    FRAME_MAX,
    Frame,
    FrameDecoder,
    encode_frame,
    encode_terminal,
)
from streamfold.wire.s2.records_proto import (
    decode_append_frame,
    encode_append_ack,
    encode_frame_parts,
    encode_read_batch,
)

NOW = Timestamp(1_700_000_000_000)
START, END = StreamPosition(SeqNum(0), NOW), StreamPosition(SeqNum(1), NOW)
RECORD = bytes.fromhex("0a13 10 80d095ffbc31 1a06 0a016b 120176 22026869")

SENT = [
    (
        encode_frame(encode_append_ack(START, END, END)),
        "00 00 20 00 0a 07 10 80 d0 95 ff bc 31 12 09 08 01 10 80 d0 95 ff bc 31 "
        "1a 09 08 01 10 80 d0 95 ff bc 31",
    ),
    (
        encode_frame(encode_read_batch(b"", END)),
        "00 00 0c 00 12 09 08 01 10 80 d0 95 ff bc 31",
    ),
    (encode_frame(encode_read_batch(b"", STREAM_START)), "00 00 03 00 12 00"),
    (
        encode_frame(encode_read_batch(b"", END), reconnect_advised=True),
        "00 00 0c 10 12 09 08 01 10 80 d0 95 ff bc 31",
    ),
    (
        encode_frame(encode_read_batch(RECORD)),
        "00 00 16 00 0a 13 10 80 d0 95 ff bc 31 1a 06 0a 01 6b 12 01 76 22 02 68 69",
    ),
    (
        encode_terminal(describe_failure(SeqNumMismatchError(0, 1))),
        "00 00 19 80 01 9c 7b 22 73 65 71 5f 6e 75 6d 5f 6d 69 73 6d 61 74 63 68 22 3a 31 7d",
    ),
]


def decode_all(decoder: FrameDecoder, data: bytes = b"") -> list[Frame]:
    decoder.feed(data)
    return list(iter(decoder.next_frame, None))


@pytest.mark.parametrize(("frame", "vector"), SENT)
def test_frames_we_send_equal_the_published_vectors(frame: bytes, vector: str) -> None:
    assert frame == bytes.fromhex(vector)


def test_the_published_append_of_one_record_is_understood() -> None:
    [frame] = decode_all(FrameDecoder(), bytes.fromhex("000007000a041a026869"))
    append = decode_append_frame(frame)
    assert (append.batch.count, append.batch.metered) == (1, 10)
    assert (append.match_seq_num, append.fencing_token) == (None, None)


def test_the_published_append_with_conditions_is_understood() -> None:
    vector = "00001a00 0a13 0880d095ffbc31 1206 0a016b 120176 1a026869 1000 1a00"
    [frame] = decode_all(FrameDecoder(), bytes.fromhex(vector))
    append = decode_append_frame(frame)
    assert append.batch.metered == 14
    assert append.match_seq_num == 0
    assert append.fencing_token == ""


@given(
    st.lists(
        st.binary(max_size=40).map(lambda data: memoryview(data)) | st.binary(max_size=40),
        max_size=5,
    ),
    st.none() | st.just(STREAM_START) | st.just(END),
)
def test_a_frame_in_parts_has_the_bytes_of_the_frame(
    parts: list[bytes | memoryview], tail: StreamPosition | None
) -> None:
    whole = encode_frame(encode_read_batch(b"".join(parts), tail))
    assert b"".join(encode_frame_parts(parts, tail)) == whole


def test_a_terminal_frame_says_why_the_session_ended() -> None:
    [frame] = decode_all(FrameDecoder(), bytes.fromhex(SENT[-1][1]))
    assert frame.terminal
    assert frame.failure() == Failure(412, b'{"seq_num_mismatch":1}')


def test_a_terminal_frame_from_a_client_is_refused() -> None:
    with pytest.raises(BadFrameError, match="terminal"):
        decode_append_frame(Frame(b"\x01\x9c{}", terminal=True))


def test_a_frame_that_holds_no_append_is_refused() -> None:
    with pytest.raises(BadFrameError, match="AppendInput"):
        decode_append_frame(Frame(b"\x0a\xff"))


@pytest.mark.parametrize("frame", [Frame(b"\x01", terminal=True), Frame(b"\x01\x9c{}")])
def test_only_a_whole_terminal_frame_has_a_failure(frame: Frame) -> None:
    with pytest.raises(BadFrameError):
        frame.failure()


MESSAGES = st.lists(
    st.tuples(
        st.one_of(st.binary(max_size=40), st.binary(max_size=20).map(lambda raw: raw * 200)),
        st.sampled_from(Compression),
        st.booleans(),
    ),
    max_size=6,
)


@settings(derandomize=True, max_examples=150, deadline=None)
@given(MESSAGES, st.data())
def test_frames_come_out_in_order_however_their_bytes_are_cut(
    messages: list[tuple[bytes, Compression, bool]], data: st.DataObject
) -> None:
    raw = b"".join(
        encode_frame(message, compression, reconnect_advised=advised)
        for message, compression, advised in messages
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=12)))
    decoder, frames = FrameDecoder(), list[Frame]()
    for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        frames += decode_all(decoder, raw[start:end])
    decoder.finish()
    assert frames == [Frame(message, reconnect_advised=adv) for message, _, adv in messages]


@settings(derandomize=True, max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 20_000), max_size=6),
    st.lists(st.sampled_from([1, 3, 100, 4095, 4096, 9000]), min_size=1, max_size=12),
)
def test_frames_come_out_in_order_in_pieces_of_any_size(sizes: list[int], cuts: list[int]) -> None:
    bodies = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    raw = b"".join(map(encode_frame, bodies))
    decoder, frames = FrameDecoder(), list[Frame]()
    at = 0
    for cut in cycle(cuts):
        assert decoder.empty == (sum(map(len, map(encode_frame, bodies[: len(frames)]))) == at)
        if at >= len(raw):
            break
        frames += decode_all(decoder, raw[at : at + cut])
        at = min(at + cut, len(raw))
    decoder.finish()
    assert [frame.body for frame in frames] == bodies


def test_a_decoder_holds_little_more_than_the_unfinished_frame() -> None:
    frame = encode_frame(bytes(1000))
    decoder = FrameDecoder()
    decoder.feed(frame[:3])
    tracemalloc.start()
    try:
        for _ in range(500):  # never at the end of a frame
            frames = decode_all(decoder, frame[3:] + frame[:3])
            assert [len(found.body) for found in frames] == [1000]
        assert tracemalloc.get_traced_memory()[0] < 100_000  # of 500,000; other threads need some
        decoder = FrameDecoder()
        decoder.feed(encode_frame(bytes(BODY_MAX))[:4])
        for _ in range(100_000):
            decoder.feed(b"ab" * 2)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 2 * 400_000


def test_frames_come_out_when_bytes_arrive_one_by_one() -> None:
    raw = encode_frame(b"a" * 2000, Compression.ZSTD) + encode_frame(b"b")
    decoder, frames = FrameDecoder(), list[Frame]()
    for byte in raw:
        frames += decode_all(decoder, bytes([byte]))
    assert [frame.body for frame in frames] == [b"a" * 2000, b"b"]


@pytest.mark.parametrize("compression", list(Compression))
@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 5000])
def test_the_official_client_reads_our_frames(compression: Compression, size: int) -> None:
    raw = encode_frame(b"z" * size, compression, reconnect_advised=True)
    message = sdk.deframe_message(raw)
    squeezed = size >= 1024 and compression is not Compression.NONE
    assert (message.compression is SdkCompression.NONE) is not squeezed
    assert message.reconnect_advised
    assert sdk.decompress(message.body, message.compression) == b"z" * size


@pytest.mark.parametrize("compression", list(SdkCompression))
@pytest.mark.parametrize("size", [0, 1, 1024, 5000])
def test_we_read_the_official_clients_frames(compression: SdkCompression, size: int) -> None:
    body, used = sdk.maybe_compress(b"z" * size, compression)
    raw = sdk.frame_message(sdk.Message(body, terminal=False, compression=used))
    assert decode_all(FrameDecoder(), raw) == [Frame(b"z" * size)]


def test_the_largest_frame_is_accepted() -> None:
    raw = encode_frame(b"x" * BODY_MAX)
    assert len(raw) == 3 + FRAME_MAX
    assert decode_all(FrameDecoder(), raw) == [Frame(b"x" * BODY_MAX)]


def test_a_message_too_large_for_a_frame_is_not_sent() -> None:
    with pytest.raises(OversizedError):
        encode_frame(b"x" * (BODY_MAX + 1), Compression.ZSTD)


@pytest.mark.parametrize("length", [0, FRAME_MAX + 1, 2**24 - 1])
def test_a_bad_length_is_refused_before_the_frame_arrives(length: int) -> None:
    with pytest.raises(BadFrameError, match=str(length)):
        decode_all(FrameDecoder(), length.to_bytes(3, "big"))


def test_an_unknown_compression_is_refused() -> None:
    with pytest.raises(BadFrameError, match="0x60"):
        decode_all(FrameDecoder(), b"\0\0\x01\x60")


@pytest.mark.parametrize(("flag", "compression"), [(0x20, "zstd"), (0x40, "gzip")])
def test_a_body_that_inflates_beyond_a_frame_is_refused(flag: int, compression: str) -> None:
    bomb = compress(bytes(BODY_MAX + 1), Compression(compression))
    raw = (1 + len(bomb)).to_bytes(3, "big") + bytes([flag]) + bomb
    with pytest.raises(BadFrameError, match=str(BODY_MAX)):
        decode_all(FrameDecoder(), raw)


@pytest.mark.parametrize("flag", [0x20, 0x40])
def test_a_body_that_is_not_what_its_flag_says_is_refused(flag: int) -> None:
    with pytest.raises(BadFrameError, match="inflated"):
        decode_all(FrameDecoder(), b"\0\0\x06" + bytes([flag]) + b"plain")


def test_bits_without_a_meaning_are_ignored() -> None:
    assert decode_all(FrameDecoder(), b"\0\0\x03\x0fhi") == [Frame(b"hi")]


def test_frames_before_a_bad_one_are_delivered_and_the_refusal_stays() -> None:
    decoder = FrameDecoder()
    decoder.feed(encode_frame(b"good") + b"\0\0\0" + encode_frame(b"never seen"))
    assert decoder.next_frame() == Frame(b"good")
    for _ in range(2):
        with pytest.raises(BadFrameError):
            decoder.next_frame()
    with pytest.raises(BadFrameError):
        decoder.finish()


def test_a_session_that_ends_between_frames_ends_well() -> None:
    decoder = FrameDecoder()
    decode_all(decoder, encode_frame(b"whole"))
    decoder.finish()


def test_a_session_that_ends_within_a_frame_is_refused_wherever_it_is_cut() -> None:
    raw = encode_frame(b"cut off")
    for length in range(1, len(raw)):
        decoder = FrameDecoder()
        assert decode_all(decoder, raw[:length]) == []
        with pytest.raises(BadFrameError, match=f"{length} bytes"):
            decoder.finish()
