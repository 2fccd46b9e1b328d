"""SlateDB at another scale: tables are written and compacted within seconds, not within days."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streamfold.store import slate_engine

#: Bytes of a table.
TABLE_BYTES = 64 << 10

_HURRIED = (
    "manifest_poll_interval",
    "compactor_options.poll_interval",
    "compactor_options.commit_compacted_interval",
    "compactor_options.worker.compactions_poll_interval",
)

_original: Callable[..., Any] = slate_engine._settings


def small_settings(*, collects: bool, in_memory: bool) -> Any:
    """What the engine uses, but for the scale; to be put in the place of its own."""
    settings = _original(collects=collects, in_memory=in_memory)
    settings.set("l0_sst_size_bytes", str(TABLE_BYTES))
    for name in _HURRIED:
        settings.set(name, '"50ms"')
    return settings
