"""Snapshots, retention and bootstrap for S2 clients. Positions are seq_nums.

These routes are Streamfold's own: S2 has no snapshot routes.
"""

from __future__ import annotations

from collections.abc import Sequence

from streamfold.model.access_tokens import Right
from streamfold.model.resources import StreamStatus
from streamfold.server.auth import Access
from streamfold.server.http.request import Request
from streamfold.server.http.router import Handler, Router
from streamfold.server.s2.stream_refs import parse_stream_request
from streamfold.server.snapshots import SnapshotHandlers, SnapshotRequest, UpdateParts
from streamfold.store.read.requests import ReadBatch
from streamfold.store.store import StreamStore
from streamfold.wire.durable_streams.headers import parse_trim_on_snapshot
from streamfold.wire.s2 import headers, records_json, records_proto
from streamfold.wire.s2.headers import Encoding, negotiate_read


class SnapshotEndpoints:
    """Snapshot handlers below /v1/streams/{stream}."""

    def __init__(self, store: StreamStore, access: Access) -> None:
        self._access = access
        self._snapshots = SnapshotHandlers(store, str, _read_batch)

    def add_to(self, router: Router) -> None:
        path, snapshots = "/v1/streams/{}", self._snapshots
        for method, part, operation, handler in (
            ("GET", "snapshots", Right.READ, snapshots.list),
            # Listed before the position routes, because the first matching pattern wins.
            ("POST", "snapshot/{}/parts", Right.APPEND, snapshots.stage_part),
            ("GET", "snapshot/parts", Right.READ, snapshots.list_parts),
            ("DELETE", "snapshot/parts", Right.APPEND, snapshots.discard_parts),
            ("GET", "snapshot", Right.READ, snapshots.newest),
            ("GET", "snapshot/{}", Right.READ, snapshots.read),
            ("PUT", "snapshot/{}", Right.APPEND, snapshots.publish),
            ("DELETE", "snapshot/{}", Right.TRIM, snapshots.refuse_deletion),
            ("PUT", "retention/{}", Right.TRIM, snapshots.retain),
            ("GET", "bootstrap", Right.READ, snapshots.bootstrap),
        ):
            router.add(method, f"{path}/{part}", operation, self._guarded(operation, handler))

    def _guarded(self, operation: Right, handler: Handler) -> Handler:
        async def handle(request: Request, segment: str, position: str | None = None) -> None:
            stream_request = parse_stream_request(
                request, segment, await self._access.grant(request)
            )
            stream_request.grant.require(operation, *stream_request.ref)
            if handler == self._snapshots.publish and parse_trim_on_snapshot(request.header):
                stream_request.grant.require(Right.TRIM, *stream_request.ref)
            snapshot_request = SnapshotRequest(
                *stream_request.ref,
                f"/v1/streams/{segment}",
                position,
                stream_request.sealing_key,
            )
            await handler(request, snapshot_request)

        return handle


def _read_batch(
    request: Request, status: StreamStatus, batches: Sequence[ReadBatch]
) -> UpdateParts:
    """Encode all records as one batch, as an S2 read returns them."""
    payloads = [batch.payload() for batch in batches]
    end = batches[-1].end_seq_num if batches else None
    if negotiate_read(None, request.header("accept")).response is Encoding.PROTO:
        body = records_proto.encode_read_batch(b"".join(payloads), None)
        return UpdateParts(Encoding.PROTO, [body] if batches else [], end)
    record_format = headers.parse_format(request.header(headers.FORMAT))
    body = records_json.encode_read_batches(payloads, record_format)
    return UpdateParts(Encoding.JSON, [body] if batches else [], end)
