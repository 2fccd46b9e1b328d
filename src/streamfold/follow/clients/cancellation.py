"""Ends what waits for the S2 SDK, which may not hear that it is to end the first time.

The SDK waits for messages by `asyncio.wait_for`, which before Python 3.12 loses a cancellation that
comes at the same time as the message: the session is then waited for until for ever.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

#: Seconds after which a task that has not ended is told again.
_ASK_AGAIN: Final = 0.25


async def see_off(task: asyncio.Task[Any]) -> None:
    """Wait until `task` has ended, asking it to again and again; how it ended is left to the caller."""
    while not (await asyncio.wait({task}, timeout=_ASK_AGAIN))[0]:
        task.cancel()
