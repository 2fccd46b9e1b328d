"""Shows the tables published below configured locations: artifacts, rows, changes and checks.

Manifests are read in this process, and a table's files in a separate one (`archive/preview.py`).
Reading them requires the right to read all streams, because a table may contain the content of any
stream.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final

import msgspec

from streamfold.errors import (
    InvalidError,
    NotFoundError,
    ServerBusyError,
    StoreClosingError,
    StreamfoldError,
)
from streamfold.extras import needing_extra
from streamfold.model.access_tokens import Right
from streamfold.server.auth import Access
from streamfold.server.http.bodies import answer_json
from streamfold.server.http.drain import DrainGate, WaitGuard
from streamfold.server.http.problems import ClientHangupError
from streamfold.server.http.request import LIST_ROOM, Request
from streamfold.server.http.router import Router
from streamfold.wire.text import decode_segment, parse_parameters

with needing_extra("archive"):
    from streamfold.archive.destinations.destination import (
        Destination,
        folder_url,
        local_folder,
    )
    from streamfold.archive.manifest.model import Manifest, order_of
    from streamfold.archive.preview import ReadLimits, TableRead, check_size, run_read, size_of
    from streamfold.archive.read.reader import list_archives

#: Seconds for which all callers share a listing, because listing a bucket costs requests.
_LISTED_FOR: Final = 5.0
#: Maximum tables in a listing, and maximum artifacts shown of one table: the newest.
_TABLES_MAX: Final = 1_000
_ARTIFACTS_MAX: Final = 2_000
#: Maximum bytes of files in a check, which takes about a second of CPU time per 100 MiB.
_VERIFIED_BYTES: Final = 1 << 30
#: Maximum callers whose tables are being read or that wait for this.
_WAITING_MAX: Final = 32
#: Statuses by error. Other errors come from the storage that has the tables.
_STATUSES: Final = {NotFoundError: 404, InvalidError: 422}
_EVENTS: Final = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
)


class TableHandlers:
    """Handles requests below /console/tables. Runs one preview and one check at a time."""

    def __init__(
        self,
        locations: Sequence[str],
        limits: ReadLimits | None,
        access: Access,
        drain_gate: DrainGate,
    ) -> None:
        self._gate = drain_gate
        self._limits = limits or ReadLimits()
        self._locations = [folder_url(location) for location in locations]
        self._access = access
        self._listed: Mapping[str, Manifest | StreamfoldError] = {}
        self._listed_at = -_LISTED_FOR
        self._listing = asyncio.Lock()
        #: Separate locks, because a check takes minutes and previews must not wait for it.
        self._previewing, self._checking = asyncio.Lock(), asyncio.Lock()
        self._waiting = 0

    def add_to(self, router: Router, root: str) -> None:
        router.add("GET", root, Right.READ, self.list)
        router.add("GET", f"{root}/{{}}", Right.READ, self.show)
        router.add("GET", f"{root}/{{}}/rows", Right.READ, self.preview)
        router.add("GET", f"{root}/{{}}/changes", Right.READ, self.changes)
        router.add("GET", f"{root}/{{}}/check", Right.READ, self.verify)

    async def list(self, request: Request) -> None:
        await self._allow(request)
        await request.reserve_answer(LIST_ROOM)
        manifests = await self._find()
        await answer_json(
            request, {"tables": [_summary(uri, one) for uri, one in manifests.items()]}
        )

    async def show(self, request: Request, segment: str) -> None:
        await self._allow(request)
        await request.reserve_answer(LIST_ROOM)
        await _answer(request, self._show(segment))

    async def preview(self, request: Request, segment: str) -> None:
        await self._allow(request)
        position = parse_parameters(request.query).get("position", [""])[-1]
        await _answer(request, self._preview(request, segment, position or None))

    async def changes(self, request: Request, segment: str) -> None:
        await self._allow(request)
        parameters = parse_parameters(request.query)
        since, until = (parameters.get(name, [""])[-1] for name in ("since", "until"))
        await _answer(request, self._changes(request, segment, since, until or None))

    async def verify(self, request: Request, segment: str) -> None:
        """Respond with events: `progress` after each file, then `result` or `problem`."""
        await self._allow(request)
        stream = await request.open(200, _EVENTS)
        try:
            uri, manifest = await self._manifest(segment)
            size = sum(
                files.size_bytes for one in manifest.artifacts for files in one.formats.values()
            )
            command = f"streamfold archive verify {uri}"
            check_size(size, _VERIFIED_BYTES, command)
            read = TableRead("check", uri, self._limits, command=command)
            async with (
                self._turn(request, self._checking),
                aclosing(run_read(read)) as reports,
            ):
                async for report in reports:
                    await stream.send(_event(report.event, report.value))
        except ClientHangupError:
            raise
        except StreamfoldError as error:
            await stream.send(_event("problem", {"code": error.code, "message": error.message}))
        await stream.close()

    async def _changes(
        self, request: Request, segment: str, since: str, until: str | None
    ) -> dict[str, Any]:
        uri, _ = await self._manifest(segment)
        command = f"streamfold archive diff {uri}"
        read = TableRead("changes", uri, self._limits, since, until, command)
        return await self._result(request, read)

    async def _show(self, segment: str) -> dict[str, Any]:
        return _chain(*await self._manifest(segment))

    async def _preview(
        self, request: Request, segment: str, position: str | None
    ) -> dict[str, Any]:
        uri, _ = await self._manifest(segment)
        command = f"streamfold archive restore {uri}"
        read = TableRead("rows", uri, self._limits, None, position, command)
        return await self._result(request, read)

    async def _result(self, request: Request, read: TableRead) -> dict[str, Any]:
        async with self._turn(request, self._previewing):
            # Only now, because waiting callers must not occupy the memory that others need for
            # responses.
            await request.reserve_answer(LIST_ROOM)
            async with aclosing(run_read(read)) as reports:
                return dict([report async for report in reports][-1].value)

    @asynccontextmanager
    async def _turn(self, request: Request, lock: asyncio.Lock) -> AsyncIterator[None]:
        """Wait for the client's turn.

        A client that leaves is interrupted, so others need not wait for it.
        """
        if self._waiting >= _WAITING_MAX:
            raise ServerBusyError(self._waiting, "console")
        self._waiting += 1
        try:
            async with WaitGuard(request, self._gate, follows=False), lock:
                yield
        finally:
            self._waiting -= 1

    async def _allow(self, request: Request) -> None:
        """Raise unless the caller may read all streams under names without an added prefix."""
        (await self._access.grant(request)).require(Right.READ, "", "")

    async def _manifest(self, segment: str) -> tuple[str, Manifest]:
        uri = decode_segment(segment)
        manifest = (await self._find()).get(uri or "")
        if uri is None or manifest is None:
            raise NotFoundError(
                f"there is no table at {(uri or segment)[:200]!r}: the list has those that exist"
            )
        if isinstance(manifest, StreamfoldError):
            raise manifest
        return uri, manifest

    async def _find(self) -> Mapping[str, Manifest | StreamfoldError]:
        """Return every table by its folder, as listed at most a few seconds ago."""
        async with self._listing:
            if time.monotonic() - self._listed_at >= _LISTED_FOR:
                self._listed = await self._list_all()
                self._listed_at = time.monotonic()
        return self._listed

    async def _list_all(self) -> Mapping[str, Manifest | StreamfoldError]:
        manifests: dict[str, Manifest | StreamfoldError] = {}
        for location in self._locations:
            folder = local_folder(location)
            if folder is not None and not folder.is_dir():
                continue  # nothing is published there yet, and opening it would create it
            async for uri, manifest in list_archives(Destination.open(location)):
                manifests[uri] = manifest
                if len(manifests) == _TABLES_MAX:
                    return manifests
        return manifests


async def _answer(request: Request, work: Awaitable[dict[str, Any]]) -> None:
    """Respond with the result of `work`, or with the reason why it failed."""
    try:
        value, status = await work, 200
    except (ClientHangupError, ServerBusyError, StoreClosingError):
        raise
    except StreamfoldError as error:
        value = {"code": error.code, "message": error.message}
        status = next((one for kind, one in _STATUSES.items() if isinstance(error, kind)), 502)
    await answer_json(request, value, status)


def _summary(uri: str, manifest: Manifest | StreamfoldError) -> dict[str, Any]:
    if isinstance(manifest, StreamfoldError):
        return {"uri": uri, "error": manifest.message}
    return {
        "uri": uri,
        "table": manifest.table,
        "epoch": manifest.epoch,
        "head_position": manifest.head_position,
        "oldest_readable_position": manifest.artifacts[0].to_position,
        "incomplete_before": manifest.incomplete_before,
        "updated_at": manifest.updated_at,
        "artifacts": len(manifest.artifacts),
        "size_bytes": sum(map(size_of, manifest.artifacts)),
        "key_fields": manifest.key_fields,
        "source": manifest.source.name if manifest.source else None,
        "dead_letters": (manifest.source.dead_letters or 0) if manifest.source else 0,
    }


def _chain(uri: str, manifest: Manifest) -> dict[str, Any]:
    """Describe a table with its artifacts. Ranks let a page draw any kind of position to scale."""
    rank = order_of(manifest).rank
    return _summary(uri, manifest) | {
        "chain": [
            {
                "kind": "base" if one.is_base else "diff",
                "epoch": one.epoch,
                "from_position": one.from_position,
                "to_position": one.to_position,
                "from_rank": rank(one.from_position) if one.from_position else None,
                "to_rank": rank(one.to_position),
                "created_at": one.created_at,
                "rows": one.row_count,
                "changes": one.change_count,
                "size_bytes": size_of(one),
                "formats": sorted(one.formats),
                "reason": one.rebase_reason,
                "incomplete_before": one.incomplete_before,
            }
            for one in manifest.artifacts[-_ARTIFACTS_MAX:]
        ]
    }


def _event(name: str, value: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(value))
