"""Servers that cannot be reached without a refusal: connections hang, or nothing is ever answered."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

#: Connections that fill the backlog of a socket that listens with none: Linux admits one more.
_BACKLOG = 2


@contextmanager
def silent_server() -> Iterator[socket.socket]:
    """A socket whose connections are established, and on which nothing is ever read or sent."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listening:
        listening.setblocking(False)
        yield listening


@contextmanager
def dropping_server() -> Iterator[socket.socket]:
    """A socket that drops the packets of new clients, as a firewall does: its backlog is full."""
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(_BACKLOG):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listening.getsockname())
        yield listening


def address(listening: socket.socket) -> str:
    """Where it listens, as clients write it."""
    host, port = listening.getsockname()
    return f"http://{host}:{port}"


def connections(listening: socket.socket) -> int:
    """How many connections have been made so far; each is counted once."""
    found = 0
    while True:
        try:
            listening.accept()[0].close()
        except BlockingIOError:
            return found
        found += 1


class Proxy:
    """Forwards connections to a server until it is to be silent; then it accepts them, and no more."""

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._server = host, int(port)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._silent = threading.Event()
        self._silencing: bytes | None = None
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    @property
    def url(self) -> str:
        return address(self._listening)

    @property
    def is_silent(self) -> bool:
        return self._silent.is_set()

    def silence(self, request: bytes = b"") -> None:
        """Forward nothing more, from the next request on that contains these bytes, or from now on."""
        self._silencing = request
        if not request:
            self._silent.set()

    def speak(self) -> None:
        """Forward new connections again; those that were met with silence get nothing any more."""
        self._silencing = None
        self._silent.clear()

    def __enter__(self) -> Proxy:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        for opened in (self._listening, *self._open):
            with contextlib.suppress(OSError):  # the other side was faster
                opened.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for opened in (self._listening, *self._open):
            opened.close()

    def _start(self, target: Callable[..., None], *args: object) -> None:
        self._threads.append(threading.Thread(target=target, args=args))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the proxy ends
            while True:
                client, _ = self._listening.accept()
                server = socket.create_connection(self._server)
                self._open += [client, server]
                self._start(self._forward, client, server, True)
                self._start(self._forward, server, client, False)

    def _forward(self, source: socket.socket, target: socket.socket, requests: bool) -> None:
        with contextlib.suppress(OSError):  # one side has left
            while data := source.recv(65_536):
                if requests and self._silencing is not None and self._silencing in data:
                    self._silent.set()
                if self.is_silent:
                    return
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
