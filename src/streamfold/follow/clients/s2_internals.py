"""Private parts of the S2 SDK that have no public equivalent and may change without notice.

Only this module imports them: how a request ended as far as the SDK knows (upstream defect 17), the
wrapper that turns every failure into an SDK error, appends with pre-encoded input (the SDK spends
8 us per record), and the connection pool, which would reuse a connection that has gone silent.
Because of them, `pyproject.toml` bounds the SDK version.
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

#: Maximum bytes of appends compressed on the event loop, which takes at most 0.2 ms. More go to a
#: thread.
_PACKED_AT_ONCE: Final = 64 << 10
#: Bytes of appends compressed together. The server processes them while the next ones are
#: compressed.
_PACKED_TOGETHER: Final = 1 << 20


def retire_silent_connections(used: S2Basin | S2Stream, error: BaseException) -> None:
    """Retire the open connections after a timeout, so that the next request opens a new one.

    Otherwise the SDK reuses the same connection until the kernel gives up, even if the host is
    gone.
    """
    if isinstance(error.__cause__, ReadTimeoutError):
        client = used._client
        for connection in client._pool._hosts.get(client._base_url, ()):
            connection.retire()


async def append_input(stream: S2Stream, body: bytes) -> int:
    """Append one encoded AppendInput as `S2Stream.append` does, including its retries.

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
    """Append encoded AppendInputs, compressed, in one session. Returns once all are acknowledged.

    Nothing is retried: after an error, the outcome of unacknowledged appends is unknown.
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
    # Twice the timeout: the SDK may also wait for room in a full socket when it ends a request.
    longest = 2 * client._request_timeout
    try:
        async with (
            asyncio.timeout(longest) as unanswered,
            client.streaming_request("POST", path, headers=headers, content=frames()) as response,
        ):
            if response.status_code != 200:
                raise parse_error_info(await response.aread(), response.status_code)
            acks = read_messages(response.aiter_bytes())
            for _ in inputs:
                async with asyncio.timeout(client._request_timeout):
                    await anext(acks)
                unanswered.reschedule(clock() + longest)
    except Exception as error:
        failure = normalize_exception(_as_transport_error(error))
        # Keep the cause: it says how the request ended, and callers depend on it.
        raise failure from failure.__cause__


def _pieces(inputs: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Yield the appends in order, in groups to compress together."""
    start, size = 0, 0
    for end, body in enumerate(inputs, 1):
        size += len(body)
        if size >= _PACKED_TOGETHER or end == len(inputs):
            yield inputs[start:end]
            start, size = end, 0


def _packed(inputs: Sequence[bytes]) -> bytes:
    """Return the inputs as compressed session frames.

    Compressing a byte of JSON costs 1 ns and saves several in sending and receiving it.
    """
    return b"".join(
        encode_frame(body, Compression.ZSTD, zstd_level=ZSTD_LEVEL_FAST) for body in inputs
    )


def _as_transport_error(error: Exception) -> Exception:
    """Return the SDK's error for a session that ended unanswered, and other errors unchanged."""
    sdk_error = error
    if isinstance(error, TimeoutError):
        sdk_error = ReadTimeoutError("no acknowledgement in time")
    elif isinstance(error, StopAsyncIteration):
        sdk_error = TransportError("the server ended the session")
    return sdk_error
