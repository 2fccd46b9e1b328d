"""An S3 server that looks at who calls: it knows keys, and the one region of its buckets."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from moto.moto_server.werkzeug_app import create_backend_app
from werkzeug.serving import make_server

from tests.s3 import OneAtATime, S3Server, s3_client

_SCOPE = re.compile(r"Credential=([^/]+)/\d+/([^/]+)/s3/")


@dataclass
class Gate:
    """Refuses requests as AWS does: unknown keys with 403, another region with 301 and no way there."""

    endpoint: str = ""
    region: str = "eu-central-1"
    #: A name of its own: the servers of one process share their buckets.
    bucket: str = field(default_factory=lambda: f"streamfold-{uuid.uuid4().hex[:12]}")
    #: Keys that are accepted, and those that have been used.
    keys: set[str] = field(default_factory=set)
    used: list[str] = field(default_factory=list)
    #: moto's own services, those of STS and others, which take any key.
    _app: Any = field(default_factory=lambda: OneAtATime(create_backend_app))

    def server(self, key: str) -> S3Server:
        """The same server for a client with this key."""
        return S3Server(self.endpoint, self.bucket, key, "secret-of-a-test", self.region)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        signed = _SCOPE.search(environ.get("HTTP_AUTHORIZATION", ""))
        if signed is not None:
            key, region = signed.groups()
            if key not in self.keys:
                return _refuse(start_response, "403 Forbidden", "InvalidAccessKeyId")
            if region != self.region:
                return _refuse(start_response, "301 Moved Permanently", "PermanentRedirect")
            self.used.append(key)
        answer: Iterable[bytes] = self._app(environ, start_response)
        return answer


def _refuse(start_response: Any, status: str, code: str) -> list[bytes]:
    start_response(status, [("Content-Type", "application/xml")])
    return [f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()]


@contextmanager
def run_gate(*keys: str) -> Iterator[Gate]:
    """Run a server with an empty bucket that knows these keys."""
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # one line per request otherwise
    gate = Gate(keys={*keys, "MAKER"})
    server = make_server("127.0.0.1", 0, gate, threaded=True)
    gate.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        s3_client(gate.server("MAKER")).create_bucket(
            Bucket=gate.bucket, CreateBucketConfiguration={"LocationConstraint": gate.region}
        )
        gate.used.clear()
        yield gate
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def prepare_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make `home` the folder of a user for whom no AWS tool is set up."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_METADATA_SERVICE_TIMEOUT", "60")  # a second if not set, and one attempt
    (home / ".aws").mkdir()
    return home


def issued(key: str, lifetime: timedelta = timedelta(hours=1)) -> dict[str, str]:
    """Credentials as a service gives them."""
    ends = (datetime.now(UTC) + lifetime).isoformat(timespec="seconds").replace("+00:00", "Z")
    return {
        "AccessKeyId": key,
        "SecretAccessKey": "secret-of-a-test",
        "Token": "token-of-a-test",
        "SessionToken": "token-of-a-test",
        "Expiration": ends,
    }
