"""Snapshots, retention, and bootstrap: the newest snapshot with everything that came after it."""

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
from streamfold.server.http.response_stream import PIECE
from streamfold.server.live_reads import ReaderFairness
from streamfold.store.catalog.snapshots import READ_PIECE, Publication, Snapshot
from streamfold.store.catalog.staged_parts import PART_BYTES_MAX, SNAPSHOT_BYTES_MAX
from streamfold.store.durable_streams import APPEND_BYTES_MAX
from streamfold.store.log.sealing import SealingKey
from streamfold.store.read.requests import ReadBatch
from streamfold.store.store import StreamStore
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

#: Bytes of a snapshot in one request.
SNAPSHOT_MAX: Final = PART_BYTES_MAX
#: Headers of a `HEAD`: how large requests and snapshots may be.
PART_LIMITS: Final = (
    (snapshot_parts.REQUEST_BYTES_MAX, str(APPEND_BYTES_MAX).encode()),
    (snapshot_parts.SNAPSHOT_BYTES_MAX, str(SNAPSHOT_BYTES_MAX).encode()),
)
#: Bytes of updates that a bootstrap brings with its snapshot; the rest comes by ordinary reads.
BOOTSTRAP_BYTES: Final = 8 << 20
#: Bytes that a bootstrap holds: updates, as they were read and as parts, and a piece of the snapshot.
_BOOTSTRAP_ROOM: Final = 4 * BOOTSTRAP_BYTES
_MATCH: Final = "stream-snapshot-match"
_IN_PARTS: Final = f", or send it in parts, up to {SNAPSHOT_BYTES_MAX}"


class SnapshotItem(msgspec.Struct, frozen=True):
    """A snapshot in a list."""

    offset: str
    snapshot_content_type: str
    #: The same value under the name of the header.
    content_type: str
    digest: str
    size_bytes: int
    #: Milliseconds since the Unix epoch.
    created_at: int


class SnapshotRequest(NamedTuple):
    """What a request for snapshots is about, whichever face it came through."""

    basin: BasinName
    stream: StreamName
    #: The path of the stream itself, as the client wrote it.
    path: str
    #: The position in the path, decoded; None if the path has none.
    position: str | None
    key: SealingKey | None

    @property
    def seq_num(self) -> int:
        if self.position is None:
            raise InvalidError("the position is missing: it is the last part of the path")
        return int(parse_position(self.position))


class UpdateParts(NamedTuple):
    """Updates as parts of a bootstrap: their content type and bytes, and where they end."""

    content_type: str
    bodies: list[bytes]
    #: None without a single whole update.
    end: int | None


SnapshotHandler: TypeAlias = Callable[[Request, SnapshotRequest], Awaitable[None]]

#: Makes parts from a request, the status of the stream, and the batches that were read.
Presentation: TypeAlias = Callable[[Request, StreamStatus, Sequence[ReadBatch]], UpdateParts]


