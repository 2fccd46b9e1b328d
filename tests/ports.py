"""Ports for servers that start later, or again: nobody else takes them in between."""

from __future__ import annotations

import random
import socket

#: Below those that systems hand out themselves, to connections and to whoever asks for any port: such a
#: one could be gone before its server is up.
_PORTS = range(10_000, 32_768)


def free_port() -> int:
    """A port of this machine that nobody uses."""
    chance = random.SystemRandom()  # processes of a test run must not try the same ones
    while True:
        port = chance.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
