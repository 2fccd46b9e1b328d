"""Copies an archive to another folder, as a complete archive.

An existing copy is brought forward: only files that it lacks are sent. The files go first, and the
manifest last, with the new folder's URIs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO

from streamfold.archive.destinations.destination import Destination, StoredManifest
from streamfold.archive.destinations.mirrors import Mirrors
from streamfold.archive.errors import CommitConflictError
from streamfold.archive.manifest.model import Manifest, Part, are_versions
from streamfold.archive.read.reader import Archive
from streamfold.blob.local_files import finish

#: Bytes per piece of an upload.
PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class ExportReport:
    """The files sent, and the copy's manifest."""

    manifest: Manifest
    files: int
    size_bytes: int


async def export_archive(
    archive: Archive, target: Destination, on_file: Callable[[Part], None] | None = None
) -> ExportReport:
    """Copy all live files and then the manifest.

    Skips files that the copy already has in the same size, and verifies every file that it sends.
    `on_file` is called with each file that the copy has. Raises `CommitConflictError` if the folder
    holds another archive.
    """

    async def copy() -> ExportReport:
        sent = []
        manifest = archive.manifest
        _check_same(archive, await target.read(archive.order), target.uri)
        for part in {part.path: part for part in manifest.parts()}.values():
            if not await target.holds(part.path, part.size_bytes):
                await _send(archive, part, target)
                sent.append(part.size_bytes)
            if on_file:
                on_file(part)
        await _publish(archive, target)
        return ExportReport(manifest, len(sent), sum(sent))

    return await archive.with_plans(copy)


def _check_same(archive: Archive, stored: StoredManifest | None, uri: str) -> None:
    """Reject a folder that belongs to another archive, before anything is sent there."""
    if stored and not (
        stored.manifest.table == archive.manifest.table
        and are_versions(stored.manifest, archive.manifest, archive.order)
    ):
        raise CommitConflictError(
            f"{uri} holds another archive, of table {stored.manifest.table!r}: use a folder of its "
            "own for each"
        )


async def _publish(archive: Archive, target: Destination) -> None:
    mirrors = Mirrors([archive.files.destination, target], archive.order)
    await mirrors.follow(archive.manifest)
    for error in mirrors.lagging.values():
        raise error


async def _send(archive: Archive, part: Part, target: Destination) -> None:
    async with archive.files.open(part) as source:
        await target.put(part.path, partial(_pieces, source))


async def _pieces(source: BinaryIO) -> AsyncIterator[bytes]:
    source.seek(0)
    while piece := await finish(asyncio.to_thread(source.read, PIECE)):
        yield piece
