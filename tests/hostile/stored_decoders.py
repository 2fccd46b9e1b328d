"""Decoders of stored data: rows, chunks, payloads, tables, snapshots."""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

import msgspec

from streamfold.cluster import LeaseOwner, StoreLease
from streamfold.cluster.lease import decode_lease, encode_lease
from streamfold.errors import MalformedError, StreamfoldError
from streamfold.follow.encoding.arrow_codec import ArrowCodec
from streamfold.follow.encoding.assembly import SnapshotAssembly
from streamfold.follow.encoding.codecs import BytesCodec, Codec, JsonCodec, MsgpackCodec
from streamfold.follow.encoding.container import Description, pack, unpack
from streamfold.follow.encoding.record_forms import Closing, Opening, SnapshotFrame, form_of
from streamfold.model.configs import BasinConfig, StreamConfig
from streamfold.model.positions import SeqNum, Timestamp
from streamfold.model.records import Header, SequencedRecord
from streamfold.model.resources import StreamTraits
from streamfold.records import columns, payload
from streamfold.server.durable_streams.subscriptions import storage
from streamfold.server.durable_streams.subscriptions.leases import Link
from streamfold.store import rows
from streamfold.store.engine import table_check
from streamfold.store.log import chunks, packing
from streamfold.store.log.chunk_files import FileName
from streamfold.store.log.sealing import Sealing, SealingKey
from streamfold.store.rows import StateRow, StreamRow, TailMark
from tests.hostile.decoder import Decoder
from tests.records import reference

_RECORDS = [
    SequencedRecord(SeqNum(7), Timestamp(1_700_000_000_000), (), b"hello"),
    SequencedRecord(
        SeqNum(8), Timestamp(1_700_000_000_000), (Header(b"a", b"b"),), b"\xff\x00\xc3\xa9"
    ),
    SequencedRecord(SeqNum(9), Timestamp(1_700_000_000_005), (Header(b"", b"fence"),), b"token"),
]
_PAYLOADS = (
    reference.encode_records(_RECORDS),
    reference.encode_records(_RECORDS[:1]),
    reference.encode_records([SequencedRecord(SeqNum(0), Timestamp(0), (), b"x" * 1_500)]),
    b"",
)
_KEY = SealingKey(bytes(range(32)))


def _payload(raw: bytes) -> None:
    """Native code and the reference must agree: positions, records, columns and JSON."""
    _compare(lambda: reference.measure(raw), lambda: _shown_index(payload.measure(raw)))
    _compare(lambda: [record for record, _ in reference.walk(raw)], lambda: payload.decode(raw))
    for base64 in (False, True):
        _compare(
            partial(reference.write_json, raw, as_base64=base64),
            partial(payload.write_json, raw, base64=base64),
        )
    _compare(lambda: _shown(reference.read_columns(raw)), lambda: _shown(columns.read_columns(raw)))
    _attempt(lambda: payload.contents(raw))


def _compare(expected: Callable[[], object], found: Callable[[], object]) -> None:
    wanted, got = _attempt(expected), _attempt(found)
    if wanted != got:
        raise AssertionError(f"the reference says {wanted!r}, native code {got!r}")


def _shown_index(index: payload.Index) -> object:
    return index.offsets, index.timestamps, index.metered, index.first_seq_num


def _shown(found: Any) -> object:
    """Columns as lists."""
    return tuple(map(_shown, found)) if isinstance(found, tuple) else found.tolist()


def _attempt(action: Callable[[], object]) -> object:
    try:
        return action()
    except (StreamfoldError, MalformedError):
        return "refused"


def _chunk(value: bytes) -> None:
    chunk = chunks.decode(value)
    if not chunk.in_file:
        clear = chunks.clear(chunk, 5, _KEY)
        payload.decode(clear.payload)
        index = payload.measure(clear.payload)
        if index.count > 1:
            chunks.cut_before(clear, chunk.first_seq_num + 1)


