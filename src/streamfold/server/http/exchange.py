"""The seam below `Request`: one request and its answer, as the door has them, or a simulated one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol, TypeAlias

from streamfold.server.http.connections import Connection
from streamfold.server.http.headers import Headers

Buffer: TypeAlias = bytes | memoryview


class Exchange(Protocol):
    """One request and its answer. All methods are called in the event loop of the server."""

    connection: Connection
    method: str
    #: "http" or "https".
    scheme: str
    #: As the client wrote it, still percent-encoded.
    raw_path: bytes
    raw_query: bytes
    #: "1.0", "1.1" or "2".
    http_version: str
    #: By name in lower case; the last value where there are several.
    headers: Mapping[bytes, bytes]
    #: Names that came more than once.
    repeated: Collection[bytes]
    #: The whole body, if it came with the head; None if `piece` returns it.
    body: bytes | None

    async def piece(self) -> bytes:
        """Return the next piece of the body; empty at its end. ClientHangupError if it breaks off.

        The client may send a little ahead of the first call, and of what was returned.
        """

    def discard_body(self) -> None:
        """Throw away what is left of the body, as it arrives."""

    async def gone(self) -> None:
        """Return once the client has hung up."""

    def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """Answer with a whole body."""

    def start(self, status: int, headers: Headers) -> None:
        """Begin an answer whose body follows by `send`."""

    def send(self, data: Buffer) -> None:
        """Send a part of the body; the client takes it when it likes."""

    def end(self) -> None:
        """End the body. Without this, the client sees it break off."""

    @property
    def delivered(self) -> int:
        """Bytes of the body that the client has taken, as far as this process can see."""

    async def unread(self, at_most: int) -> None:
        """Return when the client has taken all that was sent, except this many bytes.

        What it will never take, because it has gone, counts as taken.
        """

    def close(self) -> None:
        """The server is done with the request: an answer that has not ended breaks off."""
