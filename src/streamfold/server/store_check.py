"""Checks a store, including the documents that the faces keep in it."""

from __future__ import annotations

from collections.abc import Callable

from streamfold.errors import DataCorruptError
from streamfold.server.durable_streams.subscriptions.storage import check_document
from streamfold.store.inspection import CheckReport, inspect_store
from streamfold.wire.durable_streams.responses import SnapshotDigest


async def check_store(
    store: str,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> CheckReport:
    """Read everything in the store at `store`, a URL or a folder, and report all faults.

    The store may be in use. Raises only if it cannot be checked: NotFoundError if there is none,
    FormatUnsupportedError if a newer version wrote it, StorageError if storage fails.
    """
    return await inspect_store(
        store,
        new_snapshot_hash=SnapshotDigest,
        check_document=_fault_of,
        progress=progress,
    )


def _fault_of(kind: str, document_id: str, content: bytes) -> str | None:
    try:
        check_document(kind, document_id, content)
    except DataCorruptError as error:
        return str(error)
    return None