class Snapshots:
    """Handlers of a stream's sub-resources; `show` formats positions, `present` encodes updates."""

    def __init__(
        self,
        store: StreamStore,
        show: Callable[[int], str],
        present: Presentation,
    ) -> None:
        self._store = store
        self._show = show
        self._present = present

    async def publish(self, request: Request, wanted: SnapshotRequest) -> None:
        """Publish the snapshot in the body, or the parts that it lists."""
        commit = parse_parts_commit(request.header)
        seq_num = wanted.seq_num
        content_type = parse_stream_type(request.header("content-type")) or OCTETS
        status = await self._store.durable.status(wanted.basin, wanted.stream)
        digest = SnapshotDigest(content_type)

        def make(pieces: AsyncIterator[bytes], size: int | None) -> Publication:
            return Publication(
                seq_num,
                content_type,
                pieces if commit is None else _verified(pieces, digest, commit.digest),
                digest,
                request.header(_MATCH),
                not is_json(status.traits.content_type),
                wanted.key,
                parse_trim_on_snapshot(request.header),
                size,
            )

        try:
            if commit is None:
                body = limited_chunks(request, SNAPSHOT_MAX, _IN_PARTS)
                new = make(body, request.declared_size)
                snapshot = await self._store.durable.publish(wanted.basin, wanted.stream, new)
            else:
                snapshot = await self._publish_parts(request, wanted, commit, make)
        except SnapshotConflictError:
            await self._name_newest(request, wanted)
            raise
        await request.respond(204, self._headers(snapshot))

    async def _name_newest(self, request: Request, wanted: SnapshotRequest) -> None:
        """Have a refusal name the snapshot that is at the position of the refused one, or later."""
        newest = await self._store.durable.snapshot(wanted.basin, wanted.stream, None)
        if newest is not None and newest.seq_num >= wanted.seq_num:
            request.added_headers = (*request.added_headers, *self._headers(newest))

    async def _publish_parts(
        self,
        request: Request,
        wanted: SnapshotRequest,
        commit: PartsCommit,
        make: Callable[[AsyncIterator[bytes], int], Publication],
    ) -> Snapshot:
        body = await request.body(MANIFEST_MAX)
        if body is None:
            raise InvalidError(f"the list of parts has more than {MANIFEST_MAX} bytes")
        part_ids = parse_manifest(body, commit.parts)
        durable, basin, stream = self._store.durable, wanted.basin, wanted.stream
        repeated = make(_no_pieces(), 0)
        snapshot = await durable.published(basin, stream, repeated, commit.digest)
        if snapshot is not None:
            return snapshot  # it was published before, and its parts are gone
        return await durable.publish_parts(basin, stream, part_ids, make)

    async def stage_part(self, request: Request, wanted: SnapshotRequest) -> None:
        """Store the body as a part of a snapshot; the position is checked when it is published."""
        wanted.seq_num  # noqa: B018 - raises if it is missing or malformed
        body = limited_chunks(request, PART_BYTES_MAX)
        part = await self._store.durable.stage_part(
            wanted.basin, wanted.stream, body, request.declared_size
        )
        await request.respond(201, ((snapshot_parts.PART, part.encode()), NO_STORE))

    async def list_parts(self, request: Request, wanted: SnapshotRequest) -> None:
        await request.reserve_answer(LIST_ROOM)
        parts = await self._store.durable.staged_parts(wanted.basin, wanted.stream)
        await answer_json(request, {"parts": [part._asdict() for part in parts]})

    async def discard_parts(self, request: Request, wanted: SnapshotRequest) -> None:
        if wanted.position is not None:
            raise InvalidError("parts are discarded all together: DELETE .../snapshot/parts")
        await self._store.durable.discard_parts(wanted.basin, wanted.stream)
        await request.respond(204)

    async def newest(self, request: Request, wanted: SnapshotRequest) -> None:
        """Redirect to the newest snapshot, whose own address always returns the same bytes."""
        snapshot = await self._store.durable.snapshot(wanted.basin, wanted.stream, None)
        if snapshot is None:
            raise SnapshotNotFoundError(f"stream {wanted.stream!r} has no snapshot: publish one")
        where = request.url_of(f"{wanted.path}/snapshot/{self._show(snapshot.seq_num)}")
        headers = [(b"location", where.encode()), NO_STORE, *self._headers(snapshot)]
        await request.respond(307, headers)

    async def read(self, request: Request, wanted: SnapshotRequest) -> None:
        durable, seq_num = self._store.durable, wanted.seq_num
        snapshot = await durable.snapshot(wanted.basin, wanted.stream, seq_num)
        status = await durable.status(wanted.basin, wanted.stream)
        if snapshot is None:
            raise SnapshotNotFoundError(f"stream {wanted.stream!r} has no snapshot at {seq_num}")
        headers = [
            (b"content-type", snapshot.content_type.encode()),
            (b"content-length", str(snapshot.size).encode()),
            (NEXT_OFFSET, self._show(snapshot.seq_num).encode()),
            (b"etag", f'"{snapshot.digest}"'.encode()),
            *self._headers(snapshot),
            *([UP_TO_DATE] if snapshot.seq_num == status.tail else []),
        ]
        await request.reserve_answer(3 * READ_PIECE)
        async with aclosing(self._pieces(snapshot)) as pieces:
            # Before the head: a snapshot that is being collected is missing, not broken off.
            first = await anext(pieces, b"")
            stream = await request.open(200, headers)
            request.ignore_body()
            await stream.send(first)
            async for piece in pieces:
                await stream.send(piece)
        await stream.close()

    async def list(self, request: Request, wanted: SnapshotRequest) -> None:
        await request.reserve_answer(LIST_ROOM)
        found = await self._store.durable.snapshots(wanted.basin, wanted.stream)
        items = [
            SnapshotItem(
                self._show(s.seq_num),
                s.content_type,
                s.content_type,
                s.digest,
                s.size,
                s.created_at,
            )
            for s in reversed(found)
        ]
        await answer_json(request, {"snapshots": items})

    async def refuse_deletion(self, request: Request, wanted: SnapshotRequest) -> None:
        """Refuse: the newest snapshot cannot be deleted, and the server removes older ones."""
        seq_num = wanted.seq_num
        newest = await self._store.durable.snapshot(wanted.basin, wanted.stream, None)
        if newest is None or newest.seq_num != seq_num:
            there = "none" if newest is None else f"the one at {newest.seq_num}"
            raise SnapshotNotFoundError(
                f"no snapshot at {seq_num} can be deleted: the newest of stream "
                f"{wanted.stream!r} is {there}, and the server removes older ones"
            )
        raise SnapshotConflictError(
            f"the snapshot at {seq_num} is the newest and cannot be deleted: publish a newer one, and "
            "the server removes it"
        )

    async def retain(self, request: Request, wanted: SnapshotRequest) -> None:
        seq_num, durable = wanted.seq_num, self._store.durable
        status = await durable.status(wanted.basin, wanted.stream)
        whole = not is_json(status.traits.content_type)
        await durable.retain(
            wanted.basin, wanted.stream, seq_num, whole_appends=whole, key=wanted.key
        )
        kept = (b"stream-retained-offset", self._show(seq_num).encode())
        await request.respond(204, (kept,))

    async def bootstrap(self, request: Request, wanted: SnapshotRequest) -> None:
        if "live" in parse_parameters(request.query):
            raise InvalidError("a bootstrap is not live: read on from its Stream-Next-Offset")
        durable = self._store.durable
        snapshot = await durable.snapshot(wanted.basin, wanted.stream, None)
        status = await durable.status(wanted.basin, wanted.stream)
        start = status.first if snapshot is None else snapshot.seq_num
        await request.reserve_answer(_BOOTSTRAP_ROOM)
        parts, end, closed = await self._updates(request, wanted, start)
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
        async with aclosing(self._pieces(snapshot)) as pieces:
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

    async def _pieces(self, snapshot: Snapshot | None) -> AsyncGenerator[bytes]:
        """Yield the bytes of a snapshot; the last ones only if all are those that were published."""
        if snapshot is None:
            return
        digest, last = SnapshotDigest(snapshot.content_type), b""
        async with aclosing(self._store.durable.snapshot_pieces(snapshot)) as pieces:
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
        wanted: SnapshotRequest,
        start: int,
    ) -> tuple[UpdateParts, int, bool | None]:
        """Whole updates from `start` on, where they end, and if that is the tail, whether closed."""
        batches, fresh, size, pace = [], [], 0, ReaderFairness()
        async with self._store.durable.reading(
            wanted.basin, wanted.stream, start, wanted.key
        ) as reading:
            while batch := await reading.read():
                batches.append(batch)
                fresh.append(batch)
                size += batch.metered
                await pace.after(batch)
                if size < BOOTSTRAP_BYTES:
                    continue
                # Only new batches are searched for an end, so that a long append costs its size once.
                ends = await self._presented(request, reading.status, fresh)
                fresh = []
                if ends.end is not None:
                    found = await self._presented(request, reading.status, batches)
                    if found.end is not None and found.end < reading.status.tail:
                        return found, found.end, None
                elif size > BOOTSTRAP_BYTES + APPEND_BYTES_MAX:
                    # No append is that long: its marks were forged. Reads return it in pieces.
                    return UpdateParts(ends.content_type, [], None), start, None
            found = await self._presented(request, reading.status, batches)
            return found, reading.seq_num, reading.closed

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
    """The pieces, all of which `digest` has taken in when this ends; InvalidError if it differs."""
    async for piece in pieces:
        yield piece
    if digest.hexdigest() != expected:
        raise InvalidError(
            f"the parts have the digest {digest.hexdigest()} together, not {expected}: nothing was "
            "published; check their order and the content type"
        )


def _multipart(parts: UpdateParts, separator: str) -> Sequence[bytes]:
    """All parts after the first, and the closing boundary, gathered into pieces worth sending."""
    pieces, gathered, size = [], [b""], 0
    head = responses.PART_END + responses.part_head(separator, parts.content_type)
    for body in parts.bodies:
        gathered += (head, body)
        size += len(head) + len(body)
        if size >= PIECE:
            pieces.append(b"".join(gathered))
            gathered, size = [], 0
    gathered += (responses.PART_END, responses.closing(separator))
    return [*pieces, b"".join(gathered)]
