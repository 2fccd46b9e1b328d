"""PySpark's worker daemon, without a traceback for each worker that Spark drops.

Spark closes the connection to a worker that was idle for a minute, or whose remaining rows it does
not need, as with `show` and `limit`. PySpark's daemon then prints a `BrokenPipeError` (upstream
defect 11). Failures of the user's code are unaffected: the worker reports them to Spark.

Kept outside `streamfold.spark`, because a process that forks must not import anything that starts
threads.
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
