"""A decoder's contract for arbitrary bytes: a value, or one of its declared errors."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import NamedTuple

from streamfold.errors import StreamfoldError

#: Seconds of processor time that a decoder may take for one input of a few kilobytes.
SLOW = 2.0


class Decoder(NamedTuple):
    """A decoder of bytes from outside, with valid inputs to begin with."""

    name: str
    #: What it turns the bytes into does not matter, unless it compares two ways itself.
    decode: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    #: Errors that it may raise; anything else is a finding.
    errors: tuple[type[Exception], ...] = (StreamfoldError,)
    #: Its share of the inputs beside others: slow decoders get less.
    weight: float = 1.0


class Finding(NamedTuple):
    """An input that a decoder has no good answer for."""

    decoder: str
    data: bytes
    reason: str
    #: Where it was raised: findings with the same place are one.
    place: str

    def __str__(self) -> str:
        shown = self.data if len(self.data) <= 2_000 else self.data[:2_000] + b"..."
        return f"{self.decoder}: {self.reason}\n  at {self.place}\n  input {shown!r}"


def judge(decoder: Decoder, data: bytes) -> Finding | None:
    """Give the bytes to the decoder; None if it keeps its promise."""
    began = time.thread_time()
    try:
        decoder.decode(data)
    except decoder.errors:
        pass
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        place = " < ".join(
            f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in frames[:0:-1]
        )
        return Finding(decoder.name, data, f"{type(error).__name__}: {error}", place[:200])
    spent = time.thread_time() - began
    if spent > SLOW:
        return Finding(decoder.name, data, f"it took {spent:.1f} s of processor time", "slow")
    return None
