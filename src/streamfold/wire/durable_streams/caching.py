"""What lets caches between server and readers share answers: cursors and entity tags."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from typing import Final

#: Milliseconds: 2024-10-09T00:00:00Z, from which every server of the protocol counts intervals.
CURSOR_EPOCH_MS: Final = 1_728_432_000_000
#: Milliseconds in which all readers at one offset ask by one URL.
CURSOR_INTERVAL_MS: Final = 20_000
#: Seconds by which a reader is sent ahead at most, so that it leaves a cached answer behind.
CURSOR_JITTER_MAX: Final = 3600

_INTERVAL_SECONDS = CURSOR_INTERVAL_MS // 1000
#: A longer one was never given out, and is treated like any other invalid cursor.
_CURSOR = re.compile(r"[0-9]{1,20}")
_OPAQUE_TAG = re.compile(r'"[^"]*"')


def next_cursor(client: str | None, now_ms: int, randint: Callable[[int, int], int]) -> str:
    """The cursor of an answer: the current interval, but always beyond what the client came with.

    `randint(a, b)` gives a number from a to b, both included.
    """
    interval = max(0, now_ms - CURSOR_EPOCH_MS) // CURSOR_INTERVAL_MS
    if client is None or not _CURSOR.fullmatch(client) or int(client) < interval:
        return str(interval)
    seconds = randint(1, CURSOR_JITTER_MAX)
    return str(int(client) + max(1, -(-seconds // _INTERVAL_SECONDS)))


def etag(stream_id: int | str, start: int, end: int, closed: bool) -> str:
    """A strong tag of what a stream holds from `start` to `end`; it changes when the stream closes.

    `stream_id` must differ between a stream and the one that later takes its name.
    """
    text = str(stream_id) if isinstance(stream_id, int) else _quotable(stream_id)
    return f'"{text}:{start}:{end}{":c" if closed else ""}"'


def matches(if_none_match: str | None, tag: str) -> bool:
    """Whether the client has that answer already: weak comparison with each tag of the header."""
    if if_none_match is None:
        return False
    return if_none_match.strip() == "*" or tag in _OPAQUE_TAG.findall(if_none_match)


def _quotable(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")