def _chunk_seeds() -> Iterator[bytes]:
    for records in (_PAYLOADS[0], _PAYLOADS[2] * 8):
        chunk = chunks.Chunk(7, 3, 100, 1, 2, 3, records)
        stored = chunks.encode(chunk)
        yield stored.row
        part = chunks.FilePart(
            "00000000000000000005-00000000000000000001-1.chunks", 0, 9, 1, last=True
        )
        yield chunks.reference(stored.header, part)
    for sealing in (Sealing.AEGIS_256, Sealing.AES_256_GCM):
        yield chunks.encode(chunks.seal(chunk, 5, sealing, _KEY)).row


_KINDS: tuple[type[msgspec.Struct], ...] = (
    rows.FormatRow, rows.CounterRow, rows.SpaceRow, rows.BasinRow, rows.StreamRow, rows.StateRow,
    rows.CleanupRow, rows.ProducerRow, rows.LeftoversRow, rows.ForkRow, rows.SnapshotRow, rows.TokenRow,
    rows.LevelRow, rows.HeldRow, rows.HeldTotalsRow, rows.UsageRow,
)  # fmt: skip
_DEEP = b"\x91" * 3_000 + b"\xc0"


def _row(raw: bytes) -> None:
    kind = _KINDS[raw[0] % len(_KINDS)] if raw else rows.StateRow
    row: Any = rows.decode(raw[1:], kind)
    rows.encode(row)


def _row_seeds() -> Iterator[bytes]:
    examples: list[msgspec.Struct] = [
        rows.FormatRow(4),
        rows.CounterRow(9),
        rows.SpaceRow(1, 2),
        rows.BasinRow(1, BasinConfig()),
        StreamRow(1, 2, StreamConfig(), traits=StreamTraits(), lineage=(rows.Segment(1, 2),)),
        StateRow("token", 5, TailMark(7, 8, 9), closed_by=("p", 1, 2), stream_seq="é"),
        rows.CleanupRow("b", "s"),
        rows.ProducerRow(1, 2, 3),
        rows.LeftoversRow({"a": 1}),
        rows.ForkRow("b", "s"),
        rows.SnapshotRow("text/plain", "d", 1, 2, "blob"),
        rows.LevelRow(1, {2: 3}),
        rows.HeldRow(1, 2),
        rows.HeldTotalsRow(1, {"b": 2}, {3: rows.FreshBytes("b", 1, 2, 3)}),
        rows.UsageRow({"append-ops": {1: 2}}, 5, ("b",)),
    ]
    for row in examples:
        yield bytes((_KINDS.index(type(row)),)) + rows.encode(row)
    for number in range(len(_KINDS)):
        yield bytes((number,)) + b"\x81\xa1a\xa3\xff\xff\xff"
        yield bytes((number,)) + b"\x81\xa1a" + _DEEP
    yield bytes((5,)) + b"\x81\xadfencing_token\xa3\xff\xff\xff"


def _subscription_row(raw: bytes) -> object:
    decode = storage._decode_link if raw[:1] == b"l" else storage._decode_document
    return decode("id", raw[1:])


def _table_index(raw: bytes) -> None:
    """The index of a SlateDB table, which a check of damaged tables reads on its own."""
    table_check._is_whole(raw)
    table_check._blocks(raw)


def _index_seed() -> bytes:
    """A flatbuffer with one block: root, vtable, vector, table."""
    vtable = struct.pack("<HHH", 6, 8, 4)
    meta_vtable = struct.pack("<HHHH", 8, 20, 4, 12)
    body = struct.pack("<I", 4 + len(vtable) + 2) + vtable + b"\0\0"
    root = len(body)
    body += struct.pack("<iI", root - 4, 4)
    body += struct.pack("<II", 1, 4) + struct.pack("<i", 0) + meta_vtable + struct.pack("<QI", 5, 4)
    return body + struct.pack("<I", 3) + b"key" + bytes(16)


def _table_seed() -> bytes:
    content = _index_seed()
    return content + struct.pack(">I", zlib.crc32(content))


def _snapshot(codec: Codec[Any]) -> Callable[[bytes], object]:
    """A snapshot blob: its description, its digest, and the state by its codec."""

    async def pieces(raw: bytes) -> AsyncIterator[bytes]:
        for at in range(0, len(raw), 300):
            yield raw[at : at + 300]

    def decode(raw: bytes) -> object:
        whole = asyncio.run(_unpack(pieces(raw)))
        return whole.decode(codec)

    async def _unpack(blob: AsyncIterator[bytes]) -> Any:
        return await unpack("snapshot", blob)

    return decode


