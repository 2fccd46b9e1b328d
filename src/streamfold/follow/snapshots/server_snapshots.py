"""External snapshots that the server stores beside the stream, through Streamfold's own API."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from typing import Final
from urllib.parse import quote, urlsplit

import httpx
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
from streamfold.http_client import AsyncHttp, build_request, cause_of
from streamfold.wording import reason_of

#: Bytes per piece when loading a snapshot.
_PIECE = 1 << 20
#: Seconds without a response after which the server counts as unreachable.
_TIMEOUT = 30.0
_TYPE = re.compile(r"application/vnd\.streamfold\.snapshot\+([a-z0-9_-]+)")


class _Item(msgspec.Struct):
    offset: str
    content_type: str
    size_bytes: int
    created_at: int


class _List(msgspec.Struct):
    snapshots: list[_Item]


class ServerSnapshots(SnapshotStore):
    """One stream's snapshots on its Streamfold server. Ignores snapshots of other content types.

    The server keeps the newest sixteen, and drops snapshots that the stream has been trimmed past.
    It offers no deletion, so there is nothing to prune.
    """

    prunable = False

    def __init__(self, endpoint: str, basin: str, stream: str, token: str | None = None) -> None:
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidError(f"endpoint {endpoint!r} must be http:// or https:// and a host")
        self._origin = httpx.URL(scheme=parts.scheme, host=parts.hostname, port=parts.port)
        self._http = AsyncHttp()
        self._path = f"{parts.path.rstrip('/')}/v1/streams/{quote(stream, safe='')}"
        self._headers = {"s2-basin": basin}
        if token:
            self._headers["authorization"] = f"Bearer {token}"

    async def list(self) -> list[SnapshotInfo]:
        status, body = await self._call("GET", "/snapshots")
        if status != 200:
            raise _error_of_read(status, body)
        infos = []
        for item in msgspec.json.decode(body, type=_List).snapshots:
            if match := _TYPE.fullmatch(item.content_type):
                placement, cursor = Placement.EXTERNAL, int(item.offset)
                size, created_at = item.size_bytes, item.created_at
                infos.append(
                    SnapshotInfo(placement, item.offset, cursor, match[1], size, created_at)
                )
        return infos

    async def load(self, info: SnapshotInfo) -> AsyncIterator[bytes]:
        request = self._request("GET", f"/snapshot/{info.cursor}")
        try:
            async with self._http.send(request) as response:
                if response.status_code != 200:
                    raise _error_of_read(response.status_code, await _read(response))
                async for piece in response.aiter_raw(_PIECE):
                    yield piece
        except httpx.TransportError as error:
            cause = reason_of(cause_of(error))
            raise BlobUnavailableError(f"snapshot {info.name} was cut off: {cause}") from error

    async def save(self, cursor: int, codec: str, blob: bytes) -> bool:
        kind = {"content-type": f"application/vnd.streamfold.snapshot+{codec}"}
        status, body = await self._call("PUT", f"/snapshot/{cursor}", blob, kind)
        if status == 204:
            return True
        # Rejected: this or a newer cursor has a snapshot, or the stream was trimmed beyond it.
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

    async def _call(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        try:
            async with self._http.send(self._request(method, path, body, headers)) as response:
                return response.status_code, await _read(response)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise BlobUnavailableError(
                f"the server at {self._origin} cannot be reached: {reason_of(cause_of(error))}; is it "
                "running, and is its address right?"
            ) from error
        except httpx.TransportError as error:
            if method == "GET":
                raise BlobUnavailableError(
                    f"the server closed the connection: {reason_of(cause_of(error))}"
                ) from error
            raise BlobOutcomeUnknownError(
                "the connection was lost, the snapshot may or may not be saved: "
                f"{reason_of(cause_of(error))}"
            ) from error

    def _request(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> httpx.Request:
        sent = {**self._headers, **(headers or {})}
        path = self._path + path
        return build_request(method, self._origin, path, sent, body, timeout=_TIMEOUT)


async def _read(response: httpx.Response) -> bytes:
    return b"".join([piece async for piece in response.aiter_raw()])


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


def _error_of_read(status: int, body: bytes) -> StreamfoldError:
    """Return the error for a read. Reads change nothing, so even an unknown outcome can be retried."""
    error = _error_from_response(status, body)
    if isinstance(error, BlobOutcomeUnknownError):
        return BlobUnavailableError(error.message)
    return error
