"""How a server is to run: its store, its address, its manners."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from streamfold.errors import InvalidError
from streamfold.model.access import Secret
from streamfold.server.listener import TlsFiles
from streamfold.server.patience import BODY_PATIENCE
from streamfold.server.s2.read_session import HEARTBEAT
from streamfold.store.settings import StoreSettings

#: Ports that S2's own server has by default, plain and with TLS.
PORT, TLS_PORT = 80, 443
#: Addresses that mean all of a machine's.
_ANY_HOST = ("0.0.0.0", "::")  # noqa: S104


@dataclass(frozen=True, slots=True)
class Configuration:
    """Everything that can be set; the defaults keep records in memory."""

    #: memory:, file:///folder or s3://bucket/prefix.
    location: str = "memory:"
    store: StoreSettings = field(default_factory=StoreSettings)
    host: str = "0.0.0.0"  # noqa: S104 - a server that containers run must be reachable
    #: 0 takes any free port.
    port: int = PORT
    tls: TlsFiles | None = None
    #: Make a certificate for localhost instead.
    tls_self: bool = False
    #: Let pages of any origin use the server.
    cors: bool = True
    #: Basins and streams that exist from the start.
    init_file: Path | None = None
    #: What its owner shows to do everything and to issue access tokens; without one, nothing is asked.
    root_token: Secret | None = None
    access_log: bool = True
    #: Seconds that the body of a request may take to arrive, unless it is a session.
    body_patience: float = BODY_PATIENCE
    #: Seconds between the heartbeats of a session at the tail, at least and at most.
    heartbeat: tuple[float, float] = HEARTBEAT
    #: The basin of streams below /v1/stream/.
    default_basin: str = "durable-streams"
    #: Seconds that a long-poll of a Durable Stream waits for something to come.
    long_poll: float = 30.0
    #: Let webhooks go to plain HTTP on this machine: for development.
    local_webhooks: bool = False
    #: Seconds that a stop may take; sessions are ended after half of them.
    drain_patience: float = 10.0
    #: Seconds from the last answer to the first goodbye. granian does not tell when an answer has left,
    #: and clients on Python's h2 drop an answer that a GOAWAY overtakes.
    linger: float = 0.1

    def __post_init__(self) -> None:
        if self.tls is not None and self.tls_self:
            raise InvalidError("a certificate and a self-signed one exclude each other: choose one")
        if not 0 <= self.port <= 65535:
            raise InvalidError(f"port {self.port} must be 0 to 65535")

    @property
    def location_name(self) -> str:
        """What the one location of this server is called."""
        kind = self.location.partition(":")[0]
        return {"memory": "local:memory", "file": "local:disk"}.get(kind, f"{kind}:bucket")

    def url(self, port: int) -> str:
        """Where a client on this machine finds the server."""
        scheme = "https" if self.tls or self.tls_self else "http"
        host = "localhost" if self.host in _ANY_HOST else self.host
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def store_location(local_root: Path | None, bucket: str | None, path: str) -> str:
    """The store's location from the options of S2's own server."""
    if local_root is not None and bucket is not None:
        raise InvalidError("a local root and a bucket exclude each other: choose one")
    below = path.strip("/")
    if bucket is not None:
        return f"s3://{bucket}/{below}" if below else f"s3://{bucket}"
    if local_root is not None:
        return (local_root.resolve() / below).as_uri()
    return "memory:"
