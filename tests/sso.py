"""AWS's sign-in portal on a real port, and a user of it: a profile, and the token of a login."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import parse_qs, urlsplit

from tests.s3_gate import Gate

#: The access token of a login that the portal accepts.
TOKEN = "token-of-a-login"
_START = "https://company.example/start"
_ROLE = {"sso_account_id": "123456789012", "sso_role_name": "keeper"}
_QUERY = {"account_id": ["123456789012"], "role_name": ["keeper"]}


@dataclass
class Portal:
    """Gives the credentials of one role to callers with the token, and never issues new tokens."""

    endpoint: str = ""
    #: The key that it gives, and requests so far, by path.
    key: str = "SSO"
    asked: list[str] = field(default_factory=list)

    def environment(self) -> dict[str, str]:
        """Variables that have AWS tools ask this portal instead of AWS's."""
        return {"AWS_ENDPOINT_URL_SSO": self.endpoint, "AWS_ENDPOINT_URL_SSO_OIDC": self.endpoint}

    def role_credentials(self) -> dict[str, object]:
        ends = datetime.now(UTC) + timedelta(hours=1)
        return {
            "accessKeyId": self.key,
            "secretAccessKey": "secret-of-a-test",
            "sessionToken": "token-of-a-test",
            "expiration": int(ends.timestamp() * 1000),
        }


@contextmanager
def run_portal() -> Iterator[Portal]:
    """Run a portal until the block ends."""
    portal = Portal()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(portal))
    portal.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield portal
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _handler(portal: Portal) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """GetRoleCredentials."""
            parts = urlsplit(self.path)
            portal.asked.append(parts.path)
            if self.headers["x-amz-sso_bearer_token"] != TOKEN:
                self._answer(401, {"message": "Session token not found"}, "UnauthorizedException")
            elif parts.path == "/federation/credentials" and parse_qs(parts.query) == _QUERY:
                self._answer(200, {"roleCredentials": portal.role_credentials()})
            else:
                self._answer(404, {"message": "no such role"}, "ResourceNotFoundException")

        def do_POST(self) -> None:
            """CreateToken: every refresh token has expired."""
            portal.asked.append(self.path)
            self._answer(400, {"error": "invalid_grant"}, "InvalidGrantException")

        def _answer(self, status: int, body: object, error: str = "") -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            if error:
                self.send_header("x-amzn-ErrorType", error)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            """Nothing."""

    return Handler


def write_profile(home: Path, gate: Gate, *, session: bool) -> None:
    """Write a profile `people`: of an sso-session, or with the start URL in it, as it used to be."""
    role = "".join(f"{name} = {value}\n" for name, value in _ROLE.items())
    portal = f"sso_start_url = {_START}\nsso_region = {gate.region}\n"
    settings = f"region = {gate.region}\nservices = here\n"
    chosen = "sso_session = company\n" if session else portal
    shared = f"[sso-session company]\n{portal}" if session else ""
    (home / ".aws/config").write_text(
        f"[profile people]\n{settings}{role}{chosen}{shared}"
        f"[services here]\ns3 =\n  endpoint_url = {gate.endpoint}\n"
    )


def log_in(home: Path, *, session: bool, token: str = TOKEN, left: timedelta) -> None:
    """Leave what `aws sso login` leaves: a token with so much time left, and the way to renew it."""
    now = datetime.now(UTC)
    login = {
        "startUrl": _START,
        "region": "eu-central-1",
        "accessToken": token,
        "expiresAt": _time(now + left),
        "clientId": "client-of-a-test",
        "clientSecret": "client-secret-of-a-test",
        "refreshToken": "refresh-token-of-a-test",
        "registrationExpiresAt": _time(now + timedelta(days=30)),
    }
    name = hashlib.sha1(("company" if session else _START).encode()).hexdigest()
    cache = home / ".aws/sso/cache"
    cache.mkdir(parents=True, exist_ok=True)
    (cache / f"{name}.json").write_text(json.dumps(login))


def _time(moment: datetime) -> str:
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")
