"""One append session of full batches, flat out or at a steady rate, with the latency of every ack."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from urllib.parse import urlsplit

import numpy as np

from bench.bodies import noise
from bench.figures import Latencies
from bench.sessions import chunk_of
from bench.store import BASIN, MIB
from streamfold.model.records import BATCH_RECORDS_MAX
from streamfold.wire.s2.frames import FrameDecoder

#: Bytes that may be on their way at once: what S2's own clients allow by default.
WINDOW = 5 * MIB
#: Bytes of a record beside its body, as S2 meters it.
OVERHEAD = 8
#: Seconds without an ack, after which a measurement fails instead of hanging.
_TIMEOUT = 60.0
_BUFFER = 64 << 10


@dataclass(frozen=True, slots=True)
class Bulk:
    """What to send: records of `body` bytes of some content, for so many seconds, at most `rate` bytes
    per second.
    """

    body: int
    seconds: float
    rate: float | None = None
    content: Callable[[int, int], bytes] = noise

    @property
    def records(self) -> int:
        """Records in a batch: as many as the protocol allows, or a tenth of a second at this rate."""
        most = min(BATCH_RECORDS_MAX, MIB // (self.body + OVERHEAD))
        return (
            most if self.rate is None else min(most, int(self.rate / 100 / (self.body + OVERHEAD)))
        )

    @property
    def batch(self) -> int:
        """Metered bytes of a batch."""
        return self.records * (self.body + OVERHEAD)


@dataclass(slots=True)
class Acked:
    """What was acknowledged; latencies in nanoseconds, from the first byte sent to the ack."""

    records: int = 0
    metered: int = 0
    seconds: float = 0.0
    latencies: Latencies = field(default_factory=lambda: np.zeros(0, np.int64))


def append(url: str, stream: str, bulk: Bulk) -> Acked:
    """Run the session to its end; every batch that was sent must be acknowledged."""
    session = _Session(url, stream, max(1, WINDOW // bulk.batch))
    chunk = chunk_of(*[bulk.content(bulk.body, number) for number in range(bulk.records)])
    began = time.perf_counter()
    sent, due = 0, began
    while (now := time.perf_counter()) < began + bulk.seconds:
        if bulk.rate is not None:
            due += bulk.batch / bulk.rate
            time.sleep(max(0.0, due - now))
        session.send(chunk)
        sent += 1
    latencies = session.finish()
    if len(latencies) != sent:
        raise RuntimeError(f"{len(latencies)} of {sent} batches were acknowledged")
    seconds = time.perf_counter() - began
    return Acked(sent * bulk.records, sent * bulk.batch, seconds, latencies)


class _Session:
    """Sends in the calling thread; a second thread takes the acks, and their times."""

    def __init__(self, url: str, stream: str, window: int) -> None:
        self._room = threading.Semaphore(window)
        self._sent: deque[int] = deque()
        self._latencies: list[int] = []
        self._failure: Exception | None = None
        self._connection = HTTPConnection(urlsplit(url).netloc)
        self._connection.connect()
        self._connection.putrequest("POST", f"/v1/streams/{stream}/records")
        for name, value in (
            ("s2-basin", BASIN),
            ("content-type", "s2s/proto"),
            ("accept", "application/protobuf"),
            ("transfer-encoding", "chunked"),
        ):
            self._connection.putheader(name, value)
        self._connection.endheaders()
        self._acks = threading.Thread(target=self._take_acks)
        self._acks.start()

    def send(self, chunk: bytes) -> None:
        if not self._room.acquire(timeout=_TIMEOUT) or self._failure:
            raise RuntimeError(f"no ack within {_TIMEOUT:.0f} s") from self._failure
        self._sent.append(time.perf_counter_ns())
        self._connection.sock.sendall(chunk)

    def finish(self) -> Latencies:
        """End the session, and wait for its last ack."""
        self._connection.sock.sendall(b"0\r\n\r\n")
        self._acks.join(_TIMEOUT)
        self._connection.close()
        if self._failure:
            raise self._failure
        return np.array(self._latencies, np.int64)

    def _take_acks(self) -> None:
        try:
            answer = self._connection.getresponse()
            if answer.status != 200:
                raise RuntimeError(
                    f"the session was refused with {answer.status}: {answer.read()!r}"
                )
            self._take_frames(answer)
        except Exception as failure:  # raised again in the sending thread
            self._failure = failure
            self._room.release()

    def _take_frames(self, answer: HTTPResponse) -> None:
        decoder = FrameDecoder()
        while received := answer.read1(_BUFFER):
            decoder.feed(received)
            while (frame := decoder.next_frame()) is not None:
                if frame.terminal:
                    raise RuntimeError(f"the session failed: {frame.failure()}")
                self._latencies.append(time.perf_counter_ns() - self._sent.popleft())
                self._room.release()
