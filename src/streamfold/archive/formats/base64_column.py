"""base64 (RFC 4648, padded) of whole columns, without a Python call per value."""

from __future__ import annotations

import base64

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamfold.archive.formats.conforming import Lengths, offsets_of

Bytes = npt.NDArray[np.uint8]


def encode(array: pa.Array) -> pa.Array:
    """A binary column as base64 text; nulls stay null."""
    data, lengths = values_of(array)
    groups = -(-lengths // 3)
    padded = np.zeros(int(groups.sum()) * 3, np.uint8)
    padded[_byte_indices(lengths, groups * 3)] = data
    text = np.frombuffer(base64.b64encode(padded.tobytes()), np.uint8).copy()
    ends = np.cumsum(groups * 4)
    short = groups * 3 - lengths
    text[ends[short >= 1] - 1] = ord("=")
    text[ends[short == 2] - 2] = ord("=")
    return _column(text, groups * 4, array, pa.string())


def decode(array: pa.Array) -> pa.Array:
    """The bytes of a base64 column; ValueError for text that an encoder would not have written."""
    text, lengths = values_of(array)
    if np.any(lengths % 4):
        raise ValueError("base64 text has a length that is not a multiple of four")
    ends = np.cumsum(lengths)[lengths > 0]
    padding = np.zeros(len(lengths), np.int64)
    filled = lengths > 0
    padding[filled] = (text[ends - 1] == ord("=")).astype(np.int64) + (text[ends - 2] == ord("="))
    plain = text.copy()
    plain[ends[padding[filled] >= 1] - 1] = ord("A")
    plain[ends[padding[filled] == 2] - 2] = ord("A")
    decoded = np.frombuffer(base64.b64decode(plain.tobytes(), validate=True), np.uint8)
    sizes = lengths // 4 * 3
    kept = decoded[_byte_indices(sizes - padding, sizes)]
    column = _column(kept, sizes - padding, array, pa.binary())
    if not encode(column).equals(array):
        raise ValueError("base64 text is not in its one canonical form")
    return column


def values_of(array: pa.Array) -> tuple[Bytes, Lengths]:
    """The bytes of all values of a string or binary column in a row, and their lengths."""
    filled = pc.fill_null(array, b"" if pa.types.is_binary(array.type) else "")
    _, offsets, data = filled.buffers()
    bounds = np.frombuffer(offsets, np.int32)[filled.offset : filled.offset + len(filled) + 1]
    view = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return view[bounds[0] : bounds[-1]], np.diff(bounds).astype(np.int64)


def _byte_indices(sizes: Lengths, rooms: Lengths) -> Lengths:
    """Where the bytes of each value go, from the start of a slot of its own."""
    starts = np.cumsum(rooms) - rooms
    before = np.cumsum(sizes) - sizes
    shifts: Lengths = np.repeat(starts - before, sizes)
    return shifts + np.arange(len(shifts))


def _column(data: Bytes, lengths: Lengths, like: pa.Array, kind: pa.DataType) -> pa.Array:
    buffers = [None, offsets_of(lengths).buffers()[1], pa.py_buffer(np.ascontiguousarray(data))]
    column = pa.Array.from_buffers(kind, len(lengths), buffers)
    return pc.if_else(like.is_valid(), column, None) if like.null_count else column
