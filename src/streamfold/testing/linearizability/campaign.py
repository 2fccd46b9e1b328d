"""Kills, stops, pauses and replaces a server while clients of many streams record histories."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from streamfold.testing.adversary.client import Client, CurrentServer
from streamfold.testing.adversary.ledger import BrokenPromiseError, Ledger
from streamfold.testing.adversary.servers import ServerProcess, StartFailedError, small_settings
from streamfold.testing.adversary.storage import Storage
from streamfold.testing.linearizability.clients import (
    BASIN,
    ClientKind,
    StreamClients,
    UnexpectedAnswerError,
)
from streamfold.testing.linearizability.contradiction import Contradiction
from streamfold.testing.linearizability.history import OperationHistory
from streamfold.testing.linearizability.log_order import Judgement, Verdict, check


class NotLinearizableError(Exception):
    """No order of the history's operations explains all its answers."""

    def __init__(self, history: OperationHistory, contradiction: Contradiction) -> None:
        super().__init__(contradiction.text)
        self.history = history
        self.contradiction = contradiction


@dataclass
class RunFigures:
    """Counters of a run and of the verdicts on its histories."""

    operations: int = 0
    streams: int = 0
    acknowledged_appends: int = 0
    unknown_outcomes: int = 0
    kills: int = 0
    stops: int = 0
    pauses: int = 0
    take_overs: int = 0
    storage_faults: int = 0
    undecided: int = 0
    violations: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in vars(self).items())


