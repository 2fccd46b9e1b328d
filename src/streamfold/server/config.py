"""Server configuration, and a self-signed certificate for trying out TLS."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from streamfold.cluster import EXPIRY
from streamfold.errors import InvalidError
from streamfold.model.access_tokens import Secret
from streamfold.server.console import ConsoleSettings
from streamfold.server.http.connections import FIRST_REQUEST, IDLE
from streamfold.server.http.cors import is_loopback, parse_origin
from streamfold.server.http.door import TlsFiles
from streamfold.server.http.request_limits import BODIES_MAX, BODY_TIMEOUT
from streamfold.server.http.response_limits import UNREAD_BYTES_MAX, WRITE_DEADLINE
from streamfold.server.live_reads import HEARTBEAT
from streamfold.store.settings import StoreSettings

#: Default ports of S2's own server, without and with TLS.
PORT, TLS_PORT = 80, 443
#: Wildcard addresses.
_ANY_HOST = ("0.0.0.0", "::")  # noqa: S104
_ALL_ADDRESSES, _THIS_MACHINE = "0.0.0.0", "127.0.0.1"  # noqa: S104


@dataclass(frozen=True, slots=True)
class Configuration:
    """All server settings. By default, records are in memory only."""

    #: memory:, file:///folder or s3://bucket/prefix.
    location: str = "memory:"
    store: StoreSettings = field(default_factory=StoreSettings)
    #: Replace any process that has the store open, by taking over its lock on local disk or its
    #: lease on object storage.
    take_over: bool = False
    #: On object storage, seconds after which another server may claim the store of one that has
    #: disappeared. With 0 there is no lease, and a server takes the store from any other.
    lease_expiry: float = EXPIRY
    #: The server's name, shown to servers that wait for its lease. Default: the host name.
    name: str = ""
    #: On local disk, the damaged log file to drop with all later ones, as named in the error.
    accept_loss: int | None = None
    #: Where to listen. Default: all addresses with a root token, only this machine without.
    host: str | None = None
    #: 0 takes any free port.
    port: int = PORT
    tls: TlsFiles | None = None
    #: Create a self-signed certificate for localhost instead.
    tls_self: bool = False
    #: Allow web pages of this machine, or all pages if a root token is set.
    cors: bool = True
    #: Origins whose pages may also use a server without a root token, or "*" for all.
    cors_origins: tuple[str, ...] = ()
    #: The server's public URL, for links in responses. Default: the request's host.
    public_url: str | None = None
    #: Basins and streams to create on start.
    init_file: Path | None = None
    #: The token with all rights, which also issues access tokens. If unset, no token is required.
    root_token: Secret | None = None
    #: Serve /metrics without a token even if a root token is set.
    open_metrics: bool = False
    access_log: bool = True
    #: The web console, or None.
    console: ConsoleSettings | None = field(default_factory=ConsoleSettings)
    #: Seconds over which a body's speed is measured, and the time limit of a small body.
    body_timeout: float = BODY_TIMEOUT
    #: Bytes of memory for arriving bodies, over all requests.
    body_bytes: int = BODIES_MAX
    #: Maximum open files for arriving snapshots. None: a sixteenth of the process's descriptor limit,
    #: from 16 to 256.
    upload_files: int | None = None
    #: Seconds after which a client that reads nothing is disconnected.
    write_deadline: float = WRITE_DEADLINE
    #: Maximum bytes of unread responses.
    unread_bytes: int = UNREAD_BYTES_MAX
    #: Maximum concurrent requests, including sessions.
    requests: int = 16_384
    #: Seconds that a connection may be idle before its first request, and after later ones.
    first_request: float = FIRST_REQUEST
    idle_connection: float = IDLE
    #: Minimum and maximum seconds between heartbeats of a session at the tail.
    heartbeat: tuple[float, float] = HEARTBEAT
    #: The basin of streams below /v1/stream/.
    default_basin: str = "durable-streams"
    #: Seconds that a Durable Streams long poll waits for new records.
    long_poll: float = 30.0
    #: Allow webhooks to plain HTTP on this machine, for development.
    local_webhooks: bool = False
    #: Maximum seconds for a stop. Sessions are ended after half of them.
    drain_timeout: float = 10.0
    #: Seconds from the last response to the first GOAWAY. It overtakes HTTP/2 responses that wait
    #: for their window, and clients based on Python's h2 then drop them.
    linger: float = 0.1

    def __post_init__(self) -> None:
        if self.tls is not None and self.tls_self:
            raise InvalidError("a certificate and a self-signed one exclude each other: choose one")
        if not 0 <= self.port <= 65535:
            raise InvalidError(f"port {self.port} must be 0 to 65535")
        for origin in self.cors_origins:
            parse_origin(origin)
        if self.public_url is not None:
            _check_public_url(self.public_url)

    @property
    def guarded(self) -> bool:
        """Whether requests need an access token."""
        return self.root_token is not None

    @property
    def listening_host(self) -> str:
        """The address to listen on."""
        return self.host or (_ALL_ADDRESSES if self.guarded else _THIS_MACHINE)

    @property
    def known_hosts(self) -> frozenset[str] | None:
        """Host names by which clients may address the server, or None for all.

        A server for this machine alone accepts only its own names. Otherwise a web page could point its
        name at this address (DNS rebinding) and pass as one of this server's own pages.
        """
        if not is_loopback(self.listening_host):
            return None
        own = urlsplit(self.public_url).hostname if self.public_url else None
        return frozenset(name for name in (own, self.listening_host) if name)

    @property
    def encrypted(self) -> bool:
        """Whether clients connect over TLS."""
        return self.tls is not None or self.tls_self

    def url(self, port: int) -> str:
        """Return the server's URL for clients on this machine."""
        scheme = "https" if self.encrypted else "http"
        listening = self.listening_host
        host = "localhost" if listening in _ANY_HOST else listening
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _check_public_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        fit = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fit = False
    if not fit or parts.query or parts.fragment or "@" in parts.netloc or url.endswith("/"):
        raise InvalidError(
            f"public URL {url[:80]!r} must be http or https with a host, and may have a port and a "
            "path, as in https://streams.example: leave out user, query, fragment and the last slash"
        )
    if not (url.isascii() and url.isprintable() and " " not in url):
        raise InvalidError(
            f"public URL {url[:80]!r} must be printable ASCII: encode the rest of it"
        )


