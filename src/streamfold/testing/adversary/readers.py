"""Readers of tails, listings and missing streams, and followers."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import suppress
from dataclasses import dataclass

from streamfold.testing.adversary.client import (
    Client,
    LostError,
    read_chunks,
    read_head,
)
from streamfold.testing.adversary.ledger import (
    Breach,
    BrokenPromiseError,
    Ledger,
    OperationOutcome,
    StreamHistory,
)
from streamfold.testing.adversary.reading import (
    Recognizer,
    decode_records,
    observe,
    stream_headers,
)


@dataclass
class Readers:
    """Reads while others write. No answer may contradict certain facts."""

    ledger: Ledger
    client: Client
    _missing: int = 0

    async def read_missing(self, basin: str, dice: random.Random) -> None:
        """Request a missing stream in an existing basin, through either face."""
        self._missing += 1
        name = f"missing-{self._missing}"
        path = dice.choice(
            [
                f"/v1/streams/{name}/records/tail",
                f"/v1/streams/{name}/records?seq_num=0",
                f"/v1/streams/{name}/snapshots",
                f"/{basin}/{name}?offset=-1",
            ]
        )
        headers = stream_headers(basin) if path.startswith("/v1") else None
        answer = await self.client.exchange("GET", path, headers)
        self.ledger.totals.reads += 1
        if answer.status not in (404, 500, 503):
            raise BrokenPromiseError(None, f"GET {basin} {path} answers {answer}")

    async def check_tail(self, history: StreamHistory) -> None:
        """Check that the tail never goes back."""
        life, changes = history.living, history.changes
        if life is None:
            return
        floor = life.tail
        path = f"/v1/streams/{history.name}/records/tail"
        answer = await self.client.exchange("GET", path, stream_headers(history.basin))
        self.ledger.totals.reads += 1
        if history.changes != changes or not history.settled or answer.status in (500, 503):
            return
        tail = answer.json()["tail"]["seq_num"] if answer.status == 200 else None
        if tail is None or tail < floor:
            raise BrokenPromiseError(
                history, f"the tail of {history} was {floor}, and a request for it answers {answer}"
            )
        life.tail = max(life.tail, tail)

    async def long_poll(self, history: StreamHistory) -> None:
        """Long-poll a Durable Stream from its tail. Returned records exist for all other readers."""
        life = history.living
        if life is None:
            return
        path = f"/{history.basin}/{history.name}?offset={life.tail:016d}_{0:016d}&live=long-poll"
        answer = await self.client.exchange("GET", path)
        self.ledger.totals.reads += 1
        if answer.status != 200:
            return
        for text in json.loads(answer.body):
            append, index = Recognizer(self.ledger, history).name(f'"{text}"'.encode())
            if append.place is not None:
                observe(self.ledger, append, index, append.place + index)
            elif append.outcome is OperationOutcome.UNKNOWN:
                append.outcome = OperationOutcome.SEEN
            self.ledger.totals.followed += 1

    async def list_streams(self, basin: str) -> None:
        """Check that a basin's list has every existing stream."""
        sure = {
            history: history.changes
            for history in self.ledger.histories.values()
            if history.basin == basin and history.living is not None
        }
        path = "/v1/streams?limit=1000"
        answer = await self.client.exchange("GET", path, {"s2-basin": basin})
        if answer.status != 200:
            return
        listed = {item["name"] for item in answer.json()["streams"] if not item["deleted_at"]}
        for history, changes in sure.items():
            still = history.changes == changes and history.living is not None
            if still and history.name not in listed:
                raise BrokenPromiseError(history, f"{history} exists, and is not listed")

    async def list_basins(self, names: set[str]) -> None:
        """Check that the basin list has every basin that is never deleted."""
        answer = await self.client.exchange("GET", "/v1/basins?limit=1000")
        self.ledger.totals.reads += 1
        if answer.status == 200:
            missing = names - {item["name"] for item in answer.json()["basins"]}
            if missing:
                raise BrokenPromiseError(
                    None, f"basins {sorted(missing)} exist, and are not listed"
                )

    async def follow(self, history: StreamHistory, dice: random.Random) -> None:
        """Follow a stream for a while."""
        life = history.living
        if life is not None:
            start = dice.choice([life.first, life.tail])
            with suppress(LostError, TimeoutError):
                async with asyncio.timeout(dice.uniform(0.3, 3)):
                    await follow(self.client, self.ledger, history, start)
        await asyncio.sleep(0.05)


def may_lose_records(history: StreamHistory) -> bool:
    """Return whether records may disappear during a read, by retention, trim or snapshot."""
    life = history.life
    return (
        history.age is not None
        or life is None
        or any(snapshot.trims for ancestor in life.ancestors() for snapshot in ancestor.snapshots)
        or any(append.trim is not None for append in history.appends)
    )


async def follow(client: Client, ledger: Ledger, history: StreamHistory, start: int) -> None:
    """Follow a stream by server-sent events. Every record counts as seen."""
    headers = stream_headers(history.basin) | {"accept": "text/event-stream"}
    path = f"/v1/streams/{history.name}/records?seq_num={start}&clamp=true"
    changes = history.changes
    recognizer = Recognizer(ledger, history)
    position: int | None = None
    async with client.streaming("GET", path, headers) as (reader, _):
        status, _answered = await read_head(reader)
        if status != 200:
            raise LostError(str(status), sent=True)
        unread = b""
        async for piece in read_chunks(reader):
            *events, unread = (unread + piece).split(b"\n\n")
            for event in events:
                if not event.startswith(b"event: batch"):
                    continue
                batch = json.loads(event[event.index(b"\ndata: ") + 7 :])
                for record in decode_records(batch):
                    if position is not None and record.seq_num < position:
                        raise BrokenPromiseError(
                            history, f"a follower of {history} is sent {record.seq_num} again"
                        )
                    skipped = position is not None and record.seq_num > position
                    if skipped and not may_lose_records(history):
                        raise BrokenPromiseError(
                            history,
                            f"a follower of {history} waits for {position}, and is sent "
                            f"{record.seq_num}",
                            Breach.LOST,
                        )
                    position = record.seq_num + 1
                    named = recognizer.recognize(record)
                    if named is None:
                        continue
                    observe(ledger, *named, record.seq_num)
                    ledger.totals.followed += 1
                    life = history.living
                    if life is not None and history.changes == changes:
                        life.tail = max(life.tail, position)
