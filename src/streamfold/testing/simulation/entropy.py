"""Makes randomness and clocks of the interpreter depend on the seed while a program runs."""

from __future__ import annotations

import gc
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from streamfold import backoff


@contextmanager
def seeded(seed: int, now: Callable[[], int]) -> Iterator[None]:
    """Seed `random`, `os.urandom` and what is made of it; `now` gives milliseconds for `time.time_ns`.

    Garbage is collected only before and after: freeing a forgotten task runs its `finally` blocks.
    """
    dice = random.Random(seed)  # noqa: S311 - repeatable, not secret
    state = random.getstate()
    pauses: Any = backoff._RNG
    collecting = gc.isenabled()
    gc.disable()
    random.seed(seed)
    pauses.seed(seed)
    try:
        with (
            patch.object(os, "urandom", dice.randbytes),
            patch.object(random, "_urandom", dice.randbytes),
            patch.object(time, "time_ns", lambda: now() * 1_000_000),
        ):
            yield
    finally:
        random.setstate(state)
        pauses.seed()
        with quiet():
            gc.collect(1)  # everything of this run is young: nothing was collected meanwhile
        if collecting:
            gc.enable()


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the tasks of killed processes: they never end, and Python warns when it frees them."""
    hook = sys.unraisablehook
    sys.unraisablehook = lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.unraisablehook = hook
