"""Sends webhooks: one signed POST each, to an allowed address, within a deadline.

A client's URL must not give it access to the server's own network.

The rules apply to addresses, not names. A name is resolved, every address is checked, and the
connection goes to a checked address, so a name that changes in between has no effect.

The system's resolver cannot be interrupted. Each lookup has its own thread, and its slot is free
only when that thread ends, however long ago the caller gave up.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Final, TypeAlias
from urllib.parse import SplitResult, urlsplit

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from streamfold.errors import DataCorruptError
from streamfold.server.durable_streams.subscriptions.fairness import OwnerSlots
from streamfold.server.durable_streams.subscriptions.problems import WebhookUrlRejectedError
from streamfold.store.catalog.documents import Documents
from streamfold.wire.durable_streams import signing

if TYPE_CHECKING:
    import httpx

    from streamfold.http_client import AsyncHttp

#: Maximum characters of a URL.
URL_MAX: Final = 2048
#: Global unicast addresses, which exclude mapped, translated, local and multicast addresses.
_GLOBAL_V6: Final = ipaddress.IPv6Network("2000::/3")
#: Parts of it, and of IPv4, for special purposes, relays and tunnels, whatever a library says.
_REFUSED: Final = tuple(
    ipaddress.ip_network(text)
    for text in (
        "192.0.0.0/24",
        "192.88.99.0/24",
        "2001::/23",
        "2001:db8::/32",
        "2002::/16",
        "3fff::/20",
    )
)
#: A public address from which one cloud's machines get their own credentials.
_METADATA: Final = ipaddress.ip_network("168.63.129.16/32")
#: Resolved without a lookup, as RFC 6761 recommends.
_LOCALHOST: Final = "localhost"
#: The characters allowed in a URL. Others could smuggle in a header.
_URL: Final = re.compile(r"[!-~]+")
#: Maximum lookups in progress, each of which is a thread.
LOOKUPS_MAX: Final = 16
#: Maximum lookups of one access token, and of root, which stands for all clients of a server
#: without --auth.
LOOKUPS_PER_OWNER: Final = 2
LOOKUPS_OF_ROOT: Final = 8
#: Seconds that a delivery waits for a slot and the result.
LOOKUP_TIMEOUT: Final = 5.0
#: Seconds for which a host that could not be resolved is not looked up again for the same owner.
FAILURE_KEPT: Final = 5.0
#: Maximum such hosts remembered.
_FAILURES_MAX: Final = 1_000
#: Returns the addresses of a host and port as text, and blocks meanwhile. Raises OSError if there
#: are none.
Resolve: TypeAlias = Callable[[str, int], Sequence[str]]


@dataclass(frozen=True, slots=True)
class WebhookAddress:
    """A parsed URL of an allowed form."""

    secure: bool
    host: str
    port: int
    #: Path and query.
    path: str
    #: Value of the `host` header.
    authority: str


def parse_webhook_url(url: str, *, local: bool) -> WebhookAddress:
    """Parse a webhook URL: https, or with `local` also http to this machine."""
    if not 0 < len(url) <= URL_MAX or not _URL.fullmatch(url):
        raise WebhookUrlRejectedError(
            f"webhook.url must have 1 to {URL_MAX} characters, all printable ASCII"
        )
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise WebhookUrlRejectedError(f"webhook.url {url[:80]!r} is not a URL") from None
    secure = parts.scheme == "https"
    if not host or port == 0 or "@" in parts.netloc or "%" in host or "\\" in url:
        raise WebhookUrlRejectedError(
            f"webhook.url {_shown(parts)!r} must have a plain host, and no user or password"
        )
    if not secure and not (parts.scheme == "http" and local and is_local(host)):
        raise WebhookUrlRejectedError(
            f"webhook.url {_shown(parts)!r} must use https"
            + (", or http to localhost or 127.0.0.x" if local else "")
        )
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return WebhookAddress(secure, host, port or (443 if secure else 80), path, parts.netloc)


def require_allowed(target: WebhookAddress, addresses: Sequence[str]) -> None:
    """Raise unless webhooks may go to every one of the host's addresses."""
    for address in addresses:
        fit = is_public(address) if target.secure else is_loopback(address)
        if not fit:
            raise WebhookUrlRejectedError(
                f"webhook host {target.host[:80]!r} has an address that webhooks may not go to: "
                "use a host with public addresses only"
            )


