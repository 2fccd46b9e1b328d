"""A process that delivers the events of one archive to a webhook, and ends when all have arrived.

python -m tests.archive.events.dispatcher_process <folder url> <webhook url>
"""

from __future__ import annotations

import asyncio
import sys

from streamfold.archive.destinations.destination import Destination
from streamfold.archive.events import EventDispatcher, WebhookSink


async def deliver(folder: str, webhook: str) -> None:
    dispatcher = EventDispatcher(Destination.open(folder), {"hook": WebhookSink(webhook)})
    task = asyncio.create_task(dispatcher.run())
    await dispatcher.settle()
    task.cancel()


if __name__ == "__main__":
    asyncio.run(deliver(*sys.argv[1:]))
