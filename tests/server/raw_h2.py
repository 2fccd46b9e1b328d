"""A minimal HTTP/2 client that sends exactly the frames of a test and reads only on request."""

from __future__ import annotations

import asyncio
import ssl
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import h2.config
import h2.connection
import h2.events
import h2.settings

Header = tuple[str, str]
#: Bytes of the head of a frame, and a type of frames.
_HEAD, _GOAWAY = 9, 7


@dataclass
class Answer:
    """What has come for one stream so far."""

    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    ended: bool = False
    reset: int | None = None

    @property
    def status(self) -> int:
        return int(self.headers[":status"])

    @property
    def over(self) -> bool:
        return self.ended or self.reset is not None


class H2Client:
    """One connection with prior knowledge, or over TLS."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        give_credit: bool,
        window: int | None,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._give_credit = give_credit
        self._h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        self._h2.initiate_connection()
        if window is not None:
            self._h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window})
        #: The beginning of a frame.
        self._unread = bytearray()
        self._answers: defaultdict[int, Answer] = defaultdict(Answer)
        self._news = asyncio.Condition()
        self.goaway = False
        #: Set when the server has closed the connection.
        self.closed = asyncio.Event()

    async def run(self) -> None:
        self._flush()
        try:
            while data := await self._reader.read(1 << 16):
                self._unread += data
                self._take_frames()
                self._flush()
                async with self._news:
                    self._news.notify_all()
        finally:
            self.closed.set()
            async with self._news:
                self._news.notify_all()

    def _take_frames(self) -> None:
        """Take whole frames. Hides GOAWAY from h2, which refuses everything after it.

        A stopping server may send answers and a PING after it (upstream defect 29).
        """
        while len(self._unread) >= (size := _HEAD + int.from_bytes(self._unread[:3], "big")):
            frame = bytes(self._unread[:size])
            del self._unread[:size]
            if frame[3] == _GOAWAY:
                self.goaway = True
                continue
            for event in self._h2.receive_data(frame):
                self._note(event)

    def _note(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.ResponseReceived():
                pairs = ((_text(name), _text(value)) for name, value in event.headers or ())
                self._answers[event.stream_id or 0].headers.update(pairs)
            case h2.events.DataReceived():
                self._answers[event.stream_id or 0].body += event.data or b""
                if self._give_credit:
                    length = event.flow_controlled_length or 0
                    self._h2.acknowledge_received_data(length, event.stream_id or 0)
            case h2.events.StreamEnded():
                self._answers[event.stream_id or 0].ended = True
            case h2.events.StreamReset():
                self._answers[event.stream_id or 0].reset = int(event.error_code or 0)
            case _:
                pass

    def open(
        self,
        method: str,
        path: str,
        headers: Sequence[Header] = (),
        *,
        end: bool = False,
        flush: bool = True,
    ) -> int:
        """Send the head of a request; without `flush`, together with what is sent next."""
        stream_id = self._h2.get_next_available_stream_id()
        pseudo = [
            (":method", method),
            (":scheme", "http"),
            (":authority", "localhost"),
            (":path", path),
        ]
        self._h2.send_headers(stream_id, [*pseudo, *headers], end_stream=end)
        if flush:
            self._flush()
        return stream_id

    async def ask(self, method: str, path: str, headers: Sequence[Header], body: bytes) -> int:
        """Send a small request in one write: no pause comes between its head and its body."""
        while self._h2.outbound_flow_control_window < len(body):
            await self._wait()
        stream_id = self.open(method, path, headers, flush=False)
        self._h2.send_data(stream_id, body, end_stream=True)
        self._flush()
        return stream_id

    async def send(self, stream_id: int, data: bytes, *, end: bool = False) -> None:
        """Send part of a body, as fast as the server lets us and until it has answered."""
        while not self._answers[stream_id].over:
            room = min(
                self._h2.local_flow_control_window(stream_id), self._h2.max_outbound_frame_size
            )
            piece, data = data[:room], data[room:]
            if piece or not data:
                self._h2.send_data(stream_id, piece, end_stream=end and not data)
                self._flush()
            if not data:
                return
            if room == 0:
                await self._wait()

    def window(self, stream_id: int) -> int:
        """Bytes that the server would still take for this request."""
        return self._h2.local_flow_control_window(stream_id)

    def take(self, stream_id: int, size: int) -> None:
        """Let so many more bytes of an answer come."""
        self._h2.increment_flow_control_window(size, stream_id)
        self._h2.increment_flow_control_window(size)
        self._flush()

    def reset(self, stream_id: int) -> None:
        self._h2.reset_stream(stream_id)
        self._flush()

    def answer(self, stream_id: int) -> Answer:
        return self._answers[stream_id]

    async def head(self, stream_id: int) -> Answer:
        """Wait for status and headers."""
        answer = self._answers[stream_id]
        while not answer.headers and answer.reset is None:
            await self._wait()
        return answer

    async def body_of(self, stream_id: int, size: int) -> bytes:
        """Wait until so many bytes of the body have come, or it is over."""
        answer = self._answers[stream_id]
        while len(answer.body) < size and not answer.over:
            await self._wait()
        return bytes(answer.body)

    async def whole(self, stream_id: int) -> Answer:
        """Wait until the answer is over."""
        answer = self._answers[stream_id]
        while not answer.over:
            await self._wait()
        return answer

    async def exchange(
        self, method: str, path: str, headers: Sequence[Header] = (), body: bytes | None = None
    ) -> Answer:
        """A request and its whole answer."""
        stream_id = self.open(method, path, headers, end=body is None)
        if body is not None:
            await self.send(stream_id, body, end=True)
        return await self.whole(stream_id)

    async def _wait(self) -> None:
        if self.closed.is_set():
            raise ConnectionError("the server has closed the connection")
        async with asyncio.timeout(60), self._news:
            await self._news.wait()

    def _flush(self) -> None:
        if data := self._h2.data_to_send():
            self._writer.write(data)


@asynccontextmanager
async def h2_client(
    port: int,
    *,
    tls: ssl.SSLContext | None = None,
    give_credit: bool = True,
    window: int | None = None,
    source: str = "127.0.0.1",
) -> AsyncIterator[H2Client]:
    """A connection; without credit it takes no more than its window of any answer."""
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=tls, local_addr=(source, 0)
    )
    client = H2Client(reader, writer, give_credit=give_credit, window=window)
    running = asyncio.create_task(client.run())
    try:
        yield client
    finally:
        running.cancel()
        writer.close()
        await asyncio.gather(running, writer.wait_closed(), return_exceptions=True)


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
