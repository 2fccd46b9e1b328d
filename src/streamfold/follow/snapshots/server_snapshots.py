"""External snapshots that the server keeps beside the stream: Streamfold's own snapshot API."""

from __future__ import annotations

import asyncio
import http.client
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import closing
from typing import Final
from urllib.parse import quote, urlsplit

import msgspec

from streamfold.errors import (
    BlobNotFoundError,
    BlobOutcomeUnknownError,
    BlobUnavailableError,
    InvalidError,
    PermissionDeniedError,
    StreamfoldError,
    UnauthenticatedError,
)
from streamfold.follow.snapshots.snapshot_store import Placement, SnapshotInfo, SnapshotStore

#: Bytes per piece of a snapshot that is loaded.
_PIECE = 1 << 20
#: Seconds without an answer after which the server counts as unreachable.
_PATIENCE = 30.0
_TYPE = re.compile(r"application/vnd\.streamfold\.snapshot\+([a-z0-9_-]+)")


class _Item(msgspec.Struct):
    offset: str
    content_type: str
    size_bytes: int
    created_at: int


class _List(msgspec.Struct):
    snapshots: list[_Item]


class ServerSnapshots(SnapshotStore):
    """Snapshots of one stream on its Streamfold server; those that others published are left alone.

    The server keeps the newest sixteen, drops those that the stream was trimmed beyond, and
    allows no deletion, so that there is nothing to prune.
    """

    def __init__(self, endpoint: str, basin: str, stream: str, token: str | None = None) -> None:
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidError(f"endpoint {endpoint!r} must be http:// or https:// and a host")
        self._parts = parts
        self._path = f"{parts.path.rstrip('/')}/v1/streams/{quote(stream, safe='')}"
        self._headers = {"s2-basin": basin}
        if token:
            self._headers["authorization"] = f"Bearer {token}"

    async def list(self) -> list[SnapshotInfo]:
        status, body = await asyncio.to_thread(self._call, "GET", "/snapshots", None, {})
        if status != 200:
            raise _error_from_response(status, body)
        found = []
        for item in msgspec.json.decode(body, type=_List).snapshots:
            if match := _TYPE.fullmatch(item.content_type):
                placement, cursor = Placement.EXTERNAL, int(item.offset)
                size, created_at = item.size_bytes, item.created_at
                found.append(
                    SnapshotInfo(placement, item.offset, cursor, match[1], size, created_at)
                )
        return found

    async def load(self, info: SnapshotInfo) -> AsyncIterator[bytes]:
        with closing(self._connection()) as connection:
            path = f"{self._path}/snapshot/{info.cursor}"
            try:
                await asyncio.to_thread(connection.request, "GET", path, None, self._headers)
                response = await asyncio.to_thread(connection.getresponse)
                if response.status != 200:
                    raise _error_from_response(
                        response.status, await asyncio.to_thread(response.read)
                    )
                while piece := await asyncio.to_thread(response.read, _PIECE):
                    yield piece
            except (OSError, http.client.HTTPException) as error:
                raise BlobUnavailableError(f"snapshot {info.name} broke off: {error}") from error

    async def save(self, cursor: int, codec: str, blob: bytes) -> bool:
        kind = {"content-type": f"application/vnd.streamfold.snapshot+{codec}"}
        path = f"/snapshot/{cursor}"
        status, body = await asyncio.to_thread(self._call, "PUT", path, blob, kind)
        if status == 204:
            return True
        # Refused: there is one at this cursor or a newer one, or the stream was trimmed beyond it.
        if status == 410 or (status == 409 and await self._covers(cursor)):
            return False
        raise _error_from_response(status, body)

    async def delete(self, info: SnapshotInfo) -> None:
        raise InvalidError(
            f"snapshot {info.name} cannot be deleted: the server drops old ones itself"
        )

    async def _covers(self, cursor: int) -> bool:
        newest = await self.newest()
        return newest is not None and newest.cursor >= cursor

    def _call(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        with closing(self._connection()) as connection:
            try:
                connection.connect()
            except OSError as error:
                raise BlobUnavailableError(f"the server cannot be reached: {error}") from error
            try:
                connection.request(method, self._path + path, body, {**self._headers, **headers})
                response = connection.getresponse()
                return response.status, response.read()
            except (OSError, http.client.HTTPException) as error:
                if body is None:
                    raise BlobUnavailableError(f"the server broke off: {error}") from error
                raise BlobOutcomeUnknownError(
                    f"the server broke off, the snapshot may or may not be saved: {error}"
                ) from error

    def _connection(self) -> http.client.HTTPConnection:
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        return kind(self._parts.hostname or "", self._parts.port, timeout=_PATIENCE)


_REFUSALS: Final[dict[int, type[StreamfoldError]]] = {
    401: UnauthenticatedError,
    403: PermissionDeniedError,
    404: BlobNotFoundError,
    429: BlobUnavailableError,
    500: BlobOutcomeUnknownError,
    502: BlobOutcomeUnknownError,
    503: BlobUnavailableError,
    504: BlobOutcomeUnknownError,
}


def _error_from_response(status: int, body: bytes) -> StreamfoldError:
    kind = _REFUSALS.get(status, InvalidError)
    return kind(f"the server answered {status}: {body[:500].decode(errors='replace')}")
