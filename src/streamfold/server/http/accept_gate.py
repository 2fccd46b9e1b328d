"""Bounds the connections of a TLS listener, from the moment that they are accepted.

granian counts a connection only after its TLS handshake (upstream defect 8). Handshakes that never end
could therefore take all descriptors, and once none is left, granian neither ends them nor accepts
others. So the kernel stops first: while too many descriptors are open, a filter on the listening socket
drops all packets. Clients send theirs again after a second, and connect once the filter is gone.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import struct
import sys
from threading import Event, Thread
from typing import Final

from streamfold.server.http.connections import DESCRIPTORS

if sys.platform != "win32":
    import resource

logger = logging.getLogger(__name__)

#: Connections per second that are assumed to come at most.
_ACCEPTED_PER_SECOND: Final = 50_000
#: Seconds between two counts: as long as these need to use up what is left, within these bounds.
_COUNT_INTERVAL: Final = (0.001, 0.1)

#: Options of Linux that Python has no names for.
_SO_ATTACH_FILTER: Final = 26
_SO_DETACH_FILTER: Final = 27
#: `struct sock_filter`: BPF_RET with 0, which drops the packet.
_DROP_ALL: Final = struct.pack("HBBI", 0x06, 0, 0, 0)


class AcceptGate:
    """Keeps new connections out while the process has `most` more descriptors open than at the start.

    It counts in a thread, since the event loop may be busy for longer than an attack takes. If an
    attack takes all descriptors nevertheless, the gate releases `spare` ones that it kept. They must
    suffice for all connections that wait to be accepted: only then granian looks at its handshakes.

    On systems other than Linux it does nothing.
    """

    def __init__(self, listening: socket.socket, most: int, spare: int) -> None:
        self._socket = listening
        self._most = most
        self._spare_count = spare
        self._spare: list[int] = []
        self._closed = False
        self._stopping = Event()
        self._thread: Thread | None = None

    def start(self) -> None:
        if sys.platform == "linux":
            self._thread = Thread(target=self._run, name="accept-gate", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop counting, and close the socket."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        most = _count_descriptors(0) + self._most
        pause, failing = 0.0, False
        while not self._stopping.wait(pause):
            try:
                pause = self._adjust(most)
                failing = False
            except Exception:
                # Without this thread nothing bounds handshakes, so it survives any failure.
                if not failing:
                    logger.exception("cannot count the connections that are accepted; retrying")
                pause, failing = _COUNT_INTERVAL[1], True
        self._give_spare()

    def _adjust(self, most: int) -> float:
        """Open or close the gate; returns the seconds until the next count."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        count = _count_descriptors(limit)
        used = count - len(self._spare)
        # There must be room for the spare ones, too: those that were released are taken back first.
        closed = used >= min(most, limit - self._spare_count)
        if closed != self._closed:
            self._set_filter(closed)
            self._closed = closed
        if count >= limit:
            self._give_spare()
        elif not closed:
            self._take_spare()
        shortest, longest = _COUNT_INTERVAL
        return max(shortest, min(longest, (limit - count) / _ACCEPTED_PER_SECOND))

    def _take_spare(self) -> None:
        while len(self._spare) < self._spare_count:
            self._spare.append(os.dup(self._socket.fileno()))

    def _give_spare(self) -> None:
        while self._spare:
            os.close(self._spare.pop())

    def _set_filter(self, closed: bool) -> None:
        if closed:
            program = ctypes.create_string_buffer(_DROP_ALL)
            filter_program = struct.pack("HP", 1, ctypes.addressof(program))
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter_program)
        else:
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def _count_descriptors(most: int) -> int:
    """How many descriptors the process has open; `most` if it has none left to count them with."""
    # Linux has the number here from 6.2 on, and 0 before.
    if count := os.stat(DESCRIPTORS).st_size:  # noqa: PTH116 - many times per second
        return count
    try:
        return len(os.listdir(DESCRIPTORS))  # noqa: PTH208 - likewise
    except OSError:
        return most
