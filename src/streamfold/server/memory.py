"""Remembers what was worked out of texts that clients send, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Concatenate, Final, ParamSpec, TypeVar

#: Texts that are remembered, and characters of each: a client may send thousands of 64 KiB.
KEPT: Final = 4096
SHORT_MAX: Final = 1024

Others = ParamSpec("Others")
Result = TypeVar("Result")
Function = Callable[Concatenate[str, Others], Result]


def remember_short(function: Function[Others, Result]) -> Function[Others, Result]:
    """`function`, called once for a text that is short and comes again and again."""
    known = lru_cache(KEPT)(function)

    @wraps(function)
    def call(text: str, /, *others: Others.args, **named: Others.kwargs) -> Result:
        return (known if len(text) <= SHORT_MAX else function)(text, *others, **named)

    return call
