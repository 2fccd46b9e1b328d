"""A real S3 server on a real port for tests, in this process."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

import boto3
from moto.moto_server import threaded_moto_server
from moto.moto_server.werkzeug_app import DomainDispatcherApplication
from moto.server import ThreadedMotoServer


class OneAtATime(DomainDispatcherApplication):  # type: ignore[misc]  # moto has no types
    """moto checks the condition of a write, and then writes: without this, threads come in between
    (upstream defect 13).
    """

    _lock = Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        with self._lock:
            answer: Iterable[bytes] = super().__call__(environ, start_response)
        return answer


def new_moto_server(port: int = 0) -> ThreadedMotoServer:
    """A server of AWS's services whose conditional writes are atomic, as AWS's are."""
    threaded_moto_server.DomainDispatcherApplication = OneAtATime
    return ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)


@dataclass(frozen=True, slots=True)
class S3Server:
    """Where the server listens, what it accepts, and a bucket that exists."""

    endpoint: str
    bucket: str = "streamfold-tests"
    access_key_id: str = "AKIATESTTESTTESTTEST"
    secret_access_key: str = "test-secret-key"
    region: str = "us-east-1"

    def options(self) -> dict[str, str]:
        """Return the options that `open_blob_store` takes."""
        return {
            "endpoint": self.endpoint,
            "access_key_id": self.access_key_id,
            "secret_access_key": self.secret_access_key,
            "region": self.region,
        }

    def environment(self) -> dict[str, str]:
        """Return the same as AWS variables."""
        return {
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key_id,
            "AWS_SECRET_ACCESS_KEY": self.secret_access_key,
            "AWS_REGION": self.region,
        }


@contextmanager
def run_s3_server() -> Iterator[S3Server]:
    """Run a server with an empty bucket until the block ends; tests use the fixture `s3_server`."""
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # one line per request otherwise
    process = new_moto_server()
    process.start()
    try:
        host, port = process.get_host_and_port()
        server = S3Server(f"http://{host}:{port}")
        s3_client(server).create_bucket(Bucket=server.bucket)
        yield server
    finally:
        process.stop()


def s3_client(server: S3Server):  # type: ignore[no-untyped-def]  # boto3 has no types
    """Return a boto3 client, for looking at the bucket from outside."""
    return boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=server.access_key_id,
        aws_secret_access_key=server.secret_access_key,
        region_name=server.region,
    )
