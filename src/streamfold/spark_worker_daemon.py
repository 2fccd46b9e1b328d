"""PySpark's worker daemon without a traceback for each worker that Spark drops.

Spark closes the connection of a worker whose remaining rows it does not need, as `show` and `limit` do,
or that was idle for a minute. PySpark's daemon then prints a `BrokenPipeError` (upstream defect 11). A
failure of the user's code is not affected: the worker reports it to Spark.

Outside `streamfold.spark`, because a process that forks must not import what starts threads.
"""

from __future__ import annotations

import socket

from pyspark import daemon

_serve = daemon.worker


def worker(connection: socket.socket, authenticated: bool) -> int:
    """Serve one task and return the worker's exit status, even if Spark has disconnected."""
    try:
        status: int = _serve(connection, authenticated)
    except (BrokenPipeError, ConnectionResetError):
        return 1
    return status


if __name__ == "__main__":
    daemon.worker = worker
    daemon.manager()