def _state(codec: Codec[Any]) -> Callable[[bytes], object]:
    """The state alone, whose digest an attacker of the writer could have made fit."""
    from streamfold.follow.encoding.codecs import decode_state

    return lambda raw: decode_state(codec, codec.name, "snapshot", iter([raw]))


def _assembly(raw: bytes) -> None:
    """Snapshot records in a stream: `raw` is a payload of records."""
    assembly = SnapshotAssembly(keep=True)
    for record in payload.decode(raw):
        if form_of(record) is not None:
            assembly.add(record)


def _assembly_seeds() -> Iterator[bytes]:
    from hashlib import sha256

    state = b'{"a":1}'
    closing = Closing(1, len(state), sha256(state).hexdigest())
    whole = SnapshotFrame("id", 0, Opening(4, "json", "fold"), closing).record(state)
    first = SnapshotFrame("id", 0, Opening(4, "json"), None).record(state)
    last = SnapshotFrame("id", 1, None, closing).record(b"")
    text = b'{"type":"snapshot","covers_before":4,"state":{"a":1}}'
    for group in ([whole], [first, last]):
        yield reference.encode_records(
            [
                SequencedRecord(SeqNum(at), Timestamp(1), record.headers, record.body)
                for at, record in enumerate(group, 4)
            ]
        )
    yield reference.encode_records([SequencedRecord(SeqNum(4), Timestamp(1), (), text)])


def stored_decoders() -> Iterator[Decoder]:
    """Every decoder of bytes that storage returns."""
    yield Decoder("stored payload", _payload, _PAYLOADS)
    yield Decoder("stored chunk", _chunk, tuple(_chunk_seeds()))
    packed = packing.pack(_PAYLOADS[2] * 8)
    assert packed is not None
    yield Decoder("compressed chunk", packing.unpack, (packed, packed[:-4], packed + b"x"))
    yield Decoder("stored rows", _row, tuple(_row_seeds()))
    lease = StoreLease(owner=LeaseOwner("1f", "a", 7, "b/7/1"), sequence=3, expiry=8.0)
    yield Decoder("lease of a server", decode_lease, (encode_lease(lease), b'{"version":2}'))
    link = msgspec.msgpack.encode(Link(1, explicit=True, stream_id=None))
    document = b"\x81\xa6config\x80"
    yield Decoder(
        "stored subscriptions",
        _subscription_row,
        (b"l" + link, b"d" + document, b"d\xa3\xff\xff\xff", b"l\x93\x01\xc3\xa2\xff\xff",
        b"d" + _DEEP, b"l" + _DEEP),
    )  # fmt: skip
    name = b"00000000000000000005-00000000000000000001-1.chunks"
    yield Decoder(
        "chunk file names", lambda raw: FileName.parse(raw.decode("latin-1")), (name, b"5-1-x")
    )
    yield Decoder(
        "table index", _table_index, (_index_seed(), _table_seed()), (table_check._UnreadableError,)
    )
    description = Description.of("id", 5, "json", 1)
    json_codec: JsonCodec[Any] = JsonCodec()
    yield Decoder(
        "snapshot blob",
        _snapshot(json_codec),
        (pack([b'{"a":1}'], description), pack([], description)),
    )
    states: tuple[tuple[Codec[Any], bytes], ...] = (
        (json_codec, b'{"a":[1,null]}'),
        (MsgpackCodec(), msgspec.msgpack.encode({"a": [1]})),
        (BytesCodec(), b"x"),
    )
    for codec, state in states:
        yield Decoder(f"snapshot state, {codec.name}", _state(codec), (state, _DEEP))
    import pyarrow as pa

    arrow = b"".join(ArrowCodec().encode(pa.table({"a": [1, 2], "b": ["x", None]})))
    yield Decoder("snapshot state, arrow", _state(ArrowCodec()), (arrow, arrow[:-8], arrow[:64]))
    yield Decoder("snapshot records", _assembly, tuple(_assembly_seeds()))
