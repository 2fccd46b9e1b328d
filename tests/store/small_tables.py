"""SlateDB at another scale: tables are written, merged and deleted within seconds, not within days."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streamfold.store.engine import slatedb, slatedb_tables

#: Bytes of a table.
TABLE_BYTES = 64 << 10

_POLL = "50ms"

_original: Callable[..., dict[str, Any]] = slatedb._settings


def small_settings(*, local: bool, young: int) -> dict[str, Any]:
    """The engine's own settings at a smaller scale, to replace them in tests."""
    settings = _original(local=local, young=young)
    settings["l0_sst_size_bytes"] = TABLE_BYTES
    settings["manifest_poll_interval"] = _POLL
    compactor = settings["compactor_options"]
    compactor["poll_interval"] = compactor["commit_compacted_interval"] = _POLL
    compactor["worker"]["compactions_poll_interval"] = _POLL
    compactor["checkpoint_lifetime"] = "1s"
    return settings


def use_small_tables(replace: Callable[[object, str, Any], None] = setattr) -> None:
    """Have engines that are opened from now on use small tables, and delete replaced ones soon."""
    replace(slatedb, "_settings", small_settings)
    replace(slatedb_tables, "_MIN_AGE_MS", 0)
    replace(slatedb_tables, "_MANIFEST_MIN_AGE_MS", 1000)
    replace(slatedb_tables, "_LOCAL_MANIFEST_MIN_AGE_MS", 1000)
