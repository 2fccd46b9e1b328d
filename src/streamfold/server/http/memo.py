"""Caches results for short texts that clients send, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Sized
from functools import lru_cache, wraps
from typing import Final, ParamSpec, TypeVar, cast

#: Results that are cached, and characters of their arguments: a client may send 64 KiB.
KEPT: Final = 4096
SHORT_MAX: Final = 1024

Texts = ParamSpec("Texts")
Result = TypeVar("Result")


def memoize_short(function: Callable[Texts, Result]) -> Callable[Texts, Result]:
    """`function`, with its results for short texts cached."""
    known = cast("Callable[Texts, Result]", lru_cache(KEPT)(function))

    @wraps(function)
    def call(*texts: Texts.args, **none: Texts.kwargs) -> Result:
        size = sum(map(len, cast("tuple[Sized, ...]", texts)))
        return (known if size <= SHORT_MAX else function)(*texts, **none)

    return call
