"""Leases of a stream's log, held while a caller reads or changes the stream."""

from __future__ import annotations

from streamfold.store.log.stream_log import StreamLog


class LogLease:
    """Keeps a log in memory until released, so that a stream never has two."""

    __slots__ = ("log",)

    def __init__(self, log: StreamLog) -> None:
        self.log = log
        log.leases += 1

    def release(self) -> None:
        """Release the lease. Call this once, or use the lease as a context."""
        self.log.leases -= 1

    def __enter__(self) -> StreamLog:
        return self.log

    def __exit__(self, *_: object) -> None:
        self.release()
