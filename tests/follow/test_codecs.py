from __future__ import annotations

from typing import Any

import msgspec
import pyarrow as pa
import pytest

from streamfold.blob import open_blob_store
from streamfold.errors import InvalidError
from streamfold.follow import (
    CODECS,
    BytesCodec,
    Codec,
    JsonCodec,
    MsgpackCodec,
    external,
    in_stream,
)
from streamfold.follow.encoding.arrow_codec import ArrowCodec
from streamfold.follow.encoding.container import Description, pack, unpack
from streamfold.follow.encoding.stream_writer import regroup
from streamfold.follow.errors import SnapshotCorruptError
from streamfold.follow.snapshots.placement import BlobSnapshots
from streamfold.follow.snapshots.policy import prune
from streamfold.testing import CodecConformance


class Stock(msgspec.Struct):
    items: dict[str, int]


TABLE = pa.table({"n": list(range(100_000)), "text": [str(n) for n in range(100_000)]})
STATES: list[tuple[Codec[Any], Any]] = [
    (JsonCodec(), {"a": [1, 2.5, None, "ü"]}),
    (JsonCodec(), {str(number): "x" * 100 for number in range(30_000)}),
    (JsonCodec(Stock), Stock({"apple": 3})),
    (MsgpackCodec(), {"raw": b"\x00\xff", "n": 2**63}),
    (MsgpackCodec(Stock), Stock({})),
    (BytesCodec(), b""),
    (BytesCodec(), bytes(range(256)) * 20_000),
    (ArrowCodec(), TABLE),
    (ArrowCodec(rows_per_batch=1000), TABLE),
    (ArrowCodec(), TABLE.slice(0, 0)),
]


class TestJson(CodecConformance):
    @pytest.fixture
    def codec(self) -> Codec[Any]:
        return CODECS.get("json").open()


class TestMsgpack(CodecConformance):
    @pytest.fixture
    def codec(self) -> Codec[Any]:
        return CODECS.get("msgpack").open()


class TestBytes(CodecConformance):
    notices_cuts = False

    @pytest.fixture
    def codec(self) -> Codec[Any]:
        return CODECS.get("bin").open()

    def states(self) -> list[Any]:
        return [b"", bytes(range(256)) * 20_000]


class TestArrow(CodecConformance):
    @pytest.fixture
    def codec(self) -> Codec[Any]:
        return CODECS.get("arrow").open()

    def states(self) -> list[Any]:
        return [TABLE, TABLE.slice(0, 0)]


def test_a_codec_has_the_name_that_it_is_registered_under() -> None:
    assert [codec.open().name for codec in CODECS] == list(CODECS.ids())


@pytest.mark.parametrize("name", ["", "Json", "avro.v2", "jsonü", "x" * 41])
def test_a_codec_whose_snapshots_no_reader_would_find_is_refused(name: str) -> None:
    codec = JsonCodec[Any]()
    codec.name = name
    with pytest.raises(InvalidError, match="codec name"):
        external("memory:", codec=codec)
    with pytest.raises(InvalidError, match="codec name"):
        in_stream(codec=codec)


@pytest.mark.parametrize(("codec", "state"), STATES)
@pytest.mark.parametrize("size", [1000, 1 << 20])
def test_a_state_survives_being_cut_anywhere(codec: Codec[Any], state: Any, size: int) -> None:
    pieces = list(regroup(codec.encode(state), size))
    assert all(len(piece) == size for piece in pieces[:-1])
    assert codec.decode(iter(pieces)) == state


@pytest.mark.parametrize("cut", [1, 100, 512, 513, 10_000])
async def test_a_blob_survives_being_read_in_any_pieces(cut: int) -> None:
    codec, state = STATES[1]
    blob = pack(codec.encode(state), Description.of("id", 7, "json", 5))

    async def pieces() -> Any:
        for at in range(0, len(blob), cut):
            yield blob[at : at + cut]

    if cut == 1:
        blob = pack([b"{}"], Description.of("id", 7, "json", 5))
        state = {}
    unpacked = await unpack("name", pieces())
    assert (unpacked.description.cursor, unpacked.description.created_at) == (7, 5)
    assert unpacked.decode(codec) == state


def test_the_description_can_be_read_by_people() -> None:
    blob = pack([b"[1]"], Description.of("id", 7, "json", 5))
    head, state = blob[:512], blob[512:]
    assert head.startswith(b'{"format":"streamfold-snapshot","version":1,"id":"id","cursor":7,')
    assert head.endswith(b" \n")
    assert state == b"[1]"


async def test_pruning_never_takes_the_newest_that_can_be_read() -> None:
    blobs = open_blob_store("memory:")
    store = BlobSnapshots(blobs)
    for cursor in (10, 20, 30, 40):
        blob = pack([b"{}"], Description.of("id", cursor, "json", 0))
        assert await store.save(cursor, "json", blob)
    await blobs.put("00000000000000000040.json", b"damaged")
    await blobs.put("notes.txt", b"not a snapshot")
    late = 2**50  # milliseconds: everything is older than any age
    gone = await prune(store, keep=1, max_age=1, now=late)
    assert [info.cursor for info in gone] == [40, 20, 10]
    assert [info.cursor for info in await store.list()] == [30]
    assert await blobs.get("notes.txt") == b"not a snapshot"


async def test_pruning_deletes_nothing_when_nothing_can_be_read() -> None:
    blobs = open_blob_store("memory:")
    for cursor in (10, 20):
        await blobs.put(f"{cursor:020d}.json", b"damaged")
    assert await prune(BlobSnapshots(blobs), keep=1, now=0) == []
    assert len(await BlobSnapshots(blobs).list()) == 2


async def test_a_snapshot_is_saved_once_per_cursor() -> None:
    store = BlobSnapshots(open_blob_store("memory:"), "/orders/")
    assert await store.save(10, "json", b"one")
    assert not await store.save(10, "json", b"other")
    assert await store.save(10, "msgpack", b"another form")
    newest = await store.newest()
    assert newest is not None
    assert newest.name.startswith("orders/00000000000000000010.")


async def test_a_state_that_the_codec_refuses_makes_the_snapshot_corrupt() -> None:
    blob = pack([b'{"items":"none"}'], Description.of("id", 7, "json", 5))

    async def pieces() -> Any:
        yield blob

    unpacked = await unpack("the-name", pieces())
    with pytest.raises(SnapshotCorruptError, match=r"the-name .*cannot decode"):
        unpacked.decode(JsonCodec(Stock))
