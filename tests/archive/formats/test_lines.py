from __future__ import annotations

import io
import itertools

import pytest

from streamfold.archive.errors import ArtifactCorruptError
from streamfold.archive.formats import JsonlFormat
from streamfold.archive.formats.conforming import has_map
from streamfold.archive.formats.format import FileCompression, compress_stream, decompress_stream
from streamfold.archive.formats.jsonl import jsonl
from streamfold.archive.formats.jsonl.json_values import columns_of, restored_batch
from streamfold.archive.formats.jsonl.jsonl import LineDecoder, decode_objects, whole_lines
from streamfold.testing.format_kit import assert_same, write
from streamfold.testing.format_samples import EVERY_TYPE, ORDERS, orders, table_of

#: Types that Arrow's reader leaves to the slower way, for the values that the samples have.
LEFT = {"float32", "float64 special", "list of nothing"}


@pytest.mark.parametrize("sample", [s for s in EVERY_TYPE if not has_map(EVERY_TYPE[s][0])])
def test_both_ways_to_read_lines_give_the_same(sample: str) -> None:
    schema, rows = table_of(*EVERY_TYPE[sample])
    block, _ = write(JsonlFormat().write_rows, schema, [rows])
    slow = columns_of(decode_objects(block), schema.arrow, others_ignored=False)
    assert_same(slow, rows)
    if sample not in LEFT:
        fast = LineDecoder(schema.arrow, others_ignored=False).arrow_columns(block)
        assert_same(restored_batch(fast, schema.arrow), slow)


def test_lines_are_never_torn_apart() -> None:
    text = b"one\ntwo\n\nthree\nfour"
    for size in range(1, len(text) + 1):
        blocks = [text[at : at + size] for at in range(0, len(text), size)]
        found = list(whole_lines(blocks))
        assert b"".join(found) == text
        assert all(block.endswith(b"\n") for block in found[:-1])
        assert found[-1].endswith(b"four")


def test_a_line_longer_than_a_block_is_read() -> None:
    rows = orders(20, note="x" * (6 << 20)).slice(0, 8)
    data, _ = write(JsonlFormat().write_rows, ORDERS, [rows])
    decoder = LineDecoder(ORDERS.arrow, others_ignored=False)
    assert_same(decoder.decode(data), rows)


@pytest.mark.parametrize("compression", [FileCompression.GZIP, FileCompression.ZSTD])
def test_what_inflates_a_thousandfold_is_read_in_blocks(compression: FileCompression) -> None:
    packed = io.BytesIO()
    with compress_stream(packed, compression) as file:
        for _ in range(32):
            file.write(bytes(1 << 20))
    assert packed.tell() < 200_000
    packed.seek(0)
    sizes = [len(block) for block in decompress_stream(packed, compression, 1 << 20)]
    assert sum(sizes) == 32 << 20
    assert max(sizes) <= 1 << 20


def test_a_line_without_an_end_is_refused_before_it_fills_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jsonl, "LINE_BYTES_MAX", 10_000)
    endless = itertools.repeat(b"x" * 999)
    with pytest.raises(ArtifactCorruptError, match="more than 10000 bytes"):
        list(whole_lines(endless))
    lines = [b"x" * 999 + b"\n"] * 30 + [b"x" * 9_000, b"\n", b"last"]
    assert b"".join(whole_lines(lines)) == b"".join(lines)


def test_an_error_says_after_which_row() -> None:
    decoder = LineDecoder(ORDERS.arrow, others_ignored=False)
    data, _ = write(JsonlFormat().write_rows, ORDERS, [orders(12)])
    decoder.decode(data)
    with pytest.raises(ArtifactCorruptError, match=r"after row 12.*line 2"):
        decoder.decode(data.split(b"\n")[0] + b'\n{"shop"\n')
