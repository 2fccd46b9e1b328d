"""Servers that cannot be reached without a refusal: connections hang, or nothing is ever answered."""

from __future__ import annotations

import socket
from collections.abc import Iterator
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
    """A socket that drops the packets of whoever connects, as a firewall does: its backlog is full."""
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
