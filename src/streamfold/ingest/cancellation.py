"""Cancellations that a client of streams has dropped.

`asyncio.wait_for` of Python 3.11, which the S2 SDK uses for each request, returns the answer and drops
a cancellation that comes in the same moment. The task still counts it.
"""

from __future__ import annotations

import asyncio


def raise_if_cancelled() -> None:
    """Raise CancelledError if the current task was cancelled; called between two appends."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
