"""Chunks: the records of one stream in one commit, as stored.

    offset  size  field
    0       1     format of the chunk: 1, or 2 if the payload is in a file
    1       1     cipher of the payload: 0 none, 1 AEGIS-256, 2 AES-256-GCM; 0x80 if compressed
    2       2     number of records (at most 1000)
    4       4     metered bytes of the records (at most 1 MiB)
    8       8     seq_num of the first record
    16      8     timestamp of the first record
    24      8     timestamp of the last record
    32      8     time of arrival, ms since the Unix epoch: retention counts from here
    40      -     payload: the records in protobuf form, as a read returns them

The 40 bytes before the payload suffice to decide whether a read takes the whole chunk. If so, it
copies the payload, decompressed if necessary, without decoding any record. Chunks are compressed on
their way to storage (`packing.py`), never in memory. Sealed chunks are not compressed, because
their size would reveal something about their content.

Large chunks are in files (`chunk_files.py`). Then the location of the payload follows the header:

    40      8     offset of the payload in the file
    48      4     size of the payload in bytes
    52      4     CRC-32 of the payload
    56      1     1 if it is the last in its file, else 0
    57      -     name of the file
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from streamfold.errors import DataCorruptError, FormatUnsupportedError, KeyRequiredError
from streamfold.model.positions import SeqNum, StreamPosition, Timestamp
from streamfold.model.records import BATCH_BYTES_MAX, BATCH_RECORDS_MAX
from streamfold.records.payload import measure
from streamfold.store.log.packing import pack, unpack
from streamfold.store.log.sealing import Sealing, SealingKey

_HEADER = struct.Struct(">BBHIQQQQ")
_FORMAT, _IN_FILE = 1, 2
_PACKED = 0x80
# Looked up once: in Python 3.11 each lookup of a member takes as long as a call.
_CLEAR: Final = Sealing.CLEAR
_PART = struct.Struct(">QIIB")


class FilePart(msgspec.Struct, frozen=True, gc=False):
    """The location of a payload that is stored in a file."""

    file: str
    offset: int
    size: int
    checksum: int
    #: Whether this is the last chunk in its file.
    last: bool


_IN_ROW = FilePart("", 0, 0, 0, last=False)


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """Consecutive records of one stream. Cheap to construct, because every append creates one."""

    first_seq_num: int
    records: int
    metered: int
    first_timestamp: int
    last_timestamp: int
    arrived_at: int
    payload: bytes | memoryview
    sealing: Sealing = Sealing.CLEAR
    #: Whether the payload is compressed. Only chunks from storage may be.
    packed: bool = False
    #: The payload's location while the chunk is `in_file`.
    part: FilePart = _IN_ROW

    @property
    def in_file(self) -> bool:
        """Whether the payload has to be read from a file first."""
        return self.part is not _IN_ROW

    @property
    def last_seq_num(self) -> int:
        return self.first_seq_num + self.records - 1

    @property
    def start(self) -> StreamPosition:
        """The position of the first record."""
        return StreamPosition(SeqNum(self.first_seq_num), Timestamp(self.first_timestamp))

    @property
    def end(self) -> StreamPosition:
        """The position after the last record, as reported in acks and tails."""
        return StreamPosition(
            SeqNum(self.first_seq_num + self.records), Timestamp(self.last_timestamp)
        )


def _header(chunk: Chunk, sealing: int) -> bytes:
    return _HEADER.pack(
        _FORMAT,
        sealing,
        chunk.records,
        chunk.metered,
        chunk.first_seq_num,
        chunk.first_timestamp,
        chunk.last_timestamp,
        chunk.arrived_at,
    )


class StoredChunk(msgspec.Struct, frozen=True, gc=False):
    """A chunk as stored."""

    last_seq_num: int
    header: bytes
    payload: bytes | memoryview

    @property
    def row(self) -> bytes:
        return self.header + self.payload


def encode(chunk: Chunk) -> StoredChunk:
    """Encode the chunk for storage, compressed if that saves much. Takes 2 ms per MiB."""
    if chunk.sealing is _CLEAR and (packed := pack(chunk.payload)) is not None:
        return StoredChunk(chunk.last_seq_num, _header(chunk, _PACKED), packed)
    return StoredChunk(chunk.last_seq_num, _header(chunk, chunk.sealing), chunk.payload)


def reference(header: bytes, part: FilePart) -> bytes:
    """Return the row of a chunk whose payload is in a file."""
    where = _PART.pack(part.offset, part.size, part.checksum, part.last)
    return bytes((_IN_FILE,)) + header[1:] + where + part.file.encode()


def seal(chunk: Chunk, stream_id: int, sealing: Sealing, key: SealingKey) -> Chunk:
    """Encrypt the payload of `chunk`, bound to its header and stream."""
    context = _header(chunk, sealing) + stream_id.to_bytes(8, "big")
    sealed = key.seal(sealing, chunk.payload, context)
    return msgspec.structs.replace(chunk, payload=sealed, sealing=sealing)


def unseal(chunk: Chunk, stream_id: int, key: SealingKey) -> Chunk:
    """Reverse `seal`. Raises DecryptionFailedError if the key differs."""
    context = _header(chunk, chunk.sealing) + stream_id.to_bytes(8, "big")
    payload = key.unseal(chunk.sealing, chunk.payload, context)
    return msgspec.structs.replace(chunk, payload=payload, sealing=Sealing.CLEAR)


def with_payload(chunk: Chunk, payload: memoryview) -> Chunk:
    """Return a chunk that was `in_file` with its payload loaded."""
    return msgspec.structs.replace(chunk, payload=payload, part=_IN_ROW)


def unpacked(chunk: Chunk) -> Chunk:
    """Decompress a `packed` chunk, at 1 ms per MiB. Runs in any thread."""
    return msgspec.structs.replace(chunk, payload=unpack(chunk.payload), packed=False)


def clear(chunk: Chunk, stream_id: int, key: SealingKey | None) -> Chunk:
    """Return `chunk` with its payload as a read returns it, neither compressed nor encrypted.

    Raises DecryptionFailedError if it was sealed with another key.
    """
    if chunk.in_file:
        raise ValueError(f"the chunk at {chunk.first_seq_num} was not read from its file")
    if chunk.packed:
        return unpacked(chunk)
    if chunk.sealing is Sealing.CLEAR:
        return chunk
    if key is None:
        raise KeyRequiredError(chunk.sealing.name.lower().replace("_", "-"))
    return unseal(chunk, stream_id, key)


def cut_before(chunk: Chunk, end: int) -> Chunk:
    """Return the part of a clear `chunk` before the record `end`: at least one record."""
    if chunk.last_seq_num < end:
        return chunk
    index, count = measure(chunk.payload), end - chunk.first_seq_num
    return Chunk(
        chunk.first_seq_num,
        count,
        index.metered[count],
        chunk.first_timestamp,
        index.timestamps[count - 1],
        chunk.arrived_at,
        memoryview(chunk.payload)[: index.offsets[count]],
    )


def decode(value: bytes) -> Chunk:
    """Decode the chunk in `value`. Its payload is a view, not a copy, or still in its file."""
    if len(value) < _HEADER.size:
        raise DataCorruptError(f"a stored chunk has {len(value)} bytes, less than its header")
    form, sealing, count, metered, first, first_time, last_time, arrived = _HEADER.unpack_from(
        value
    )
    packed = sealing == _PACKED
    if form not in (_FORMAT, _IN_FILE) or (sealing > max(Sealing) and not packed):
        raise FormatUnsupportedError(
            f"a stored chunk has format {form} and sealing {sealing}, but this version reads formats "
            f"{_FORMAT} and {_IN_FILE}: open the store with the version that wrote it, or a newer one"
        )
    payload = memoryview(value)[_HEADER.size :]
    part = _decode_part(payload) if form == _IN_FILE else _IN_ROW
    return Chunk(
        first,
        count,
        metered,
        first_time,
        last_time,
        arrived,
        payload if part is _IN_ROW else b"",
        Sealing.CLEAR if packed else Sealing(sealing),
        packed,
        part,
    )


def _decode_part(stored: memoryview) -> FilePart:
    if len(stored) <= _PART.size:
        raise DataCorruptError(f"a stored chunk names no file: it has {len(stored)} bytes for that")
    offset, size, checksum, last = _PART.unpack_from(stored)
    try:
        name = str(stored[_PART.size :], "ascii")
    except UnicodeDecodeError as error:
        raise DataCorruptError(f"a stored chunk names no file: {error}") from error
    return FilePart(name, offset, size, checksum, bool(last))


def merge(parts: list[Chunk]) -> list[Chunk]:
    """Join adjacent chunks up to the size limit of one batch."""
    if len(parts) == 1:
        return parts
    merged: list[Chunk] = []
    run: list[Chunk] = []
    count = metered = 0
    for part in parts:
        if run and (
            count + part.records > BATCH_RECORDS_MAX or metered + part.metered > BATCH_BYTES_MAX
        ):
            merged.append(_join(run, count, metered))
            run, count, metered = [], 0, 0
        run.append(part)
        count += part.records
        metered += part.metered
    if run:
        merged.append(_join(run, count, metered))
    return merged


def _join(run: list[Chunk], count: int, metered: int) -> Chunk:
    if len(run) == 1:
        return run[0]
    first, last = run[0], run[-1]
    return Chunk(
        first.first_seq_num,
        count,
        metered,
        first.first_timestamp,
        last.last_timestamp,
        last.arrived_at,
        b"".join(part.payload for part in run),
    )
