"""Streams with traits, for tests: short ways to create, append and read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streamfold.model.names import StreamName
from streamfold.model.records import CONTINUED, Record
from streamfold.model.resources import OCTETS, Claim, Producer, StreamStatus
from streamfold.records.batch import RecordBatch
from streamfold.store.append_queues import AppendOutcome
from streamfold.store.catalog.creation import ForkSpec, NewStream, prepared
from streamfold.store.log.admission import AppendRequest
from streamfold.store.log.sealing import SealingKey
from streamfold.store.store import StreamStore
from tests.store.conftest import BASIN


def batches(*bodies: bytes) -> list[RecordBatch]:
    """One append of these records."""
    last = len(bodies) - 1
    records = [
        Record(body, (CONTINUED,) if index < last else ()) for index, body in enumerate(bodies)
    ]
    return [RecordBatch.of(records)] if records else []


def spec(*bodies: bytes, **changes: Any) -> NewStream:
    settings: dict[str, Any] = {
        "content_type": None,
        "ttl": None,
        "expires_at": None,
        "trim_on_snapshot": False,
        "closed": False,
        "fork": None,
        "content": prepared(batches(*bodies)),
        "key": None,
    }
    return NewStream(**settings | changes)


def fork_of(
    source: str, seq_num: int | None = None, sub_offset: int = 0, *, in_records: bool = False
) -> ForkSpec:
    return ForkSpec(StreamName(source), seq_num, sub_offset, lambda _: in_records)


async def create(
    store: StreamStore, stream: str, *bodies: bytes, **changes: Any
) -> tuple[StreamStatus, bool]:
    return await store.stream(BASIN, stream).create(spec(*bodies, **changes))


async def append(
    store: StreamStore,
    stream: str,
    *bodies: bytes,
    producer: tuple[str, int, int] | None = None,
    seq: str | None = None,
    close: bool = False,
    key: SealingKey | None = None,
) -> AppendOutcome:
    claim = Claim(OCTETS if bodies else None, Producer(*producer) if producer else None, seq, close)
    return await append_to(store, stream, claim, batches(*bodies), key)


async def append_to(
    store: StreamStore,
    stream: str,
    claim: Claim,
    batches: Sequence[RecordBatch],
    key: SealingKey | None = None,
) -> AppendOutcome:
    """Append with any claim."""
    request = AppendRequest(batches, claim=claim, key=key)
    return await store.stream(BASIN, stream).submit(request).appended()


async def read(
    store: StreamStore, stream: str, start: int = 0, key: SealingKey | None = None
) -> list[bytes]:
    """Bodies of all records from `start` on."""
    found: list[bytes] = []
    async with store.stream(BASIN, stream).reading(start, key) as reading:
        while batch := await reading.read():
            found += [record.body for record in batch.records()]
    return found


async def stamps(store: StreamStore, stream: str) -> Sequence[int]:
    found: list[int] = []
    async with store.stream(BASIN, stream).reading(0) as reading:
        while batch := await reading.read():
            found += [int(record.timestamp) for record in batch.records()]
    return found
