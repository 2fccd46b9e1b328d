"""Rounds of work and faults against one store, with an accounting after most of them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from streamfold.testing.adversary.accounting import Accountant
from streamfold.testing.adversary.client import Client, Target
from streamfold.testing.adversary.ledger import BrokenPromiseError, Ledger, Totals
from streamfold.testing.adversary.servers import ServerProcess, StartFailedError, small_settings
from streamfold.testing.adversary.storage import Storage
from streamfold.testing.adversary.workload import Workload


@dataclass
class Campaign:
    """One store, attacked round by round. A seed decides what is tried, and machines decide when."""

    seed: int
    folder: Path
    storage: Storage
    environment: Mapping[str, str] = field(default_factory=dict)
    workers: int = 16
    seconds: float = 1.5
    progress: Callable[[Totals], None] = lambda totals: None

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.ledger = Ledger()
        self.target = Target()
        self.client = Client(self.target)
        self.workload = Workload(self.ledger, self.client, random.Random(self.seed + 1))
        self.accountant = Accountant(self.ledger, self.client, random.Random(self.seed + 2))
        self.server: ServerProcess | None = None
        self.log = self.folder / "servers.log"

    async def run(self, rounds: int) -> Totals:
        """Attack for so many rounds; BrokenPromiseError as soon as a promise is broken."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.workload.prepare()
        try:
            async with self.storage.running():
                for _ in range(rounds):
                    await self._round()
                await self._restart()
                await self.accountant.account()
        except StartFailedError as error:
            raise BrokenPromiseError(None, str(error)) from None
        finally:
            if self.server is not None:
                self.server.resume()
                await self.server.kill()
            self.client.close()
        return self.ledger.totals

    async def _round(self) -> None:
        dice, totals = self.dice, self.ledger.totals
        if self.server is None:
            await self._start()
        until = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.workload.run(self.workers, until))
                group.create_task(self._attack(until))
        except* BrokenPromiseError as errors:
            raise _first(errors) from None
        totals.rounds += 1
        if dice.random() < 0.6:
            await self._start()
            await self.accountant.account()
            if dice.random() < 0.5:
                await self._end(dice.choice([self._kill, self._stop]))
        self.progress(totals)

    async def _attack(self, until: asyncio.Event) -> None:
        """Let the clients work for a while, hurt the server, and end it in one way or another."""
        dice = self.dice
        try:
            await asyncio.sleep(self.seconds * dice.uniform(0.2, 1))
            async with self.storage.disturbed(random.Random(dice.random()), self.ledger):
                if dice.random() < 0.2:
                    await self._pause()
                if dice.random() < 0.15:
                    await self._take_over()
                await asyncio.sleep(self.seconds * dice.uniform(0, 0.5))
                await self._end(dice.choice([self._kill, self._kill, self._stop]))
        finally:
            until.set()

    async def _start(self, *, take_over: bool = False) -> None:
        """Start a server; requests go to it from now on."""
        settings = small_settings(self.dice)
        kernels = self.dice.random() < 0.1
        self.server = await ServerProcess.start(
            self.storage.location,
            settings,
            self.log,
            {**self.storage.environment, **self.environment},
            kernels=kernels,
            take_over=take_over,
        )
        self.target.generation += 1
        self.target.port = self.server.port
        self.ledger.event(f"server {self.target.generation} starts: {settings}")

    async def _restart(self) -> None:
        if self.server is not None:
            await self._end(self._stop)
        await self._start()

    async def _end(self, how: Callable[[ServerProcess], Awaitable[None]]) -> None:
        server, self.server = self.server, None
        if server is not None:
            await how(server)

    async def _kill(self, server: ServerProcess) -> None:
        self.ledger.event(f"server {self.target.generation} is killed")
        await server.kill()
        self.ledger.totals.kills += 1

    async def _stop(self, server: ServerProcess) -> None:
        self.ledger.event(f"server {self.target.generation} is asked to stop")
        await server.stop()
        self.ledger.event(f"server {self.target.generation} has stopped")
        self.ledger.totals.stops += 1

    async def _pause(self) -> None:
        if self.server is not None:
            self.ledger.event(f"server {self.target.generation} is paused")
            self.server.pause()
            await asyncio.sleep(self.dice.uniform(0.1, 3))
            self.server.resume()
            self.ledger.event(f"server {self.target.generation} continues")
            self.ledger.totals.pauses += 1

    async def _take_over(self) -> None:
        """Start a second server on the same store while the first one works."""
        former, generation = self.server, self.target.generation
        try:
            await self._start(take_over=True)
        except StartFailedError as error:
            # Storage failed just then, or the first server opened it anew and claimed it last.
            self.ledger.event(f"server {generation} keeps the store: {error}")
            return
        self.ledger.event(f"server {self.target.generation} has taken over from {generation}")
        self.ledger.totals.takeovers += 1
        await asyncio.sleep(self.seconds * self.dice.uniform(0, 1))
        if former is not None:
            await former.kill()
            self.ledger.event(f"server {generation} is killed")


def _first(errors: BaseExceptionGroup[BaseException]) -> BrokenPromiseError:
    """One of the violations of a group."""
    for error in errors.exceptions:
        if isinstance(error, BrokenPromiseError):
            return error
        if isinstance(error, BaseExceptionGroup):
            return _first(error)
    raise errors
