"""Readers: of tails, of lists, of streams that do not exist, and followers."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import suppress
from dataclasses import dataclass

from streamfold.testing.adversary import sessions
from streamfold.testing.adversary.client import Client, LostError
from streamfold.testing.adversary.ledger import BrokenPromiseError, Ledger, Outcome, StreamHistory
from streamfold.testing.adversary.reading import Recognizer, observe, stream_headers


@dataclass
class Readers:
    """Read while others write: no answer may contradict what is certain by then."""

    ledger: Ledger
    client: Client
    _missing: int = 0

    async def read_missing(self, basin: str, dice: random.Random) -> None:
        """Ask for a stream that does not exist in a basin that does, through either face."""
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
        """Ask for the tail: it never goes back."""
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
        """Read a Durable Stream from its tail on: what comes is there for every other reader."""
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
            elif append.outcome is Outcome.UNKNOWN:
                append.outcome = Outcome.SEEN
            self.ledger.totals.followed += 1

    async def list_streams(self, basin: str) -> None:
        """List a basin: every stream that exists is there."""
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
        """List the basins: those that exist and are never deleted are there."""
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
                    await sessions.follow(self.client, self.ledger, history, start)
        await asyncio.sleep(0.05)
