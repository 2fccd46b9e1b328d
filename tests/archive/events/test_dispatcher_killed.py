"""Real processes, killed between a request and its answer, or just after it."""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
from collections.abc import Callable
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from streamfold.archive.destinations.destination import Destination
from streamfold.archive.events import decode_event
from tests.archive.events.feeds import Table, without_repetitions
from tests.archive.events.receivers import TIMEOUT, Hook

REPOSITORY = Path(__file__).parents[3]
#: Commits; processes that are killed while they deliver them.
COMMITS, KILLS = 30, 4


def killer(
    started: Future[asyncio.subprocess.Process], fatal: int, *, answers: bool
) -> Callable[[BaseHTTPRequestHandler], int | None]:
    """Return a receiver that kills the sender at its n-th request, before or after its answer."""
    numbers = itertools.count(1)

    def answer(handler: BaseHTTPRequestHandler) -> int | None:
        if next(numbers) < fatal:
            return 204
        if answers:  # sent, but the cursor is not written yet, or just being written
            handler.send_response(204)
            handler.end_headers()
        started.result(TIMEOUT).kill()
        return None

    return answer


async def start(folder: str, hook: Hook) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.archive.events.dispatcher_process",
        folder,
        hook.url,
        cwd=REPOSITORY,
    )


async def test_killed_processes_repeat_events_and_lose_none(hook: Hook, tmp_path: Path) -> None:
    seed = 11
    rng = random.Random(seed)
    folder = tmp_path.as_uri()
    table = await Table.create(Destination.open(folder))
    for _ in range(COMMITS):
        await (table.rebase() if rng.random() < 0.2 else table.commit_diff())
    for number in range(KILLS):
        started: Future[asyncio.subprocess.Process] = Future()
        hook.answer = killer(started, rng.randint(1, 9), answers=number % 2 == 0)
        process = await start(folder, hook)
        started.set_result(process)
        assert await process.wait() == -9, f"seed {seed}: killed, not ended"
    hook.answer = lambda _: 204
    last = await start(folder, hook)
    assert await last.wait() == 0, f"seed {seed}"
    received = [decode_event(body) for _, _, body in hook.requests]
    assert without_repetitions(received) == table.committed, f"seed {seed}"
    assert len(received) > len(table.committed), f"seed {seed}: something was repeated"
