"""A scripted model: it counts as far as it is asked to, one word at a time, without a network."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

#: Seconds per word, so that there is time to reload a page or to kill a server.
PACE = 0.05


class ModelError(Exception):
    """The model gives no more of this answer."""


async def answer(messages: list[dict[str, Any]], so_far: str) -> AsyncIterator[str]:
    """Yield the rest of the answer to the last message, behind the text that is stored already.

    A real model would get `so_far` as the beginning of its answer.
    """
    question = "".join(part.get("text", "") for part in messages[-1]["parts"])
    last = re.search(r"\d+", question)
    if not last:
        raise ModelError("Ask me to count to a number.")
    for number in range(len(so_far.split()) + 1, int(last[0]) + 1):
        await asyncio.sleep(PACE)
        yield f"{number} "
