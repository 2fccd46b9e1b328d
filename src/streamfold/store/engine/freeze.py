"""Keeps a store's files in place while another process, a check or a backup, reads them.

A freeze is a SlateDB checkpoint with its own name. SlateDB keeps the tables of the manifest that
the checkpoint pins, and nothing else (upstream defect 24). So everything that deletes other files
checks for freezes itself:

- log files (`local_disk.py`; on object storage SlateDB's collector, which `slatedb.py` calls),
- chunk files (`upkeep/clean_up.py`) and snapshot blobs (`catalog/snapshots.py`).

Each deletes a file only after the change that makes it unnecessary is durable, and checks for a
freeze in between. So a freeze that the check misses begins later, and the frozen state does not
need the file. The one exception is a SlateDB collection that began before the freeze: it may delete
log files that a newer manifest covers. A process that needs them then finds a newer manifest, and
starts again from that.

A freeze expires unless renewed, so a killed process holds files only for minutes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

from streamfold.errors import StorageError
from streamfold.store.engine.native import Admin, EngineError, SlateManifest
from streamfold.store.engine.slatedb_rows import translated

logger = logging.getLogger(__name__)

_NAME: Final = "streamfold-freeze"
#: Milliseconds that a freeze outlasts its process, and seconds between renewals.
_LIFETIME: Final = 600_000
_RENEWAL: Final = 60.0


class Freeze:
    """A freeze in effect. `manifest` is the state that it pins."""

    def __init__(self, manifest: SlateManifest) -> None:
        self.manifest = manifest
        self._renewed_at = time.monotonic()

    def renewed(self) -> None:
        self._renewed_at = time.monotonic()

    def check(self) -> None:
        """Raise if the freeze may have expired, because files that the caller needs may be gone."""
        if time.monotonic() - self._renewed_at > _LIFETIME / 1000 - _RENEWAL:
            raise StorageError(
                "storage did not answer for minutes, so its files are no longer kept for this: "
                "start again"
            )


@asynccontextmanager
async def freeze(admin: Admin) -> AsyncIterator[Freeze]:
    """Keep the files of the newest state, and of all later ones, until the context ends."""
    try:
        checkpoint, number = await admin.create_checkpoint(_NAME, _LIFETIME)
        manifest = await admin.read_manifest(number)
    except EngineError as error:
        raise translated(error) from error
    if manifest is None:
        raise StorageError(f"storage has lost manifest {number}, which was pinned just now")
    frozen = Freeze(manifest)
    renewal = asyncio.create_task(_renew(admin, checkpoint, frozen))
    try:
        yield frozen
    finally:
        renewal.cancel()
        with suppress(asyncio.CancelledError):
            await renewal
        try:
            await admin.delete_checkpoint(checkpoint)
        except EngineError as error:
            logger.warning("files are kept for some minutes more: %s", error)


async def _renew(admin: Admin, checkpoint_id: str, frozen: Freeze) -> None:
    while True:
        await asyncio.sleep(_RENEWAL)
        try:
            await admin.refresh_checkpoint(checkpoint_id, _LIFETIME)
            frozen.renewed()
        except EngineError as error:  # `check` raises if this continues
            logger.warning("cannot renew the freeze, trying again: %s", error)


def _frozen_manifests(manifest: SlateManifest) -> list[int]:
    """Return the numbers of the manifests currently pinned by freezes."""
    now = time.time()
    return [
        checkpoint.manifest_id
        for checkpoint in manifest.checkpoints
        if checkpoint.name == _NAME and (checkpoint.expires is None or checkpoint.expires > now)
    ]


async def is_frozen(admin: Admin) -> bool:
    """Return whether another process may need files not needed here. True if unknown."""
    try:
        manifest = await admin.read_manifest()
    except EngineError as error:
        logger.warning("cannot read whether files are frozen, so none is deleted: %s", error)
        return True
    return manifest is not None and bool(_frozen_manifests(manifest))


async def frozen_log(admin: Admin) -> int | None:
    """Return the last log file that no freeze needs, or None without a freeze."""
    newest = await admin.read_manifest()
    numbers = [] if newest is None else _frozen_manifests(newest)
    manifests = [await admin.read_manifest(number) for number in numbers]
    return min((manifest.replay_after for manifest in manifests if manifest), default=None)