def store_location(local_root: Path | None, bucket: str | None, path: str) -> str:
    """Return the store's location for the options of S2's own server."""
    if local_root is not None and bucket is not None:
        raise InvalidError("a local root and a bucket exclude each other: choose one")
    below = path.strip("/")
    if bucket is not None:
        return f"s3://{bucket}/{below}" if below else f"s3://{bucket}"
    if local_root is not None:
        return (local_root.resolve() / below).as_uri()
    if below:
        raise InvalidError(
            f"the path {path!r} is within a folder or a bucket: give a local root or a bucket, because "
            "records in memory are lost when the server ends"
        )
    return "memory:"


#: A new certificate is made on every start.
_VALIDITY: Final = datetime.timedelta(days=365)


def write_self_signed(folder: Path) -> TlsFiles:
    """Write a certificate for localhost, 127.0.0.1 and ::1, and its key, to `folder`."""
    key = ec.generate_private_key(ec.SECP256R1())
    files = TlsFiles(folder / "certificate.pem", folder / "key.pem")
    files.certificate.write_bytes(_certificate(key).public_bytes(serialization.Encoding.PEM))
    files.key.touch(mode=0o600)
    files.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return files


def _certificate(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    hosts = [
        x509.DNSName("localhost"),
        x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
        x509.IPAddress(ipaddress.ip_address("::1")),
    ]
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + _VALIDITY)
        .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
