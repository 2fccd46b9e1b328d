"""Decompression is bounded and drops nothing silently."""

from __future__ import annotations

import contextlib
import gzip
import random
import threading
import tracemalloc

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from streamfold.errors import MalformedError
from streamfold.wire.compression import (
    COMPRESS_FROM,
    Compression,
    compress,
    compress_if_smaller,
    decompress,
)

CAP = 1 << 20
BOTH = pytest.mark.parametrize("compression", [Compression.GZIP, Compression.ZSTD])


def zstd_without_size(data: bytes) -> bytes:
    """A frame as streaming encoders write it: it does not say how large it will be."""
    encoder = zstandard.ZstdCompressor().compressobj()
    return encoder.compress(data) + encoder.flush()


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.binary(max_size=4096), st.sampled_from(Compression))
def test_what_was_compressed_comes_back(data: bytes, compression: Compression) -> None:
    assert decompress(compress(data, compression), compression, CAP) == data


@settings(derandomize=True, max_examples=40, deadline=None)
@given(st.binary(max_size=4096), st.booleans())
def test_zstd_frames_of_streaming_encoders_are_understood(data: bytes, checksum: bool) -> None:
    encoder = zstandard.ZstdCompressor(write_checksum=checksum).compressobj()
    packed = encoder.compress(data) + encoder.flush()
    assert decompress(packed, Compression.ZSTD, CAP) == data


@pytest.mark.parametrize("size", [(256 << 10) - 1, 256 << 10, (256 << 10) + 1, 1 << 20])
def test_zstd_frames_that_take_one_step_to_inflate_and_more_come_back(size: int) -> None:
    data = random.Random(size).randbytes(100) * (size // 100 + 1)
    for packed in (compress(data[:size], Compression.ZSTD), zstd_without_size(data[:size])):
        assert decompress(packed, Compression.ZSTD, size) == data[:size]
        with pytest.raises(MalformedError, match=str(size - 1)):
            decompress(packed, Compression.ZSTD, size - 1)


@pytest.mark.parametrize("compression", list(Compression))
def test_the_cap_itself_is_allowed_and_one_byte_more_is_not(compression: Compression) -> None:
    assert decompress(compress(b"x" * CAP, compression), compression, CAP) == b"x" * CAP
    with pytest.raises(MalformedError, match=str(CAP)):
        decompress(compress(b"x" * (CAP + 1), compression), compression, CAP)


def test_the_cap_holds_for_zstd_frames_that_do_not_declare_a_size() -> None:
    assert decompress(zstd_without_size(b"x" * CAP), Compression.ZSTD, CAP) == b"x" * CAP
    with pytest.raises(MalformedError, match=str(CAP)):
        decompress(zstd_without_size(b"x" * (CAP + 1)), Compression.ZSTD, CAP)


@pytest.mark.parametrize(
    ("compression", "bomb"),
    [
        (Compression.GZIP, gzip.compress(bytes(64 << 20), 1, mtime=0)),
        (Compression.ZSTD, zstandard.ZstdCompressor().compress(bytes(64 << 20))),
        (Compression.ZSTD, zstd_without_size(bytes(64 << 20))),
    ],
)
def test_a_bomb_is_refused_without_being_inflated(compression: Compression, bomb: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(MalformedError):
            decompress(bomb, compression, CAP)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * CAP


def test_a_zstd_frame_that_needs_a_huge_window_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=27)
    encoder = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    with pytest.raises(MalformedError):
        decompress(encoder.compress(b"small") + encoder.flush(), Compression.ZSTD, CAP)


@BOTH
def test_truncation_anywhere_is_refused(compression: Compression) -> None:
    packed = compress(b"some text that compresses, some text that compresses", compression)
    for length in range(len(packed)):
        with pytest.raises(MalformedError):
            decompress(packed[:length], compression, CAP)


def test_truncation_of_a_zstd_frame_without_a_size_is_refused() -> None:
    packed = zstd_without_size(bytes(range(256)) * 1000)
    for length in range(0, len(packed), 7):
        with pytest.raises(MalformedError):
            decompress(packed[:length], Compression.ZSTD, CAP)


@pytest.mark.parametrize(
    ("compression", "packed"),
    [
        (Compression.GZIP, compress(b"one", Compression.GZIP)),
        (Compression.ZSTD, compress(b"one", Compression.ZSTD)),
        (Compression.ZSTD, zstd_without_size(b"one")),
    ],
)
def test_bytes_after_the_compressed_unit_are_refused(
    compression: Compression, packed: bytes
) -> None:
    for rest in (b"x", packed):
        with pytest.raises(MalformedError):
            decompress(packed + rest, compression, CAP)


@BOTH
@pytest.mark.parametrize(
    "data", [b"", b"not compressed at all", b"\x50\x2a\x4d\x18\x02\0\0\0ab", b"\x28\xb5\x2f\xfd"]
)
def test_what_is_not_compressed_data_is_refused(compression: Compression, data: bytes) -> None:
    with pytest.raises(MalformedError):
        decompress(data, compression, CAP)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.binary(max_size=200), st.sampled_from([b"", b"\x28\xb5\x2f\xfd", b"\x1f\x8b\x08"]))
def test_noise_is_refused_or_inflates_within_the_cap(noise: bytes, magic: bytes) -> None:
    for compression in (Compression.GZIP, Compression.ZSTD):
        with contextlib.suppress(MalformedError):
            assert len(decompress(magic + noise, compression, CAP)) <= CAP


@BOTH
def test_small_data_stays_as_it_is(compression: Compression) -> None:
    data = b"x" * (COMPRESS_FROM - 1)
    assert compress_if_smaller(data, compression) == (data, Compression.NONE)


@BOTH
def test_large_data_is_compressed(compression: Compression) -> None:
    packed, used = compress_if_smaller(b"x" * COMPRESS_FROM, compression)
    assert used is compression
    assert decompress(packed, used, CAP) == b"x" * COMPRESS_FROM


@BOTH
def test_data_that_would_grow_stays_as_it_is(compression: Compression) -> None:
    data = random.Random(7).randbytes(4 * COMPRESS_FROM)
    assert compress_if_smaller(data, compression) == (data, Compression.NONE)


def test_threads_do_not_share_contexts() -> None:
    data = [bytes([n]) * 200_000 for n in range(4)]
    wrong: list[int] = []

    def work(n: int) -> None:
        for _ in range(50):
            packed = compress(data[n], Compression.ZSTD)
            if decompress(packed, Compression.ZSTD, CAP) != data[n]:
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
