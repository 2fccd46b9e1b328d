"""Runs rounds of work and faults against one store, with an accounting after most of them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamfold.testing.adversary.accounting import Accountant
from streamfold.testing.adversary.client import Client, CurrentServer
from streamfold.testing.adversary.ledger import BrokenPromiseError, Ledger, Totals
from streamfold.testing.adversary.program import Program
from streamfold.testing.adversary.servers import ServerProcess, StartFailedError, small_settings
from streamfold.testing.adversary.storage import FlakyBucket, LocalFolder, Storage
from streamfold.testing.adversary.workload import Workload

#: Acks that a round waits for, and the maximum seconds.
_ROUND_ACKS, _ROUND_WAIT = 30, 10.0
#: Seconds by which a machine's system clock may be ahead.
_CLOCKS = (0.0, 0.0, 2.0, -2.0, 300.0, -300.0, 7200.0, -7200.0)


@dataclass
class Campaign:
    """One store, attacked in rounds.

    The seed decides what is attempted, and the machine decides when.
    """

    program: Program
    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    progress: Callable[[Totals], None] = lambda totals: None

    def __post_init__(self) -> None:
        seed = self.program.seed
        self.storage: Storage = (
            FlakyBucket() if self.program.storage == "s3" else LocalFolder(self.folder)
        )
        self.dice = random.Random(seed)
        self.ledger = Ledger()
        self.target = CurrentServer()
        self.client = Client(self.target)
        self.workload = Workload(self.ledger, self.client, random.Random(seed + 1), self.program)
        self.accountant = Accountant(self.ledger, self.client, random.Random(seed + 2))
        self.server: ServerProcess | None = None
        #: The current server, and the one that it is taking over from.
        self.servers: list[ServerProcess] = []
        self.log = self.folder / "servers.log"

    async def run(self) -> Totals:
        """Run all rounds. Raises BrokenPromiseError at the first broken guarantee."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.workload.prepare()
        try:
            async with self.storage.running():
                while self._goes_on():
                    await self._round()
                await self._restart()
                await self.accountant.account()
                await self._end_by(self._stop)
        except StartFailedError as error:
            raise BrokenPromiseError(None, str(error)) from None
        finally:
            for server in self.servers:
                server.resume()
                await server.kill()
            self.client.close()
        return self.ledger.totals

    def _goes_on(self) -> bool:
        totals, program = self.ledger.totals, self.program
        return (
            totals.rounds < program.rounds
            or totals.kills + totals.stops < program.ends
            or totals.acknowledged < program.acks
        )

    def _has(self, fault: str) -> bool:
        return fault in self.program.faults

    def _happens(self, fault: str, probability: float) -> bool:
        """Return whether a fault happens now. Disabled faults consume the same dice."""
        return self.dice.random() < probability and self._has(fault)

    async def _round(self) -> None:
        dice, totals = self.dice, self.ledger.totals
        await self._ensure_server()
        until = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.workload.run(until))
                group.create_task(self._attack(until))
        except* BrokenPromiseError as errors:
            raise _first(errors) from None
        totals.rounds += 1
        if dice.random() < 0.4:
            await self._ensure_server()
            await self.accountant.account()
            if dice.random() < 0.7:
                await self._end()
        self.progress(totals)

    async def _attack(self, until: asyncio.Event) -> None:
        """Let the clients work, inject faults, and end the server in some way."""
        dice, seconds = self.dice, self.program.seconds
        try:
            await asyncio.sleep(seconds * dice.uniform(0.2, 1))
            await self._wait_for_acks()
            powered = self.server is not None and self.server.powered
            disturbance = random.Random(dice.random())
            async with (
                self.storage.disturbed(disturbance, self.ledger, self._tell)
                if self._has("storage") and not powered
                else nullcontext()
            ):
                if self._happens("pause", 0.2):
                    await self._pause()
                if self._happens("take over", 0.15) and not powered:
                    await self._take_over()
                await asyncio.sleep(seconds * dice.uniform(0, 0.5))
                await self._end()
        finally:
            until.set()

    async def _wait_for_acks(self) -> None:
        """Wait for some acks, because a round without any proves nothing."""
        totals = self.ledger.totals
        enough, until = totals.acknowledged + _ROUND_ACKS, time.monotonic() + _ROUND_WAIT
        while totals.acknowledged < enough and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    def _tell(self, order: dict[str, Any]) -> None:
        for server in self.servers:
            server.tell(order)

    async def _start(self, *, take_over: bool = False) -> None:
        """Start a server, and send all requests to it from now on."""
        settings = small_settings(self.dice)
        ahead = self.dice.choice(_CLOCKS)
        if self._happens("clock", 0.3) and not take_over:
            self._set_clock(ahead)
        powered = self._happens("power", 0.15) and not take_over
        server = await ServerProcess.start(
            self.storage.location,
            settings,
            self.log,
            {**self.storage.environment, **self.environment},
            take_over=take_over,
            clock=self.ledger.clock.ahead_ms / 1000,
            disk=self.storage.disk(powered=powered),
        )
        self.server = server
        self.servers.append(server)
        self.target.generation += 1
        self.target.port = server.port
        self.ledger.event(f"server {self.target.generation} starts: {settings}")

    async def _ensure_server(self) -> None:
        """Start a server if necessary. One whose disk could not sync has stopped by itself."""
        if self.server is not None and self.server.ended:
            self.servers.remove(self.server)
            self.server = None
        if self.server is None:
            await self._start()

    def _set_clock(self, seconds: float) -> None:
        clock = self.ledger.clock
        if clock.ahead_ms != seconds * 1000:
            clock.wall_ms()
            clock.ahead_ms = round(seconds * 1000)
            self.ledger.totals.clock_moves += 1
            self.ledger.event(f"the system clock is {seconds:+g} s off from now on")

    async def _restart(self) -> None:
        if self.server is not None:
            await self._end_by(self._stop)
        await self._start()

    async def _end(self) -> None:
        """End the server by one of the program's faults, if any."""
        ends = [
            *[self._kill] * (2 * self._has("kill")),
            *[self._stop] * self._has("stop"),
        ]
        end = self.dice.choice([self._kill, self._kill, self._stop])
        if self.server is not None and self.server.powered:
            await self._end_by(self._cut_power)
        elif ends:
            await self._end_by(end if end in ends else ends[0])

    async def _end_by(self, end: Callable[[ServerProcess], Awaitable[None]]) -> None:
        server, self.server = self.server, None
        if server is not None:
            await end(server)
            self.servers.remove(server)

    async def _kill(self, server: ServerProcess) -> None:
        self.ledger.event(f"server {self.target.generation} is killed")
        await server.kill()
        self.ledger.totals.kills += 1

    async def _stop(self, server: ServerProcess) -> None:
        self.ledger.event(f"server {self.target.generation} is asked to stop")
        await server.stop()
        self.ledger.event(f"server {self.target.generation} has stopped")
        self.ledger.totals.stops += 1

    async def _cut_power(self, server: ServerProcess) -> None:
        self.ledger.event(f"the machine of server {self.target.generation} loses power")
        await server.cut_power(self.storage.image(), self.dice.random())
        await asyncio.to_thread(self.storage.boot)
        self.ledger.totals.power_cuts += 1

    async def _pause(self) -> None:
        if self.server is not None:
            self.ledger.event(f"server {self.target.generation} is paused")
            self.server.pause()
            await asyncio.sleep(self.dice.uniform(0.1, 3))
            self.server.resume()
            self.ledger.event(f"server {self.target.generation} continues")
            self.ledger.totals.pauses += 1

    async def _take_over(self) -> None:
        """Start a second server on the same store while the first is running."""
        former, generation = self.server, self.target.generation
        try:
            await self._start(take_over=True)
        except StartFailedError as error:
            if error.replaced:
                text = f"server {generation} took the store back from its replacement: {error}"
                raise BrokenPromiseError(None, text) from None
            # Storage failed for long or denied a write.
            self.ledger.event(f"server {generation} keeps the store: {error}")
            return
        self.ledger.event(f"server {self.target.generation} has taken over from {generation}")
        self.ledger.totals.takeovers += 1
        await asyncio.sleep(self.program.seconds * self.dice.uniform(0, 1))
        if former is not None:
            await former.kill()
            self.servers.remove(former)
            self.ledger.event(f"server {generation} is killed")


def _first(errors: BaseExceptionGroup[BaseException]) -> BrokenPromiseError:
    """Return one violation of a group."""
    for error in errors.exceptions:
        if isinstance(error, BrokenPromiseError):
            return error
        if isinstance(error, BaseExceptionGroup):
            return _first(error)
    raise errors
