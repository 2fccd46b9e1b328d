"""Load on a store: several tasks that append batches of every kind to several streams."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from streamfold.errors import StoreClosingError, StreamfoldError, WriterFencedError
from streamfold.model.configs import INFINITE, StreamConfigLayer
from streamfold.store.log.admission import AppendRequest
from streamfold.store.log.shares import AppendAck
from streamfold.store.store import StreamStore
from tests.store.crash.ledger import Event, OutcomeUnknown, Plan, Refused, Stored, Tried
from tests.store.crash.verify import BASIN

STREAMS = ("alpha", "beta", "gamma", "delta")
#: Batches that a writer has on their way at once.
_AHEAD = 6
#: Records that a trim leaves in a stream, about.
_KEPT = 300


async def prepare(store: StreamStore) -> None:
    """Have the basin and the streams."""
    await store.ensure_basin(BASIN)
    for stream in STREAMS:
        await store.ensure_stream(BASIN, stream, StreamConfigLayer(retention=INFINITE))


class Load:
    """Writers that report everything they do; each makes its batches one after the other."""

    def __init__(
        self, store: StreamStore, run: str, seed: int, report: Callable[[Event], None]
    ) -> None:
        self._store = store
        self._run = run
        self._seed = seed
        self._report = report
        self._tails: dict[str, int] = dict.fromkeys(STREAMS, 0)
        self._tokens: dict[str, str] = {}
        self._stopping = False
        #: Why the store took no more, if it did not.
        self.ended_by: StreamfoldError | None = None

    def stop(self) -> None:
        """Let every writer finish what it has on its way, and no more."""
        self._stopping = True

    async def run(self, writers: int = 6, batches: int | None = None) -> None:
        """Write until stopped, or `batches` by each writer; ends early when the store is closed.

        A batch that fails with an error that says so counts as not appended, every other failure
        as of unknown outcome.
        """
        async with asyncio.TaskGroup() as group:
            for writer in range(writers):
                group.create_task(self._write(writer, batches))

    async def _write(self, writer: int, batches: int | None) -> None:
        dice = random.Random(f"{self._seed}.{self._run}.{writer}")
        ahead: list[asyncio.Task[None]] = []
        number = 0
        while not self._stopping and (batches is None or number < batches):
            plan = self._plan(f"{self._run}.{writer}.{number}", dice)
            number += 1
            self._report(Tried(plan))
            try:
                ticket = await self._submit(plan)
            except StreamfoldError as error:
                self._failed(plan, error)
            else:
                ahead.append(asyncio.create_task(self._settle(plan, ticket)))
            if len(ahead) >= dice.randint(1, _AHEAD):
                await asyncio.gather(*ahead)
                ahead.clear()
        await asyncio.gather(*ahead)

    def _plan(self, batch: str, dice: random.Random) -> Plan:
        stream = dice.choice(STREAMS)
        kind = dice.random()
        token = self._tokens.get(stream) if dice.random() < 0.2 else None
        if kind < 0.03:
            return Plan(batch, stream, 2, 10, fencing_token=token, fence=batch)
        if kind < 0.10:
            trim = max(0, self._tails[stream] - dice.randint(0, _KEPT))
            return Plan(batch, stream, 2, 10, fencing_token=token, trim=trim)
        match = self._tails[stream] if kind < 0.25 else None
        count = dice.choice([1, 1, 2, 5, 20, 100])
        size = dice.choice([0, 10, 100, 100, 1000, 5000])
        return Plan(batch, stream, count, size, match, token)

    async def _submit(self, plan: Plan) -> Awaitable[AppendAck]:
        request = AppendRequest.of(
            plan.records(), match_seq_num=plan.match_seq_num, fencing_token=plan.fencing_token
        )
        submission = self._store.stream(BASIN, plan.stream).submit(request)
        if not await submission.decided():
            await submission.ack
        return submission.ack

    def _failed(self, plan: Plan, error: StreamfoldError) -> None:
        kind = Refused if error.definite else OutcomeUnknown
        self._report(kind(plan.stream, plan.batch))
        if isinstance(error, WriterFencedError | StoreClosingError):
            self._stopping = True
            self.ended_by = error

    async def _settle(self, plan: Plan, ticket: Awaitable[AppendAck]) -> None:
        try:
            ack = await ticket
        except StreamfoldError as error:
            self._failed(plan, error)
            return
        self._report(_stored(plan, ack))
        self._tails[plan.stream] = max(self._tails[plan.stream], int(ack.end.seq_num))
        if plan.fence is not None:
            self._tokens[plan.stream] = plan.fence


def _stored(plan: Plan, ack: AppendAck) -> Stored:
    return Stored(
        plan.stream,
        plan.batch,
        int(ack.start.seq_num),
        int(ack.end.seq_num),
        int(ack.start.timestamp),
        int(ack.end.timestamp),
    )