@dataclass
class LinearizabilityRun:
    """Injects faults in rounds until the clients complete their operations. Driven by a seed."""

    seed: int
    folder: Path
    storage: Storage
    operations: int
    #: Streams in use at once, and average operations on each.
    streams: int = 12
    stream_operations: int = 400
    #: Maximum seconds between faults.
    seconds: float = 4.0
    #: Seconds after which no operation begins, even if some remain.
    time_limit: float = math.inf
    environment: Mapping[str, str] = field(default_factory=dict)
    #: Called with each judged history.
    judged: Callable[[OperationHistory, Verdict], None] = lambda history, verdict: None
    progress: Callable[[RunFigures], None] = lambda figures: None

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.figures = RunFigures()
        self._target = CurrentServer()
        self._client = Client(self._target)
        self._serving = asyncio.Event()
        self._restarted = asyncio.Condition()
        self._server: ServerProcess | None = None
        #: The current server, and the one it is taking over from, if any.
        self._servers: list[ServerProcess] = []
        self._ledger = Ledger()
        self._open: set[StreamClients] = set()
        self._left = self.operations
        self._done = False

    async def run(self) -> RunFigures:
        """Run all operations. Raises NotLinearizableError at the first violation."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            async with self.storage.running():
                await self._start()
                await self._create_basin()
                async with asyncio.TaskGroup() as group:
                    rounds = group.create_task(self._rounds())
                    async with asyncio.TaskGroup() as streams:
                        for number in range(self.streams):
                            streams.create_task(self._use_streams(number, streams))
                    self._done = True
                    await rounds
        except* (NotLinearizableError, BrokenPromiseError, StartFailedError) as errors:
            self.figures.violations += 1
            error = _first(errors)
            if isinstance(error, NotLinearizableError):
                raise error from None
            nowhere = OperationHistory("no stream")
            raise NotLinearizableError(nowhere, Contradiction(str(error))) from None
        finally:
            for server in self._servers:
                server.resume()
                await server.kill()
            self._client.close()
        return self.figures

    async def _use_streams(self, lane: int, closing: asyncio.TaskGroup) -> None:
        """Use one stream after another, each with its own clients."""
        number = 0
        while self._left > 0:
            operations = min(self.dice.randint(1, 2 * self.stream_operations), self._left)
            self._left -= operations
            kind = list(ClientKind)[(lane + number) % len(ClientKind)]
            number += 1
            stream = StreamClients(
                f"{kind}-{lane}-{number}",
                kind,
                self._client,
                self._serving,
                random.Random(self.dice.random()),
                operations,
            )
            self._open.add(stream)
            with _expected(stream):
                await stream.work(self.dice.randint(2, 8))
            closing.create_task(self._close(stream))

    async def _close(self, stream: StreamClients) -> None:
        """Read the stream from a server that saw none of its appends, then judge its history."""
        generation = self._target.generation
        async with self._restarted:
            await self._restarted.wait_for(lambda: self._target.generation > generation)
        with _expected(stream):
            await stream.close()
        self._open.discard(stream)
        self._judge(stream)

    def _judge(self, stream: StreamClients) -> None:
        history, figures = stream.history, self.figures
        verdict = check(history)
        figures.streams += 1
        figures.operations += len(history.operations) - stream.unsent
        figures.acknowledged_appends += sum(op.acknowledged for op in history.operations)
        figures.unknown_outcomes += sum(op.unknown for op in history.operations)
        if verdict.judgement is Judgement.UNDECIDED:
            figures.undecided += 1
        self.judged(history, verdict)
        if verdict.contradiction is not None:
            raise NotLinearizableError(history, verdict.contradiction)

    async def _create_basin(self) -> None:
        body = msgspec.json.encode({"basin": BASIN})
        headers = {"content-type": "application/json"}
        answer = await self._client.exchange("POST", "/v1/basins", headers, body)
        assert answer.status in (201, 409), answer

    async def _rounds(self) -> None:
        deadline = time.monotonic() + self.time_limit
        while not self._done:
            await self._round()
            self.progress(self.figures)
            if time.monotonic() > deadline:
                self._left = 0
                for stream in self._open:
                    stream.operations = 0

    async def _round(self) -> None:
        """Let the clients work, inject faults, then end and restart the server."""
        dice = self.dice
        await asyncio.sleep(self.seconds * dice.uniform(0.1, 1))
        async with self.storage.disturbed(random.Random(dice.random()), self._ledger, self._tell):
            if dice.random() < 0.25:
                await self._pause()
            if dice.random() < 0.2:
                await self._take_over()
            await asyncio.sleep(self.seconds * dice.uniform(0, 0.3))
            await self._end(kill=dice.random() < 0.7)
        self.figures.storage_faults = self._ledger.totals.storage_faults
        await self._start()

    def _tell(self, order: dict[str, Any]) -> None:
        """Forward a storage order to all running servers."""
        for server in self._servers:
            server.tell(order)

    def _fault(self, text: str) -> None:
        for stream in self._open:
            stream.history.fault(text)

    async def _start(self, *, take_over: bool = False) -> None:
        """Start a server and direct all further requests to it."""
        server = await ServerProcess.start(
            self.storage.location,
            small_settings(self.dice),
            self.folder / "servers.log",
            {**self.storage.environment, **self.environment},
            take_over=take_over,
            disk=self.storage.disk(powered=False),
        )
        self._server = server
        self._servers.append(server)
        async with self._restarted:
            self._target.generation += 1
            self._target.port = server.port
            self._restarted.notify_all()
        self._serving.set()
        self._fault(f"server {self._target.generation} serves")

    async def _end(self, *, kill: bool) -> None:
        server, generation = self._server, self._target.generation
        assert server is not None
        self._server = None
        self._fault(f"server {generation} is {'killed' if kill else 'asked to stop'}")
        if kill:
            await server.kill()
            self.figures.kills += 1
        else:
            await server.stop()
            self.figures.stops += 1
        self._servers.remove(server)

    async def _pause(self) -> None:
        assert self._server is not None
        self._fault(f"server {self._target.generation} is paused")
        self._server.pause()
        await asyncio.sleep(self.dice.uniform(0.1, 1.5))
        self._server.resume()
        self._fault(f"server {self._target.generation} continues")
        self.figures.pauses += 1

    async def _take_over(self) -> None:
        """Start a second server on the same store while the first one is serving."""
        former, generation = self._server, self._target.generation
        assert former is not None
        try:
            await self._start(take_over=True)
        except StartFailedError as error:
            self._fault(f"server {generation} keeps the store: {error}")
            return
        self.figures.take_overs += 1
        await asyncio.sleep(self.seconds * self.dice.uniform(0, 0.3))
        await former.kill()
        self._servers.remove(former)


@contextmanager
def _expected(stream: StreamClients) -> Iterator[None]:
    """Translate an answer that no server may give into a NotLinearizableError."""
    try:
        yield
    except* UnexpectedAnswerError as errors:
        error = _first(errors)
        assert isinstance(error, UnexpectedAnswerError)
        raise NotLinearizableError(stream.history, error.contradiction) from None


def _first(errors: BaseExceptionGroup[Exception]) -> Exception:
    """Return the first leaf error of a group."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, Exception)
    return error
