"""A cancellation that arrives together with the server's answer is not lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import s2_sdk

from streamfold.follow.clients.s2 import S2Client
from streamfold.model.records import Record

POSITION = SimpleNamespace(seq_num=1, timestamp=1)
#: All that an answer of a server may have.
ANSWER = SimpleNamespace(seq_num=1, timestamp=1, records=[], start=POSITION, end=POSITION)
CALLS: dict[str, Callable[[S2Client], Awaitable[object]]] = {
    "check_tail": lambda client: client.check_tail(),
    "peek": lambda client: client.peek(0, 1),
    "append": lambda client: client.append([Record(b"x")]),
}


class Answering:
    """An SDK stream that answers when the test says so, and waits for it as the SDK does."""

    name = "any"

    def __init__(self) -> None:
        self.answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self.asked = asyncio.Event()

    async def _ask(self, *_: object, **__: object) -> object:
        self.asked.set()
        return await asyncio.wait_for(self.answer, 60)

    check_tail = read = append = _ask


@pytest.mark.parametrize("fails", [False, True], ids=["result", "error"])
@pytest.mark.parametrize("name", CALLS)
async def test_a_call_that_is_cancelled_while_its_answer_arrives_ends(
    name: str, fails: bool
) -> None:
    stream: Any = Answering()
    calling = asyncio.ensure_future(CALLS[name](S2Client(stream)))
    await stream.asked.wait()
    if fails:
        stream.answer.set_exception(s2_sdk.S2ClientError("no answer"))
    else:
        stream.answer.set_result(ANSWER)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling


async def test_a_task_that_was_cancelled_before_may_still_call() -> None:
    """It cleans up, for example."""
    stream: Any = Answering()
    stream.answer.set_result(ANSWER)

    async def clean_up() -> int:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return (await S2Client(stream).check_tail()).seq_num
        raise AssertionError("it was cancelled")

    task = asyncio.create_task(clean_up())
    await asyncio.sleep(0)
    task.cancel()
    assert await task == 1
