"""Sessions and reads with as little work for the client as can be: blocking sockets, prebuilt bytes."""

from __future__ import annotations

import socket
import struct
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import HTTPConnection
from types import TracebackType

from tests.server.frames import append_frame, frames_in

from bench.store import BASIN
from streamfold.model.records import BATCH_RECORDS_MAX

#: Seconds without a byte, after which a measurement fails instead of hanging.
_TIMEOUT = 60
#: Bytes that a read takes from the socket at most.
_BUFFER = 1 << 20


class AppendSession:
    """A session over HTTP/1.1. A thread takes the acks, so that none can hold up the server."""

    def __init__(self, port: int, stream: str) -> None:
        self._connection = _connect(port)
        self._connection.putrequest("POST", _path(stream))
        self._connection.putheader("s2-basin", BASIN)
        self._connection.putheader("content-type", "s2s/proto")
        self._connection.putheader("transfer-encoding", "chunked")
        self._connection.endheaders()
        self._pool = ThreadPoolExecutor(1)
        self._answer: Future[bytes] = self._pool.submit(self._read_answer)

    def __enter__(self) -> AppendSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        if kind is not None:
            self._connection.sock.close()
        self._pool.shutdown()
        self._connection.close()

    def send(self, chunk: bytes) -> None:
        """Send what `chunk_of` made, as fast as the server takes it."""
        self._connection.sock.sendall(chunk)

    def finish(self) -> int:
        """End the session; returns how many batches were acknowledged, all of them durable."""
        self.send(b"0\r\n\r\n")
        frames = frames_in(self._answer.result())
        if frames and frames[-1].terminal:
            raise RuntimeError(f"the session failed: {frames[-1].failure()}")
        return len(frames)

    def _read_answer(self) -> bytes:
        answer = self._connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"the session was refused with {answer.status}: {body!r}")
        return body


def chunk_of(*bodies: bytes) -> bytes:
    """A batch of records, as a frame in a chunk."""
    frame = append_frame(*bodies)
    return b"%x\r\n%b\r\n" % (len(frame), frame)


def append_all(port: int, stream: str, chunk: bytes, batches: int) -> None:
    """Append the same batch again and again in one session, and wait for all acks."""
    with AppendSession(port, stream) as session:
        for _ in range(batches):
            session.send(chunk)
        acked = session.finish()
    if acked != batches:
        raise RuntimeError(f"{acked} of {batches} batches were acknowledged")


def read_session(port: int, stream: str, records: int) -> int:
    """Read so many records in one s2s session; returns the bytes of its frames."""
    connection = _connect(port)
    path = f"{_path(stream)}?seq_num=0&count={records}"
    try:
        return _get(connection, path, {"content-type": "s2s/proto"}, bytearray(_BUFFER))
    finally:
        connection.close()


def read_batches(port: int, stream: str, records: int) -> int:
    """Read so many records by one protobuf request after the other; returns the bytes of all."""
    connection = _connect(port)
    size, buffer = 0, bytearray(_BUFFER)
    headers = {"accept": "application/protobuf"}
    try:
        for start in range(0, records, BATCH_RECORDS_MAX):
            path = f"{_path(stream)}?seq_num={start}&count={BATCH_RECORDS_MAX}"
            size += _get(connection, path, headers, buffer)
    finally:
        connection.close()
    return size


def _get(connection: HTTPConnection, path: str, headers: dict[str, str], buffer: bytearray) -> int:
    connection.request("GET", path, headers={"s2-basin": BASIN, **headers})
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(f"{path} was refused with {answer.status}: {answer.read()!r}")
    size = 0
    while received := answer.readinto(buffer):
        size += received
    return size


def _connect(port: int) -> HTTPConnection:
    """A connection whose timeouts are the kernel's: Python's would wake it for every free byte."""
    connection = HTTPConnection("127.0.0.1", port)
    connection.connect()
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        connection.sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", _TIMEOUT, 0))
    return connection


def _path(stream: str) -> str:
    return f"/v1/streams/{stream}/records"
