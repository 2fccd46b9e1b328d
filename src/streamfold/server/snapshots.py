"""Snapshots, retention, and bootstrap: the newest snapshot with all later records."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Final, NamedTuple, TypeAlias

import msgspec

from streamfold.errors import (
    DataCorruptError,
    InvalidError,
    SnapshotConflictError,
    SnapshotNotFoundError,
)
from streamfold.model.names import BasinName, StreamName
from streamfold.model.resources import OCTETS, StreamStatus
from streamfold.server.http.bodies import NO_STORE, answer_json, limited_chunks
from streamfold.server.http.headers import Headers
from streamfold.server.http.offload import LIGHT_BYTES
from streamfold.server.http.request import LIST_ROOM, Request
from streamfold.server.live_reads import ReaderFairness
from streamfold.store.append_queues import APPEND_BYTES_MAX
from streamfold.store.catalog.snapshots import READ_PIECE, Publication, Snapshot
from streamfold.store.catalog.staged_parts import PART_BYTES_MAX, SNAPSHOT_BYTES_MAX
from streamfold.store.log.sealing import SealingKey
from streamfold.store.read.requests import ReadBatch
from streamfold.store.store import StreamStore
from streamfold.store.stream_handle import SnapshotHandle
from streamfold.wire.durable_streams import responses, snapshot_parts
from streamfold.wire.durable_streams.content import is_json, parse_stream_type
from streamfold.wire.durable_streams.headers import (
    NEXT_OFFSET,
    STREAM_CLOSED,
    UP_TO_DATE,
    parse_trim_on_snapshot,
)
from streamfold.wire.durable_streams.offsets import parse_position
from streamfold.wire.durable_streams.responses import SnapshotDigest
from streamfold.wire.durable_streams.snapshot_parts import (
    MANIFEST_MAX,
    PartsCommit,
    parse_manifest,
    parse_parts_commit,
)
from streamfold.wire.text import parse_parameters

#: Maximum bytes of a snapshot in one request.
SNAPSHOT_MAX: Final = PART_BYTES_MAX
#: `HEAD` response headers with the size limits of requests and snapshots.
PART_LIMITS: Final = (
    (snapshot_parts.REQUEST_BYTES_MAX, str(APPEND_BYTES_MAX).encode()),
    (snapshot_parts.SNAPSHOT_BYTES_MAX, str(SNAPSHOT_BYTES_MAX).encode()),
)
#: Maximum bytes of updates in a bootstrap. Ordinary reads return the rest.
BOOTSTRAP_BYTES: Final = 8 << 20
#: Bytes held for a bootstrap: updates as read and as parts, and a piece of the snapshot.
_BOOTSTRAP_ROOM: Final = 4 * BOOTSTRAP_BYTES
_MATCH: Final = "stream-snapshot-match"
_IN_PARTS: Final = f", or send it in parts, up to {SNAPSHOT_BYTES_MAX}"


class SnapshotItem(msgspec.Struct, frozen=True):
    """An entry in the snapshot list."""

    offset: str
    snapshot_content_type: str
    #: The same value under the header's name.
    content_type: str
    digest: str
    size_bytes: int
    #: Milliseconds since the Unix epoch.
    created_at: int


class SnapshotRequest(NamedTuple):
    """The target of a snapshot request through either face."""

    basin: BasinName
    stream: StreamName
    #: The stream's path as sent by the client.
    path: str
    #: The decoded position in the path, or None.
    position: str | None
    key: SealingKey | None

    @property
    def seq_num(self) -> int:
        if self.position is None:
            raise InvalidError("the position is missing: it is the last part of the path")
        return int(parse_position(self.position))


class UpdateParts(NamedTuple):
    """Updates in a bootstrap: content type, bodies and end position."""

    content_type: str
    bodies: list[bytes]
    #: None if there is no whole update.
    end: int | None


SnapshotHandler: TypeAlias = Callable[[Request, SnapshotRequest], Awaitable[None]]

#: Converts a request, the stream's status and its batches to parts.
Presentation: TypeAlias = Callable[[Request, StreamStatus, Sequence[ReadBatch]], UpdateParts]


class SnapshotHandlers:
    """Handlers of snapshot resources. `show` formats positions, `present` encodes updates."""

    def __init__(
        self,
        store: StreamStore,
        show: Callable[[int], str],
        present: Presentation,
    ) -> None:
        self._store = store
        self._show = show
        self._present = present

    async def publish(self, request: Request, address: SnapshotRequest) -> None:
        """Publish the snapshot in the body, or made of the parts listed there."""
        commit = parse_parts_commit(request.header)
        seq_num = address.seq_num
        content_type = parse_stream_type(request.header("content-type")) or OCTETS
        status = await self._store.stream(address.basin, address.stream).status()
        digest = SnapshotDigest(content_type)

        def make(pieces: AsyncIterator[bytes], size: int | None) -> Publication:
            return Publication(
                seq_num,
                content_type,
                pieces if commit is None else _verified(pieces, digest, commit.digest),
                digest,
                request.header(_MATCH),
                not is_json(status.traits.content_type),
                address.key,
                parse_trim_on_snapshot(request.header),
                size,
            )

        try:
            if commit is None:
                body = limited_chunks(request, SNAPSHOT_MAX, _IN_PARTS)
                new = make(body, request.declared_size)
                snapshot = await self._store.stream(
                    address.basin, address.stream
                ).snapshots.publish(new)
            else:
                snapshot = await self._publish_parts(request, address, commit, make)
        except SnapshotConflictError:
            await self._name_newest(request, address)
            raise
        await request.respond(204, self._headers(snapshot))

    async def _name_newest(self, request: Request, address: SnapshotRequest) -> None:
        """Add the headers of a newer snapshot, or of one at the same position, to a rejection."""
        newest = await self._store.stream(address.basin, address.stream).snapshots.find(None)
        if newest is not None and newest.seq_num >= address.seq_num:
            request.added_headers = (*request.added_headers, *self._headers(newest))

    async def _publish_parts(
        self,
        request: Request,
        address: SnapshotRequest,
        commit: PartsCommit,
        make: Callable[[AsyncIterator[bytes], int], Publication],
    ) -> Snapshot:
        body = await request.body(MANIFEST_MAX)
        if body is None:
            raise InvalidError(f"the list of parts has more than {MANIFEST_MAX} bytes")
        part_ids = parse_manifest(body, commit.parts)
        snapshots = self._store.stream(address.basin, address.stream).snapshots
        repeated = make(_no_pieces(), 0)
        snapshot = await snapshots.published(repeated, commit.digest)
        if snapshot is not None:
            return snapshot  # it was published before, and its parts are gone
        return await snapshots.publish_parts(part_ids, make)

    async def stage_part(self, request: Request, address: SnapshotRequest) -> None:
        """Store the body as a snapshot part. The position is checked on publication."""
        address.seq_num  # noqa: B018 - raises if it is missing or malformed
        body = limited_chunks(request, PART_BYTES_MAX)
        part = await self._store.stream(address.basin, address.stream).snapshots.stage_part(
            body, request.declared_size
        )
        await request.respond(201, ((snapshot_parts.PART, part.encode()), NO_STORE))

    async def list_parts(self, request: Request, address: SnapshotRequest) -> None:
        await request.reserve_answer(LIST_ROOM)
        parts = await self._store.stream(address.basin, address.stream).snapshots.staged_parts()
        await answer_json(request, {"parts": [part._asdict() for part in parts]})

    async def discard_parts(self, request: Request, address: SnapshotRequest) -> None:
        if address.position is not None:
            raise InvalidError("parts are discarded all together: DELETE .../snapshot/parts")
        await self._store.stream(address.basin, address.stream).snapshots.discard_parts()
        await request.respond(204)

    async def newest(self, request: Request, address: SnapshotRequest) -> None:
        """Redirect to the newest snapshot, whose address always returns the same bytes."""
        snapshot = await self._store.stream(address.basin, address.stream).snapshots.find(None)
        if snapshot is None:
            raise SnapshotNotFoundError(f"stream {address.stream!r} has no snapshot: publish one")
        where = request.url_of(f"{address.path}/snapshot/{self._show(snapshot.seq_num)}")
        headers = [(b"location", where.encode()), NO_STORE, *self._headers(snapshot)]
        await request.respond(307, headers)

    async def read(self, request: Request, address: SnapshotRequest) -> None:
        handle, seq_num = self._store.stream(address.basin, address.stream), address.seq_num
        snapshot, status = await handle.snapshots.find(seq_num), await handle.status()
        if snapshot is None:
            raise SnapshotNotFoundError(f"stream {address.stream!r} has no snapshot at {seq_num}")
        headers = [
            (b"content-type", snapshot.content_type.encode()),
            (b"content-length", str(snapshot.size).encode()),
            (NEXT_OFFSET, self._show(snapshot.seq_num).encode()),
            (b"etag", f'"{snapshot.digest}"'.encode()),
            *self._headers(snapshot),
            *([UP_TO_DATE] if snapshot.seq_num == status.tail else []),
        ]
        await request.reserve_answer(3 * READ_PIECE)
        async with aclosing(self._pieces(handle.snapshots, snapshot)) as pieces:
            # Read before the head is sent, so that a snapshot being collected is a 404, not cut off.
            first = await anext(pieces, b"")
            stream = await request.open(200, headers)
            request.ignore_body()
            await stream.send(first)
            async for piece in pieces:
                await stream.send(piece)
        await stream.close()

    async def list(self, request: Request, address: SnapshotRequest) -> None:
        await request.reserve_answer(LIST_ROOM)
        snapshots = await self._store.stream(address.basin, address.stream).snapshots.all()
        items = [
            SnapshotItem(
                self._show(s.seq_num),
                s.content_type,
                s.content_type,
                s.digest,
                s.size,
                s.created_at,
            )
            for s in reversed(snapshots)
        ]
        await answer_json(request, {"snapshots": items})

    async def refuse_deletion(self, request: Request, address: SnapshotRequest) -> None:
        """Reject: the newest snapshot cannot be deleted, and the server removes older ones itself."""
        seq_num = address.seq_num
        newest = await self._store.stream(address.basin, address.stream).snapshots.find(None)
        if newest is None or newest.seq_num != seq_num:
            there = "none" if newest is None else f"the one at {newest.seq_num}"
            raise SnapshotNotFoundError(
                f"no snapshot at {seq_num} can be deleted: the newest of stream "
                f"{address.stream!r} is {there}, and the server removes older ones"
            )
        raise SnapshotConflictError(
            f"the snapshot at {seq_num} is the newest and cannot be deleted: publish a newer one, and "
            "the server removes it"
        )

    async def retain(self, request: Request, address: SnapshotRequest) -> None:
        seq_num, handle = address.seq_num, self._store.stream(address.basin, address.stream)
        status = await handle.status()
        whole = not is_json(status.traits.content_type)
        await handle.snapshots.retain(seq_num, whole_appends=whole, key=address.key)
        retained = (b"stream-retained-offset", self._show(seq_num).encode())
        await request.respond(204, (retained,))

    async def bootstrap(self, request: Request, address: SnapshotRequest) -> None:
        if "live" in parse_parameters(request.query):
            raise InvalidError("a bootstrap is not live: read on from its Stream-Next-Offset")
        handle = self._store.stream(address.basin, address.stream)
        snapshot, status = await handle.snapshots.find(None), await handle.status()
        start = status.first if snapshot is None else snapshot.seq_num
        await request.reserve_answer(_BOOTSTRAP_ROOM)
        parts, end, closed = await self._updates(request, address, start)
        separator = responses.boundary(os.urandom(responses.BOUNDARY_RANDOM_MIN))
        updates = await request.offload(_multipart, parts, separator)
        del parts
        request.shrink_answer(sum(map(len, updates)) + 3 * READ_PIECE)
        at = "-1" if snapshot is None else self._show(snapshot.seq_num)
        headers = [
            (b"content-type", responses.multipart_type(separator).encode()),
            (b"stream-snapshot-offset", at.encode()),
            (NEXT_OFFSET, self._show(end).encode()),
            NO_STORE,
        ]
        if snapshot is not None:
            headers.append((b"stream-snapshot-digest", snapshot.digest.encode()))
        if closed is not None:
            headers.append(UP_TO_DATE)
        if closed:
            headers.append(STREAM_CLOSED)
        async with aclosing(self._pieces(handle.snapshots, snapshot)) as pieces:
            first = await anext(pieces, b"")
            stream = await request.open(200, headers)
            request.ignore_body()
            kind = OCTETS if snapshot is None else snapshot.content_type
            await stream.send(responses.part_head(separator, kind), first)
            async for piece in pieces:
                await stream.send(piece)
        for piece in updates:
            await stream.send(piece)
        await stream.close()

    async def _pieces(
        self, snapshots: SnapshotHandle, snapshot: Snapshot | None
    ) -> AsyncGenerator[bytes]:
        """Yield a snapshot's bytes. Withholds the last piece unless the digest matches."""
        if snapshot is None:
            return
        digest, last = SnapshotDigest(snapshot.content_type), b""
        async with aclosing(snapshots.pieces(snapshot)) as pieces:
            async for piece in pieces:
                if last:
                    yield last
                digest.update(piece)
                last = piece
        if digest.hexdigest() != snapshot.digest:
            raise DataCorruptError(
                f"blob {snapshot.blob!r} of the snapshot at {snapshot.seq_num} is damaged: its digest "
                f"is {digest.hexdigest()}, not {snapshot.digest}: restore it from a backup, or "
                "publish a newer snapshot"
            )
        yield last

    async def _updates(
        self,
        request: Request,
        address: SnapshotRequest,
        start: int,
    ) -> tuple[UpdateParts, int, bool | None]:
        """Return whole updates from `start`, their end and, at the tail, whether it is closed."""
        batches, fresh, size, pace = [], [], 0, ReaderFairness()
        async with self._store.stream(address.basin, address.stream).reading(
            start, address.key
        ) as reading:
            while batch := await reading.read():
                batches.append(batch)
                fresh.append(batch)
                size += batch.metered
                await pace.after(batch)
                if size < BOOTSTRAP_BYTES:
                    continue
                # Search only new batches for an end, so that a long append is read once.
                ends = await self._presented(request, reading.status, fresh)
                fresh = []
                if ends.end is not None:
                    updates = await self._presented(request, reading.status, batches)
                    if updates.end is not None and updates.end < reading.status.tail:
                        return updates, updates.end, None
                elif size > BOOTSTRAP_BYTES + APPEND_BYTES_MAX:
                    # No append is that long, so its marks were forged. Reads return it in pieces.
                    return UpdateParts(ends.content_type, [], None), start, None
            updates = await self._presented(request, reading.status, batches)
            return updates, reading.seq_num, reading.closed

    async def _presented(
        self, request: Request, status: StreamStatus, batches: Sequence[ReadBatch]
    ) -> UpdateParts:
        if sum(batch.metered for batch in batches) > LIGHT_BYTES:
            return await request.offload(self._present, request, status, batches)
        return self._present(request, status, batches)

    def _headers(self, snapshot: Snapshot) -> Headers:
        return [
            (b"stream-snapshot-offset", self._show(snapshot.seq_num).encode()),
            (b"stream-snapshot-digest", snapshot.digest.encode()),
        ]


