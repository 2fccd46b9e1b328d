"""Reads the whole store through the server and compares it with the ledger."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from streamfold.testing.adversary.client import Answer, Client, LostError
from streamfold.testing.adversary.comparison import CERTAIN, Comparison
from streamfold.testing.adversary.ledger import (
    BrokenPromiseError,
    Existence,
    Ledger,
    Life,
    OperationOutcome,
    StreamHistory,
)
from streamfold.testing.adversary.reading import (
    StreamContents,
    ask,
    read_stream,
    stream_headers,
)

T = TypeVar("T")

#: Streams read concurrently.
_TOGETHER = 8
#: Seconds for which storage may be unavailable.
_PATIENCE = 60.0
#: Streams per listing page: fewer than in a basin.
_PAGE = 25
#: Milliseconds by which a creation may seem outside its request, because times are rounded.
_CREATION_SLACK_MS = 2
#: Snapshots that a stream retains.
_SNAPSHOTS_KEPT = 16


@dataclass
class Accountant:
    """Compares an otherwise idle server with the ledger."""

    ledger: Ledger
    client: Client
    dice: random.Random

    async def account(self) -> None:
        """Raise BrokenPromiseError for any difference."""
        ledger = self.ledger
        ledger.event(f"accounting by server {self.client.target.generation}")
        listed = await self._insist(self._list_all)
        self._settle_existence(listed)
        limit = asyncio.Semaphore(_TOGETHER)

        async def check(history: StreamHistory) -> None:
            async with limit:
                await self._insist(lambda: self._check(history), history)

        histories = list(ledger.histories.values())
        self.dice.shuffle(histories)
        try:
            async with asyncio.TaskGroup() as group:
                for history in histories:
                    group.create_task(check(history))
        except* BrokenPromiseError as errors:
            raise errors.exceptions[0] from None
        ledger.give_up_unknown(self.client.target.generation)
        ledger.forget_past()
        ledger.totals.accountings += 1

    async def _insist(
        self, step: Callable[[], Awaitable[T]], history: StreamHistory | None = None
    ) -> T:
        """Repeat a step until the server answers it."""
        deadline = asyncio.get_running_loop().time() + _PATIENCE
        while True:
            try:
                return await step()
            except LostError as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise BrokenPromiseError(
                        history, f"the server does not recover: {error}"
                    ) from None
                await asyncio.sleep(0.2)

    async def _list_all(self) -> dict[tuple[str, str], str]:
        """Return the creation times of all listed streams."""
        streams: dict[tuple[str, str], str] = {}
        basins = (await ask(self.client, "GET", "/v1/basins", {})).json()["basins"]
        for basin in basins:
            if basin["deleted_at"] is not None:
                continue
            name, more = basin["name"], True
            after = ""
            while more:
                path = f"/v1/streams?limit={_PAGE}&start_after={after}"
                answer = await ask(self.client, "GET", path, {"s2-basin": name})
                page = answer.json()
                for stream in page["streams"]:
                    after = stream["name"]
                    if stream["deleted_at"] is None:
                        streams[name, after] = stream["created_at"]
                more = page["has_more"]
        return streams

    def _settle_existence(self, listed: dict[tuple[str, str], str]) -> None:
        """Compare the list with what must exist, and settle uncertain existence."""
        for key in listed.keys() - self.ledger.histories.keys():
            raise BrokenPromiseError(
                None, f"stream {key[0]}/{key[1]} is listed, and nobody created it"
            )
        for key, history in self.ledger.histories.items():
            created_at = listed.get(key)
            if history.existence is Existence.UNSETTLED:
                self._settle(history, created_at)
            alive = history.existence is Existence.ALIVE
            if alive and created_at is None:
                raise BrokenPromiseError(history, f"{history} exists, and is not listed")
            if not alive and created_at is not None:
                raise BrokenPromiseError(history, f"{history} does not exist, and is listed")
            life = history.life
            if alive and life is not None and created_at is not None:
                life.created_at = life.created_at or created_at
                if life.created_at != created_at:
                    raise BrokenPromiseError(
                        history,
                        f"{history} was created at {life.created_at}, and is another stream now, "
                        f"created at {created_at}",
                    )

    def _settle(self, history: StreamHistory, created_at: str | None) -> None:
        """Settle whether an unanswered creation or deletion happened."""
        if created_at is None:
            history.die()
            history.note("is found missing")
            return
        history.note(f"is found, created at {created_at}")
        created_ms = _milliseconds(created_at)
        life = history.life
        if life is not None and life.died is None and _is_birth_of(life, created_at, created_ms):
            history.existence = Existence.ALIVE  # created as requested, or not deleted
        else:
            if life is not None and life.died is None:
                history.die()
            history.be_born(history.deleted, created_ms)

    async def _check(self, history: StreamHistory) -> None:
        began_ms = self.ledger.clock.wall_ms()
        contents = await read_stream(self.client, history.basin, history.name)
        life = history.life if history.existence is Existence.ALIVE else None
        if isinstance(contents, Answer):
            if contents.status not in (404, 409, 410) or life is not None:
                raise BrokenPromiseError(
                    history, f"{history} {history.existence}, and a read answers {contents}"
                )
            return
        if life is None:
            raise BrokenPromiseError(
                history, f"{history} does not exist, and a read returns records"
            )
        self.ledger.clock.wall_ms()
        comparison = Comparison(
            self.ledger, life, contents, self.client.target.generation, began_ms
        )
        comparison.check_records()
        comparison.check_appends()
        comparison.check_start(await self._check_snapshots(life, contents))
        comparison.conclude()
        if history.json and contents.records and self.dice.random() < 0.3:
            await self._check_other_face(history, contents)

    async def _check_other_face(self, history: StreamHistory, contents: StreamContents) -> None:
        """Check that Durable Streams return the same records as S2."""
        position, texts = contents.first, [record.body for record in contents.records]
        path = f"/{history.basin}/{history.name}?offset={position:016d}_{0:016d}"
        answer = await ask(self.client, "GET", path, {})
        expected = b"[" + b",".join(texts) + b"]"
        whole = answer.headers.get("stream-up-to-date") == "true"
        if answer.status != 200 or (whole and answer.body != expected):
            raise BrokenPromiseError(
                history,
                f"{history} has {len(texts)} records from {position} on, and a read of the Durable "
                f"Stream answers {answer}",
            )

    async def _check_snapshots(self, life: Life, contents: StreamContents) -> list[int]:
        """Check that acknowledged snapshots are listed, and the newest has its bytes."""
        history = life.history
        headers = stream_headers(history.basin)
        path = f"/v1/streams/{history.name}/snapshot"
        answer = await ask(self.client, "GET", f"{path}s", headers)
        if answer.status != 200:
            raise BrokenPromiseError(history, f"the list of snapshots answers {answer}")
        listed = [int(item["offset"]) for item in answer.json()["snapshots"]]
        fresh = self.client.target.generation
        for snapshot in life.snapshots:
            if snapshot.position in listed and snapshot.outcome is OperationOutcome.UNKNOWN:
                pass  # its bytes distinguish it from another at the same position
            elif snapshot.outcome is OperationOutcome.UNKNOWN and snapshot.generation < fresh:
                snapshot.outcome = OperationOutcome.ABSENT
            newer = sum(position > snapshot.position for position in listed)
            if (
                snapshot.outcome in CERTAIN
                and snapshot.position not in listed
                and snapshot.position >= contents.first
                and newer < _SNAPSHOTS_KEPT
            ):
                raise BrokenPromiseError(
                    history,
                    f"snapshot {snapshot.id} at {snapshot.position} was acknowledged, and is not "
                    f"listed: {listed}",
                )
        if listed:
            await self._check_content(life, max(listed), path, headers)
        return listed

    async def _check_content(
        self, life: Life, position: int, path: str, headers: dict[str, str]
    ) -> None:
        answer = await ask(self.client, "GET", f"{path}/{position}", headers)
        candidates = [
            snapshot
            for snapshot in life.snapshots
            if snapshot.position == position and snapshot.content() == answer.body
        ]
        if answer.status != 200 or not candidates:
            raise BrokenPromiseError(
                life.history, f"the newest snapshot, at {position}, answers {answer}"
            )
        for snapshot in candidates:
            if snapshot.outcome in (OperationOutcome.REFUSED, OperationOutcome.ABSENT):
                raise BrokenPromiseError(
                    life.history,
                    f"snapshot {snapshot.id} at {position} was {snapshot.outcome}, and exists",
                )
            if snapshot.outcome is OperationOutcome.UNKNOWN:
                snapshot.outcome = OperationOutcome.SEEN


def _is_birth_of(life: Life, created_at: str, created_ms: int) -> bool:
    """Return whether a stream with this creation time belongs to the life."""
    if life.created_at is not None:
        return created_at == life.created_at
    if created_ms < life.born_ms - _CREATION_SLACK_MS:
        return False
    return life.answered_ms is None or created_ms <= life.answered_ms + _CREATION_SLACK_MS


def _milliseconds(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1000)
