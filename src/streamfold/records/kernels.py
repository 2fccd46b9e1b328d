"""The compiled twin of `plain`, once it is warm.

Compilation takes seconds and loading the compiler half a second, so neither happens during a request
or in a short-lived tool: a process that wants the kernels calls `warm_up`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from streamfold.extras import needing_extra
from streamfold.model.configs import TimestampMode
from streamfold.records.columns import warm_up_columns
from streamfold.records.rules import Slot

if TYPE_CHECKING:
    # Only for types: at run time this would load the compiler.
    from streamfold.records.compiled import Measured, ScannedRecords

_log = logging.getLogger(__name__)


class Compiled(Protocol):
    """The functions of the module `compiled`."""

    def count_parts(self, raw: bytes, most: int) -> int: ...

    def scan(self, raw: bytes) -> ScannedRecords | None: ...

    def measure(self, payload: bytes | memoryview) -> Measured | None: ...

    def to_json(self, payload: bytes | memoryview, *, base64: bool) -> bytes | None: ...


_warm: Compiled | None = None


def compiled() -> Compiled | None:
    """The compiled twin, or None while `plain` does everything."""
    return _warm


def warm_up() -> bool:
    """Compile the kernels, or load them from the disk cache, and use them from now on.

    Called once by a process that handles many records, in a thread if it has other work meanwhile:
    3 s at first, 1 s from the cache. False when numba is missing or broken: then `plain` does the
    work.
    """
    global _warm
    if _warm is not None:
        return True
    try:
        with needing_extra("fast"):
            from streamfold.records import compiled
        _exercise(compiled)
        warm_up_columns()
    except Exception as error:  # whatever a broken compiler raises, plain Python still works
        _log.warning("record kernels are off, plain Python is used instead: %s", error)
        return False
    _warm = compiled
    return True


def _exercise(twin: Compiled) -> None:
    """Call every kernel once, with the types of all later calls."""
    scanned = twin.scan(b"\x0a\x03\x1a\x01a")
    if scanned is None:
        raise RuntimeError("the scan kernel refuses a valid record")
    if twin.count_parts(b"\x0a\x03\x1a\x01a", 9) != 1:
        raise RuntimeError("the counting kernel miscounts a valid record")
    slot = Slot(1, TimestampMode.ARRIVAL, uncapped=False, now=1, floor=0)
    payload = scanned.sequence(slot).payload
    if twin.measure(payload) is None:
        raise RuntimeError("the measuring kernel refuses a valid payload")
    if twin.to_json(payload, base64=False) is None:
        raise RuntimeError("the JSON kernel refuses a valid payload")
