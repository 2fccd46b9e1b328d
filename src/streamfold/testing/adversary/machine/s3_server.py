"""An in-memory S3 server in a separate process: `python -P s3_server.py BUCKET`. Needs moto."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable
from threading import Event, Lock
from typing import Any


def main() -> None:
    import boto3
    from moto.moto_server import threaded_moto_server
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication
    from moto.server import ThreadedMotoServer

    class OneAtATime(DomainDispatcherApplication):  # type: ignore[misc]  # moto has no types
        """Handles one request at a time, because moto checks a write's condition before it writes.

        Other threads would come in between (upstream defect 13).
        """

        _lock = Lock()

        def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
            with self._lock:
                answer: Iterable[bytes] = super().__call__(environ, start_response)
            return answer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    threaded_moto_server.DomainDispatcherApplication = OneAtATime
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    s3 = boto3.client(
        "s3",
        endpoint_url=f"http://{host}:{port}",
        aws_access_key_id="AKIAADVERSARYADVERSA",
        aws_secret_access_key="secret",  # noqa: S106
        region_name="us-east-1",
    )
    s3.create_bucket(Bucket=sys.argv[1])
    print(json.dumps({"host": host, "port": port}), flush=True)
    Event().wait()


if __name__ == "__main__":
    main()
