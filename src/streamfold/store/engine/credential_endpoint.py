"""Hands fresh AWS credentials to SlateDB, which takes no function but asks a container's endpoint.

SlateDB's object store knows how a container gets its credentials: by HTTP, with a token from a file,
and again five minutes before they expire. So this is such an endpoint, for this process alone: it
listens on the loopback interface, and its token is in a file that only this user can read. A role or an
SSO session is thus renewed while the store stays open, and no commit notices.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from streamfold.errors import StreamfoldError

if TYPE_CHECKING:  # exists only in obstore's stubs
    from obstore.store import S3Credential

#: Seconds that a connection may take over its request: nobody but SlateDB has one.
_REQUEST_TIMEOUT = 10

logger = logging.getLogger(__name__)


class CredentialEndpoint:
    """Answers on a port of the loopback interface until it is closed, or this process ends."""

    def __init__(self, credentials: Callable[[], S3Credential]) -> None:
        token = secrets.token_urlsafe(32)
        folder = Path(tempfile.mkdtemp(prefix="streamfold-"))  # for this user's eyes only
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
        """Stop answering; the token is removed."""
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
                logger.warning("storage gets no credentials: %s", error)
                self._answer(503, b"{}")

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            """Say nothing of requests."""

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
