"""The parts of the S2 SDK that it does not promise to keep, and that its public names do not offer.

Only this module imports them: how a request ended, as far as the SDK knows (upstream defect 17), the
wrapper that makes all failures errors of the SDK, appends whose input is encoded already (the SDK
spends 8 us on each record), and the pool of connections, which keeps one that has fallen silent.
`pyproject.toml` bounds the version of the SDK for their sake.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from streamfold.extras import needing_extra
from streamfold.wire.compression import ZSTD_LEVEL_FAST, Compression
from streamfold.wire.s2.frames import encode_frame

with needing_extra("client"):
    from s2_sdk._exceptions import (
        AppendIndefiniteFailureError,
        ConnectError,
        ReadTimeoutError,
        TransportError,
        fallible,
        normalize_exception,
    )
    from s2_sdk._generated.s2.v1.s2_pb2 import AppendAck
    from s2_sdk._retrier import has_no_side_effects
    from s2_sdk._s2s import _stream_records_path
    from s2_sdk._s2s._protocol import (
        parse_error_info,
        read_messages,
    )

if TYPE_CHECKING:
    from s2_sdk import S2Basin, S2Stream

__all__ = [
    "AppendIndefiniteFailureError",
    "ConnectError",
    "TransportError",
    "append_input",
    "append_inputs",
    "fallible",
    "has_no_side_effects",
    "retire_silent_connections",
]

#: Bytes of appends up to which they are compressed without a thread: that takes 0.2 ms at most.
_PACKED_AT_ONCE: Final = 64 << 10
#: Bytes of appends that are compressed together: the server works on them while the next ones are.
_PACKED_TOGETHER: Final = 1 << 20


def retire_silent_connections(used: S2Basin | S2Stream, error: BaseException) -> None:
    """After a timeout, have the next request open a connection; those open now get no more requests.

    The SDK would send it on the same one, although the host may be gone, until the kernel gives up.
    """
    if isinstance(error.__cause__, ReadTimeoutError):
        client = used._client
        for connection in client._pool._hosts.get(client._base_url, ()):
            connection.retire()


async def append_input(stream: S2Stream, body: bytes) -> int:
    """Append one encoded AppendInput as `S2Stream.append` does, with its retries.

    Returns the end of the acknowledged range.
    """
    kind = {"content-type": "application/x-protobuf", "accept": "application/x-protobuf"}
    path, headers = _stream_records_path(stream.name), stream._request_headers(kind)
    send = fallible(stream._append_retrier.__call__)
    response = await send(stream._client.unary_request, "POST", path, content=body, headers=headers)
    ack = AppendAck()
    ack.ParseFromString(response.content)
    return int(ack.end.seq_num)


async def append_inputs(stream: S2Stream, inputs: Sequence[bytes]) -> None:
    """Append encoded AppendInputs in one session, compressed; returns when all are acknowledged.

    Nothing is repeated: after an error the outcome of those without an answer is unknown.
    """

    async def frames() -> AsyncIterator[bytes]:
        for some in _pieces(inputs):
            if sum(map(len, some)) <= _PACKED_AT_ONCE:
                yield _packed(some)
            else:
                yield await asyncio.to_thread(_packed, some)

    client, kind = stream._client, {"content-type": "s2s/proto", "accept": "s2s/proto"}
    path, headers = _stream_records_path(stream.name), stream._request_headers(kind)
    clock = asyncio.get_running_loop().time
    # Twice, because the SDK may wait when it ends a request, too: for room in a socket that is full.
    longest = 2 * client._request_timeout
    try:
        async with (
            asyncio.timeout(longest) as unanswered,
            client.streaming_request("POST", path, headers=headers, content=frames()) as found,
        ):
            if found.status_code != 200:
                raise parse_error_info(await found.aread(), found.status_code)
            acks = read_messages(found.aiter_bytes())
            for _ in inputs:
                async with asyncio.timeout(client._request_timeout):
                    await anext(acks)
                unanswered.reschedule(clock() + longest)
    except Exception as error:
        failure = normalize_exception(_as_transport_error(error))
        # Its cause says how the request ended: callers decide by it.
        raise failure from failure.__cause__


def _pieces(inputs: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Yield the appends in runs that are compressed together, in order."""
    start, size = 0, 0
    for end, body in enumerate(inputs, 1):
        size += len(body)
        if size >= _PACKED_TOGETHER or end == len(inputs):
            yield inputs[start:end]
            start, size = end, 0


def _packed(inputs: Sequence[bytes]) -> bytes:
    """Return the frames of a session, compressed.

    That costs 1 ns per byte of JSON, and saves several of sending and receiving it.
    """
    return b"".join(
        encode_frame(body, Compression.ZSTD, zstd_level=ZSTD_LEVEL_FAST) for body in inputs
    )


def _as_transport_error(error: Exception) -> Exception:
    """Return the SDK's error for a session that ended without an answer; other errors as they are."""
    found = error
    if isinstance(error, TimeoutError):
        found = ReadTimeoutError("no acknowledgement in time")
    elif isinstance(error, StopAsyncIteration):
        found = TransportError("the server ended the session")
    return found
