"""SlateDB at another scale: tables are written, merged and deleted within seconds, not within days."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streamfold.store.engine import slatedb, slatedb_tables

#: Bytes of a table.
TABLE_BYTES = 64 << 10

_HURRIED = (
    "manifest_poll_interval",
    "compactor_options.poll_interval",
    "compactor_options.commit_compacted_interval",
    "compactor_options.worker.compactions_poll_interval",
)

_original: Callable[..., Any] = slatedb._settings


def small_settings(*, local: bool) -> Any:
    """The engine's own settings at a smaller scale, to replace them in tests."""
    settings = _original(local=local)
    settings.set("l0_sst_size_bytes", str(TABLE_BYTES))
    for name in _HURRIED:
        settings.set(name, '"50ms"')
    settings.set("compactor_options.checkpoint_lifetime", '"1s"')
    return settings


def use_small_tables(replace: Callable[[object, str, Any], None] = setattr) -> None:
    """Have engines that are opened from now on use small tables, and delete replaced ones soon."""
    replace(slatedb, "_settings", small_settings)
    replace(slatedb_tables, "_MIN_AGE_MS", 0)
    replace(slatedb_tables, "_MANIFEST_MIN_AGE_MS", 1000)
    replace(slatedb_tables, "_LOCAL_MANIFEST_MIN_AGE_MS", 1000)