async def _no_pieces() -> AsyncIterator[bytes]:
    none: tuple[bytes, ...] = ()
    for piece in none:
        yield piece


async def _verified(
    pieces: AsyncIterator[bytes], digest: SnapshotDigest, expected: str
) -> AsyncIterator[bytes]:
    """Yield the pieces. Raises InvalidError at the end if `digest` differs."""
    async for piece in pieces:
        yield piece
    if digest.hexdigest() != expected:
        raise InvalidError(
            f"the parts have the digest {digest.hexdigest()} together, not {expected}: nothing was "
            "published; check their order and the content type"
        )


#: Bytes of small parts gathered before they are sent.
_SENT_FROM: Final = 64 << 10


def _multipart(parts: UpdateParts, separator: str) -> Sequence[bytes]:
    """Return all parts after the first and the closing boundary, in larger pieces."""
    pieces, gathered, size = [], [b""], 0
    head = responses.PART_END + responses.part_head(separator, parts.content_type)
    for body in parts.bodies:
        gathered += (head, body)
        size += len(head) + len(body)
        if size >= _SENT_FROM:
            pieces.append(b"".join(gathered))
            gathered, size = [], 0
    gathered += (responses.PART_END, responses.closing(separator))
    return [*pieces, b"".join(gathered)]
