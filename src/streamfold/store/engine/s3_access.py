"""How a store reaches S3: one endpoint, region and identity, for SlateDB and for blobs alike."""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from slatedb.uniffi._slatedb_uniffi import slatedb as binding

from streamfold.blob import BlobStore, open_blob_store
from streamfold.blob.aws_identity import AwsIdentity, find_identity
from streamfold.errors import StreamfoldError

if TYPE_CHECKING:
    from obstore.store import S3Credential

#: Seconds that a connection may take for its request; only SlateDB connects.
_REQUEST_TIMEOUT = 10

logger = logging.getLogger(__name__)


class CredentialEndpoint:
    """Serves credentials on the loopback interface until it is closed or this process ends."""

    def __init__(self, credentials: Callable[[], S3Credential]) -> None:
        token = secrets.token_urlsafe(32)
        folder = Path(tempfile.mkdtemp(prefix="streamfold-"))  # readable for this user only
        self._token_file = folder / "token"
        self._token_file.write_text(token)
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(credentials, token))
        server.daemon_threads = True
        self._url = f"http://127.0.0.1:{server.server_port}/credentials"
        threading.Thread(target=server.serve_forever, daemon=True, name="aws-credentials").start()
        self._finalizer = weakref.finalize(self, _stop, server, folder)

    def config(self) -> dict[str, str]:
        """Return the settings of SlateDB's object store."""
        return {
            "container_credentials_full_uri": self._url,
            "container_authorization_token_file": str(self._token_file),
        }

    def close(self) -> None:
        """Stop serving and remove the token."""
        self._finalizer()


def _stop(server: ThreadingHTTPServer, folder: Path) -> None:
    server.shutdown()
    server.server_close()
    shutil.rmtree(folder, ignore_errors=True)


def _handler(credentials: Callable[[], S3Credential], token: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _REQUEST_TIMEOUT

        def do_GET(self) -> None:  # the name that http.server calls
            given = self.headers.get("Authorization", "")
            if not hmac.compare_digest(given.encode(), token.encode()):
                self._answer(403, b"{}")
                return
            try:
                self._answer(200, _encoded(credentials()))
            except StreamfoldError as error:
                logger.warning("cannot get credentials for storage: %s", error)
                self._answer(503, b"{}")

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            """Log no requests."""

    return Handler


def _encoded(credential: S3Credential) -> bytes:
    expires = credential["expires_at"] or datetime.max.replace(tzinfo=UTC)
    return msgspec.json.encode(
        {
            "AccessKeyId": credential["access_key_id"],
            "SecretAccessKey": credential["secret_access_key"],
            "Token": credential.get("token") or "",
            "Expiration": expires.astimezone(UTC),
        }
    )


#: Variables by the name of the setting, which SlateDB and obstore share; the first one set wins.
_ADDRESS = {
    "region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
    "endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
}
_CREDENTIALS = {
    "access_key_id": ("AWS_ACCESS_KEY_ID",),
    "secret_access_key": ("AWS_SECRET_ACCESS_KEY",),
    "session_token": ("AWS_SESSION_TOKEN",),
    "container_credentials_relative_uri": ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",),
    "web_identity_token_file": ("AWS_WEB_IDENTITY_TOKEN_FILE",),
    "role_arn": ("AWS_ROLE_ARN",),
}
#: Limits, in seconds, of the request that checks whether a bucket can be used: two attempts, so that
#: one lost packet is not an error, and no more, so that a person at a terminal gets an answer soon.
_PROBE_LIMITS = {"attempts": "2", "connect_timeout": "3", "request_timeout": "5"}


@dataclass(frozen=True, slots=True)
class S3Access:
    """Settings to reach a bucket; call `close` when nothing uses it any more."""

    #: Settings of SlateDB's object store, and options of a blob store.
    for_database: dict[str, str] = field(repr=False)
    for_blobs: dict[str, Any] = field(repr=False)
    endpoint: CredentialEndpoint | None = None

    def open_database(self, bucket: str) -> Any:
        """Return SlateDB's handle on the bucket."""
        builder = binding.ObjectStoreBuilder(binding.ObjectStoreType.S3)
        for key, value in {"bucket": bucket, **self.for_database}.items():
            builder.with_config(key, value)
        if self.for_database.get("endpoint", "").startswith("http://"):
            builder.with_config("allow_http", "true")
        return builder.build()

    def open_blobs(self, url: str) -> BlobStore:
        """Return the blobs below `url`."""
        return open_blob_store(url, **self.for_blobs)

    def open_probe(self, url: str) -> BlobStore:
        """Return the same blobs, for one check that is answered within seconds."""
        return open_blob_store(url, **self.for_blobs, **_PROBE_LIMITS)

    def close(self) -> None:
        """Stop renewing credentials."""
        if self.endpoint is not None:
            self.endpoint.close()


def find_access(environment: Mapping[str, str] = os.environ) -> S3Access:
    """Return the settings that AWS tools would use; fetches credentials once, to see if they expire."""
    address = _first_set(_ADDRESS, environment)
    identity = find_identity(environment)
    if identity is None:
        settings = address | _first_set(_CREDENTIALS, environment)
        return S3Access(settings, dict(settings))
    found = {"region": identity.region(), "endpoint": identity.endpoint()}
    address = {name: value for name, value in found.items() if value} | address
    endpoint = CredentialEndpoint(identity.credentials) if identity.expires() else None
    keys = _lasting_keys(identity) if endpoint is None else endpoint.config()
    return S3Access(
        address | keys, address | {"credential_provider": identity.credentials}, endpoint
    )


def _lasting_keys(identity: AwsIdentity) -> dict[str, str]:
    found = identity.credentials()
    keys = {
        "access_key_id": found["access_key_id"],
        "secret_access_key": found["secret_access_key"],
    }
    token = found.get("token")
    return keys | ({"session_token": token} if token else {})


def _first_set(
    settings: Mapping[str, tuple[str, ...]], environment: Mapping[str, str]
) -> dict[str, str]:
    found = {
        key: next((environment[name] for name in names if environment.get(name)), None)
        for key, names in settings.items()
    }
    return {key: value for key, value in found.items() if value is not None}
