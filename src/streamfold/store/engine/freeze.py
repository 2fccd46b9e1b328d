"""Keeps the files of a store in place while another process reads them: a check or a backup.

A freeze is a SlateDB checkpoint with a name of its own. SlateDB keeps the tables of the manifest that
the checkpoint pins, and nothing else (upstream defect 24). So whatever deletes other files looks for
freezes itself:

- log files (`local_disk.py`; on object storage SlateDB's collector, which `slatedb.py` calls),
- chunk files (`upkeep/clean_up.py`) and the blobs of snapshots (`catalog/snapshots.py`).

Each deletes a file only after what makes it unnecessary is durable, and looks for a freeze in between.
So a freeze that it does not see begins later, and the frozen state does not need the file. The one
exception is a collection by SlateDB that began before the freeze: it may delete log files that a newer
manifest covers. Whoever needs them finds a newer manifest then, and starts again from that.

A freeze expires unless it is renewed: a process that is killed holds files for minutes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

from slatedb.uniffi._slatedb_uniffi import slatedb as binding

from streamfold.errors import StorageError
from streamfold.store.engine.slatedb_binding import read_manifest
from streamfold.store.engine.slatedb_rows import translated

logger = logging.getLogger(__name__)

_NAME: Final = "streamfold-freeze"
#: Milliseconds that a freeze outlives its process, and seconds between renewals.
_LIFETIME: Final = 600_000
_RENEWAL: Final = 60.0


class Freeze:
    """A freeze that is held; `manifest` is the state that it pins."""

    def __init__(self, manifest: Any) -> None:
        self.manifest = manifest
        self._renewed_at = time.monotonic()

    def renewed(self) -> None:
        self._renewed_at = time.monotonic()

    def check(self) -> None:
        """Raise if the freeze may have expired: files may be gone that the caller still needs."""
        if time.monotonic() - self._renewed_at > _LIFETIME / 1000 - _RENEWAL:
            raise StorageError(
                "storage did not answer for minutes, so its files are no longer kept for this: "
                "start again"
            )


@asynccontextmanager
async def freeze(admin: Any) -> AsyncIterator[Freeze]:
    """Keep the files of the newest state, and of all later ones, until the context ends."""
    try:
        options = binding.CheckpointOptions(lifetime_ms=_LIFETIME, source=None, name=_NAME)
        checkpoint = await admin.create_detached_checkpoint(options)
        held = Freeze(await read_manifest(admin, checkpoint.manifest_id))
    except binding.Error as error:
        raise translated(error) from error
    renewal = asyncio.create_task(_renew(admin, checkpoint.id, held))
    try:
        yield held
    finally:
        renewal.cancel()
        with suppress(asyncio.CancelledError):
            await renewal
        try:
            await admin.delete_checkpoint(checkpoint.id)
        except binding.Error as error:
            logger.warning("files are kept for some minutes more: %s", error)


async def _renew(admin: Any, checkpoint_id: str, held: Freeze) -> None:
    while True:
        await asyncio.sleep(_RENEWAL)
        try:
            await admin.refresh_checkpoint(checkpoint_id, _LIFETIME)
            held.renewed()
        except binding.Error as error:  # `check` raises if this lasts
            logger.warning("cannot renew the freeze, trying again: %s", error)


def _frozen_manifests(manifest: Any) -> list[int]:
    """The numbers of the manifests that freezes pin now."""
    now = time.time()
    return [
        checkpoint.manifest_id
        for checkpoint in manifest.checkpoints
        if checkpoint.name == _NAME
        and (checkpoint.expire_time_secs is None or checkpoint.expire_time_secs > now)
    ]


async def is_frozen(admin: Any) -> bool:
    """Whether another process may need files that this one does not; also true if nobody knows."""
    try:
        manifest = await read_manifest(admin)
    except binding.Error as error:
        logger.warning("cannot read whether files are frozen, so none is deleted: %s", error)
        return True
    return manifest is not None and bool(_frozen_manifests(manifest))


async def frozen_log(admin: Any) -> int | None:
    """The last log file that no freeze needs; None if there is no freeze."""
    numbers = _frozen_manifests(await read_manifest(admin))
    manifests = [await read_manifest(admin, number) for number in numbers]
    return min((manifest.replay_after_wal_id for manifest in manifests if manifest), default=None)
