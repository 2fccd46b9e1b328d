"""An S3 server that goes away and comes back at the same address, with everything it held."""

from __future__ import annotations

import logging

from tests.ports import free_port
from tests.s3 import S3Server, new_moto_server, s3_client


class RestartableS3:
    """A server on a port of its own; what it holds is in this process and outlives its sockets."""

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.WARNING)
        self._port = free_port()
        self._server = new_moto_server(self._port)

    def __enter__(self) -> RestartableS3:
        self._server.start()
        s3_client(self._known()).create_bucket(Bucket=self._known().bucket)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._server.stop()

    def start(self) -> None:
        self._server = new_moto_server(self._port)
        self._server.start()

    @property
    def options(self) -> dict[str, str]:
        return self._known().options()

    def url(self, folder: str) -> str:
        return f"s3://{self._known().bucket}/{folder}"

    def _known(self) -> S3Server:
        return S3Server(f"http://127.0.0.1:{self._port}")
