"""The contents of a golden store: how they are written and described."""

from __future__ import annotations

from typing import Any

import msgspec

from streamfold.errors import FencingTokenMismatchError
from streamfold.model.configs import (
    INFINITE,
    BasinConfig,
    Cipher,
    StorageClass,
    StreamConfigLayer,
    TimestampMode,
)
from streamfold.model.positions import Timestamp
from streamfold.model.records import Header, Record, fence_record, trim_record
from streamfold.store import ReadRequest, SealingKey, StreamStore, from_seq_num

#: 2026-01-01T00:00:00Z in milliseconds: when a golden store was written, by its own clock.
EPOCH = 1_767_225_600_000
#: The key of the sealed streams.
KEY = SealingKey(bytes(range(32)))

PLAIN, CUSTOM, SEALED = "golden-plain", "golden-custom", "golden-sealed"
GOING = "golden-going"
TOKEN = "golden-token"
CUSTOM_CONFIG = BasinConfig(
    default_stream_config=StreamConfigLayer(
        storage_class=StorageClass.STANDARD,
        retention=INFINITE,
        timestamp_mode=TimestampMode.ARRIVAL,
    ),
    create_stream_on_append=True,
    create_stream_on_read=True,
)
LAYER = StreamConfigLayer(
    retention=86_400 * 365 * 100,
    timestamp_mode=TimestampMode.CLIENT_REQUIRE,
    timestamp_uncapped=True,
    delete_on_empty_secs=86_400 * 365 * 100,
)


async def write_tables(store: StreamStore) -> None:
    """The part that ends up in tables."""
    await store.create_basin(PLAIN)
    await store.create_basin(CUSTOM, CUSTOM_CONFIG, request_token=TOKEN)
    await store.create_basin(SEALED, BasinConfig(stream_cipher=Cipher.AES_256_GCM))
    await store.create_basin(GOING)
    await store.create_stream(PLAIN, "configured/ströme", LAYER, request_token=TOKEN)
    for stream in ("empty", "records", "trimmed", "bare", "fenced", "going"):
        await store.create_stream(PLAIN, stream, StreamConfigLayer(retention=INFINITE))
    await store.append(PLAIN, "records", [Record(b"%d" % number) for number in range(300)])
    headers = (Header(b"name", b"value"), Header(b"name", b""), Header(b"\xff", bytes(300)))
    await store.append(PLAIN, "records", [Record(b"", headers), Record(bytes(range(256)))])
    far = Timestamp(EPOCH + 86_400_000)
    await store.append(PLAIN, "configured/ströme", [Record(b"ahead of time", (), far)])
    await store.append(PLAIN, "trimmed", [Record(b"a"), Record(b"b"), Record(b"c"), trim_record(1)])
    await store.append(PLAIN, "bare", [Record(b"a"), Record(b"b"), trim_record(3)])
    await store.append(PLAIN, "fenced", [fence_record("first"), Record(b"a")])
    await store.append(PLAIN, "going", [Record(b"soon gone")])
    await store.append(CUSTOM, "made-by-append", [Record(b"a")])
    await store.create_stream(SEALED, "sealed", StreamConfigLayer(retention=INFINITE))
    await store.append(SEALED, "sealed", [Record(b"secret"), Record(b"more")], key=KEY)
    await store.create_stream(GOING, "stream")
    await store.append(GOING, "stream", [Record(b"goes with its basin")])
    await store.upkeep()


async def write_log(store: StreamStore) -> None:
    """The part that is in the log alone when the writer dies."""
    for number in range(5):
        await store.append(PLAIN, "records", [Record(b"log %d" % number)] * 3)
    await store.append(PLAIN, "trimmed", [Record(b"d"), trim_record(3), Record(b"e")])
    await store.append(PLAIN, "fenced", [fence_record("second"), Record(b"b")])
    await store.append(SEALED, "sealed", [Record(b"last")], key=KEY)
    await store.ensure_basin(SEALED, BasinConfig(stream_cipher=Cipher.AEGIS_256))
    await store.create_stream(SEALED, "otherwise", StreamConfigLayer(retention=INFINITE))
    await store.append(SEALED, "otherwise", [Record(b"secret")], key=KEY)


async def finish_deletions(store: StreamStore) -> None:
    """A basin goes in the pass after its last stream."""
    await store.upkeep()
    await store.upkeep()


async def describe(store: StreamStore) -> dict[str, Any]:
    """Everything that `store` holds once nothing is left to be deleted, as JSON has it."""
    await finish_deletions(store)
    basins = {}
    for basin in (await store.list_basins()).items:
        streams = {}
        for info in (await store.list_streams(basin.name)).items:
            streams[info.name] = await _tell_stream(store, basin.name, info.name)
            streams[info.name]["info"] = info
        config = await store.basin_config(basin.name)
        basins[basin.name] = {"info": basin, "config": config, "streams": streams}
    reported: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(basins))
    return reported


async def _tell_stream(store: StreamStore, basin: str, stream: str) -> dict[str, Any]:
    key = KEY if basin == SEALED else None
    tail = await store.check_tail(basin, stream)
    records: list[Any] = []
    position = 0
    while position < tail.seq_num:
        batch = await store.read(
            basin, stream, ReadRequest(from_seq_num(position), clamp=True, wait=0.001), key=key
        )
        records += batch.records()
        if not batch.count:
            break
        position = batch.end_seq_num
    try:
        await store.append(basin, stream, [Record(b"x")], fencing_token="another", key=key)
    except FencingTokenMismatchError as error:
        token = error.current
    return {
        "config": await store.stream_config(basin, stream),
        "tail": tail,
        "fencing_token": token,
        "records": records,
    }
