"""Reserves ports for servers that start later or restart."""

from __future__ import annotations

import random
import socket

#: Below those that systems assign themselves, to connections and to programs that ask for any port:
#: such a port could be taken before its server is up.
_PORTS = range(10_000, 32_768)


def free_port() -> int:
    """An unused port of this machine."""
    chance = random.SystemRandom()  # processes of a test run must not try the same ones
    while True:
        port = chance.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