def is_local(host: str) -> bool:
    """Return whether a host literally names this machine."""
    if host == _LOCALHOST:
        return True
    try:
        return ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        return False


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def is_public(address: str) -> bool:
    """Return whether an address is on the public Internet."""
    parsed = ipaddress.ip_address(address)
    if isinstance(parsed, ipaddress.IPv6Address) and parsed not in _GLOBAL_V6:
        return False
    if any(parsed in network for network in (*_REFUSED, _METADATA)):
        return False
    return parsed.is_global and not parsed.is_multicast and not parsed.is_reserved


def _shown(parts: SplitResult) -> str:
    """Return the part of a URL that contains no secrets."""
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"[:80]


def resolve(host: str, port: int, flags: int = 0) -> list[str]:
    """Return the addresses from the machine's resolver."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except UnicodeError as error:
        raise OSError(f"{host[:80]!r} cannot be a host's name: {error}") from error
    return list(dict.fromkeys(str(address[0]) for *_, address in addresses))


def literal_addresses(host: str, port: int) -> Sequence[str]:
    """Return the host's addresses if they are known without a name server, else nothing."""
    if host == _LOCALHOST:
        return ("127.0.0.1", "::1")
    try:
        return resolve(host, port, socket.AI_NUMERICHOST)
    except OSError:
        return ()


class HostLookups:
    """Looks up hosts in threads, a few at a time per owner."""

    def __init__(self, look_up: Resolve = resolve) -> None:
        self._look_up = look_up
        self._slots = OwnerSlots(LOOKUPS_MAX, LOOKUPS_PER_OWNER, LOOKUPS_OF_ROOT)
        #: Until when an owner's host is not looked up again, by the monotonic clock; oldest first.
        self._failures: dict[tuple[str | None, str], float] = {}

    async def addresses(self, owner: str | None, host: str, port: int) -> Sequence[str]:
        """Return the host's addresses. Raises OSError, or TimeoutError, if there are none in time."""
        literals = literal_addresses(host, port)
        if literals:
            return literals
        if self._failures.get((owner, host), 0.0) > monotonic():
            raise OSError(f"{host[:80]!r} could not be resolved less than {FAILURE_KEPT:g} s ago")
        async with asyncio.timeout(LOOKUP_TIMEOUT):
            release = await self._slots.take(owner)
            try:
                return await self._start(host, port, release)
            except (OSError, asyncio.CancelledError):
                self._remember_failure(owner, host)
                raise

    def _start(
        self, host: str, port: int, release: Callable[[], None]
    ) -> asyncio.Future[Sequence[str]]:
        """Look up a host in a daemon thread, which does not delay the end of the process."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Sequence[str]] = loop.create_future()

        def finish(outcome: Sequence[str] | OSError) -> None:
            release()
            if answer.done():
                return  # the caller gave up
            if isinstance(outcome, OSError):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)

        def run() -> None:
            outcome: Sequence[str] | OSError = OSError(f"the lookup of {host[:80]!r} failed")
            try:
                outcome = self._look_up(host, port)
            except OSError as error:
                outcome = error
            finally:
                with suppress(RuntimeError):  # the loop is closed, so no caller is left
                    loop.call_soon_threadsafe(finish, outcome)

        try:
            threading.Thread(target=run, name="webhook-lookup", daemon=True).start()
        except RuntimeError as error:
            finish(OSError(f"no thread for the lookup of {host[:80]!r}: {error}"))
        return answer

    def _remember_failure(self, owner: str | None, host: str) -> None:
        self._failures.pop((owner, host), None)
        self._failures[owner, host] = monotonic() + FAILURE_KEPT
        if len(self._failures) > _FAILURES_MAX:
            del self._failures[next(iter(self._failures))]


_KIND: Final = "ds-signing-key"
_ID: Final = "current"
#: Bytes of a private key.
_KEY_SIZE: Final = 32
#: Maximum bytes read of a response's body. httpx limits its head.
BODY_MAX: Final = 64 << 10
#: Maximum headers of a response.
_HEADERS_MAX: Final = 100
#: Seconds for the whole request, from the first packet to the last.
TIMEOUT: Final = 10.0


class SigningKey:
    """Signs webhooks. Receivers verify them with its published public key."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.kid = signing.key_id(private.public_key())
        published = signing.JwkSet((signing.jwk(private.public_key(), self.kid),))
        #: The body of `jwks.json`.
        self.jwks = msgspec.json.encode(published)

    def sign(self, timestamp: int, body: bytes) -> str:
        """Return the value of the signature header, for `timestamp` in Unix seconds."""
        return signing.sign(self._private, self.kid, timestamp, body)


