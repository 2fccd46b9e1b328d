"""Clients of both faces that concurrently do everything."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from streamfold.testing.adversary.client import Client, LostError
from streamfold.testing.adversary.ledger import Existence, Ledger, StreamHistory
from streamfold.testing.adversary.lifecycle import Lifecycle
from streamfold.testing.adversary.program import OPERATIONS, Program
from streamfold.testing.adversary.readers import Readers
from streamfold.testing.adversary.writers import Writers

#: Basins: one with S2 streams, one whose appends create streams, one of Durable Streams, and one
#: that is occasionally deleted as a whole.
STREAMS, AUTO, DURABLE, DOOMED = "s2-streams", "auto-streams", "durable-streams", "doomed-streams"
#: Records after which a busy stream, or a small one, is deleted and starts over.
_BUSY_RECORDS, _SMALL_RECORDS = 5000, 800
#: Number of stream names reserved for forks.
_FORKS = 12

Action = Callable[[random.Random], Awaitable[None]]


@dataclass
class Workload:
    """All clients. Each chooses its next action and stream by weights and dice."""

    ledger: Ledger
    client: Client
    dice: random.Random
    program: Program

    def __post_init__(self) -> None:
        conditions = "condition" in self.program.operations
        self.writers = Writers(self.ledger, self.client, conditions=conditions)
        self.readers = Readers(self.ledger, self.client)
        self.lifecycle = Lifecycle(self.ledger, self.client, self.writers)

    def prepare(self) -> None:
        """Name the streams, which are created when first used."""
        for number in range(self.program.busy_streams):
            self._add(STREAMS, f"busy-{number}")
            self._add(DURABLE, f"busy-{number}", json=True)
        for number in range(self.program.small_streams):
            self._add(STREAMS, f"small-{number}", age=3 if number % 5 == 0 else None)
            self._add(AUTO, f"small-{number}", creates=True)
            self._add(DURABLE, f"small-{number}", json=True)
        for number in range(6):
            self._add(DOOMED, f"small-{number}")
        for number in range(_FORKS):
            self._add(DURABLE, f"fork-{number}", json=True)

    def _add(
        self,
        basin: str,
        name: str,
        *,
        json: bool = False,
        age: int | None = None,
        creates: bool = False,
    ) -> StreamHistory:
        history = StreamHistory(basin, name, json, age, creates, self.ledger.clock)
        self.ledger.histories[basin, name] = history
        return history

    async def run(self, until: asyncio.Event) -> None:
        """Work until the event is set. Connection errors are part of the work."""
        seeds = [self.dice.random() for _ in range(self.program.workers)]
        async with asyncio.TaskGroup() as group:
            for seed in seeds:
                group.create_task(self._work(random.Random(seed), until))
            for _ in range(self.program.followers):
                group.create_task(self._follow(random.Random(self.dice.random()), until))

    async def _work(self, dice: random.Random, until: asyncio.Event) -> None:
        actions = self._actions()
        names = [name for name in self.program.operations if name in actions] or ["append"]
        weights = [OPERATIONS[name] for name in names]
        while not until.is_set():
            (name,) = dice.choices(names, weights)
            try:
                await actions[name](dice)
            except LostError:
                await asyncio.sleep(0.1)

    async def _follow(self, dice: random.Random, until: asyncio.Event) -> None:
        while not until.is_set():
            history = self._pick(dice) if dice.random() < 0.4 else self._busy(dice)
            await self.readers.follow(history, dice)

    def _actions(self) -> dict[str, Action]:
        """Return the clients' actions by name."""
        return {
            "append": self._append_somewhere,
            "append to a busy stream": self._append_busy,
            "session": self._session,
            "producer": self._produce,
            "read nothing": self._read_missing,
            "check a tail": lambda dice: self.readers.check_tail(self._pick(dice)),
            "long poll": lambda dice: self.readers.long_poll(self._pick(dice, DURABLE)),
            "list": self._list,
            "herd": self._herd,
            "delete": self._delete,
            "replace": lambda dice: self.lifecycle.replace(self._pick(dice, STREAMS), dice),
            "fork": self._fork,
            "snapshot": self._publish,
            "delete a basin": lambda dice: self.lifecycle.delete_basin(DOOMED),
        }

    def _pick(self, dice: random.Random, *basins: str) -> StreamHistory:
        histories = [h for h in self.ledger.histories.values() if not basins or h.basin in basins]
        return dice.choice(histories)

    async def _append_somewhere(self, dice: random.Random) -> None:
        history = self._pick(dice)
        if await self._ready(history, dice):
            await self.writers.append(history, dice)

    async def _append_busy(self, dice: random.Random) -> None:
        basin, number = dice.choice([STREAMS, DURABLE]), dice.randrange(self.program.busy_streams)
        history = self.ledger.histories[basin, f"busy-{number}"]
        if await self._ready(history, dice):
            await self.writers.append(history, dice)

    async def _ready(self, history: StreamHistory, dice: random.Random) -> bool:
        """Return whether to append now. Creates the stream if it does not exist."""
        if history.existence is Existence.UNSETTLED:
            return False  # until an accounting shows its fate
        if history.existence is Existence.GONE and history.name.startswith("fork"):
            return False
        life = history.living
        limit = _BUSY_RECORDS if history.name.startswith("busy") else _SMALL_RECORDS
        if life is not None and life.tail > limit:
            await self.lifecycle.delete(history, dice)  # keeps long runs small
            return False
        if history.creates and history.changing:
            return False  # with two appends that may create it, nobody could tell which one did
        if history.existence is Existence.GONE and not history.changing:
            await self.lifecycle.create(history)
            return history.living is not None
        return True

    async def _session(self, dice: random.Random) -> None:
        history = self._pick(dice, STREAMS, AUTO)
        if await self._ready(history, dice) and history.existence is Existence.ALIVE:
            await self.writers.session(history, dice)

    async def _produce(self, dice: random.Random) -> None:
        history = self._pick(dice, DURABLE)
        if await self._ready(history, dice):
            await self.writers.produce(history, dice)

    async def _list(self, dice: random.Random) -> None:
        basin = dice.choice([STREAMS, AUTO, DURABLE, DOOMED])
        if basin in self.lifecycle.basins:
            await self.readers.list_streams(basin)
        await self.readers.list_basins(self.lifecycle.basins - {DOOMED})

    async def _read_missing(self, dice: random.Random) -> None:
        basin = dice.choice([STREAMS, AUTO, DURABLE])
        if basin in self.lifecycle.basins:
            await self.readers.read_missing(basin, dice)

    async def _herd(self, dice: random.Random) -> None:
        """Append to many streams at once, while reading streams that do not exist."""
        histories = [h for h in self.ledger.histories.values() if h.living is not None]
        dice.shuffle(histories)

        async def calmly(action: Awaitable[None]) -> None:
            with suppress(LostError):
                await action

        async with asyncio.TaskGroup() as group:
            for history in histories[:60]:
                group.create_task(calmly(self._read_missing(dice)))
                group.create_task(calmly(self.writers.append(history, dice)))

    async def _delete(self, dice: random.Random) -> None:
        """Delete a stream, but a busy one only rarely, and usually create it again at once."""
        history = self._pick(dice)
        if history.name.startswith("busy") and dice.random() < 0.9:
            return
        again = dice.random() < 0.6 and not history.name.startswith("fork")
        if await self.lifecycle.delete(history, dice) and again:
            await self.lifecycle.create(history)

    async def _fork(self, dice: random.Random) -> None:
        target = self.ledger.histories[DURABLE, f"fork-{dice.randrange(_FORKS)}"]
        await self.lifecycle.fork(self._pick(dice, DURABLE), target, dice)

    async def _publish(self, dice: random.Random) -> None:
        await self.lifecycle.publish(self._pick(dice, DURABLE, STREAMS), dice)

    def _busy(self, dice: random.Random) -> StreamHistory:
        number = dice.randrange(self.program.busy_streams)
        return self.ledger.histories[dice.choice([STREAMS, DURABLE]), f"busy-{number}"]