class Keyring:
    """Keeps this store's signing key, which is durable before it is used or published."""

    def __init__(self, documents: Documents) -> None:
        self._documents = documents
        self._lock = asyncio.Lock()
        self._key: SigningKey | None = None

    async def key(self) -> SigningKey:
        """Return the key, creating it on first use."""
        async with self._lock:
            if self._key is None:
                self._key = SigningKey(await self._load() or await self._make())
            return self._key

    async def _load(self) -> Ed25519PrivateKey | None:
        raw = await self._documents.get(_KIND, _ID)
        if raw is None:
            return None
        if len(raw) != _KEY_SIZE:
            raise DataCorruptError(f"the key of webhooks has {len(raw)} bytes, not {_KEY_SIZE}")
        return Ed25519PrivateKey.from_private_bytes(raw)

    async def _make(self) -> Ed25519PrivateKey:
        private = Ed25519PrivateKey.generate()
        await self._documents.put(_KIND, _ID, private.private_bytes_raw())
        return private


class WebhookError(Exception):
    """Raised if the response is invalid. The receiver may still have received the request."""


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    #: At most BODY_MAX bytes; empty if there were more.
    body: bytes


class WebhookClient:
    """Sends webhook requests. Returns redirects like other responses, without following them."""

    def __init__(self, timeout: float = TIMEOUT, tls: ssl.SSLContext | None = None) -> None:
        self._timeout = timeout
        self._tls = tls
        self._http: AsyncHttp | None = None

    async def post(
        self,
        target: WebhookAddress,
        addresses: Sequence[str],
        headers: Mapping[str, str],
        body: bytes,
    ) -> Reply:
        """Return the response. Raises OSError (including TimeoutError) or WebhookError without one."""
        # Loaded with the first webhook, and in a thread, because it takes a tenth of a second.
        http = self._http
        if http is None:
            http = self._http = await asyncio.to_thread(_open_http, self._tls)
        import httpx

        from streamfold.http_client import cause_of

        failure: httpx.TransportError | None = None
        try:
            async with asyncio.timeout(self._timeout):
                for address in addresses:
                    try:
                        return await self._post(http, target, address, headers, body)
                    except httpx.ConnectError as error:
                        failure = error
        except httpx.TransportError as error:
            failure = error
        cause = cause_of(failure) if failure else OSError(f"{target.host} has no address")
        if isinstance(cause, OSError):
            raise cause
        raise WebhookError(f"the answer cannot be read: {cause}") from cause

    async def _post(
        self,
        http: AsyncHttp,
        target: WebhookAddress,
        address: str,
        headers: Mapping[str, str],
        body: bytes,
    ) -> Reply:
        """Connect to the checked address, with the name for the certificate and the `host` header."""
        import httpx

        from streamfold.http_client import build_request

        origin = httpx.URL(
            scheme="https" if target.secure else "http", host=address, port=target.port
        )
        request = build_request(
            "POST",
            origin,
            target.path,
            {"host": target.authority, "content-length": str(len(body)), **headers},
            body,
            timeout=self._timeout,
            sni_hostname=target.host,
        )
        async with http.send(request) as response:
            if len(response.headers.raw) > _HEADERS_MAX:
                raise WebhookError(f"the answer has more than {_HEADERS_MAX} headers")
            return Reply(response.status_code, await _read_body(response))


def _open_http(tls: ssl.SSLContext | None) -> AsyncHttp:
    from streamfold.http_client import AsyncHttp

    return AsyncHttp(tls)


async def _read_body(response: httpx.Response) -> bytes:
    """Read the body. Returns an empty one if it is too long."""
    if int(response.headers.get("content-length", 0)) > BODY_MAX:
        return b""
    body = bytearray()
    async for piece in response.aiter_raw():
        body += piece
        if len(body) > BODY_MAX:
            return b""
    return bytes(body)
