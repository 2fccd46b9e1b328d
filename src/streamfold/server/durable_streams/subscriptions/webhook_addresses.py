"""Which addresses webhooks may reach: a client's URL must not open the server's own network to it.

The rules are about addresses, not names. A name is resolved, every address is checked, and the
connection is made to a checked address: a name that changes in between changes nothing.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import SplitResult, urlsplit

from streamfold.server.durable_streams.subscriptions.problems import WebhookUrlRejectedError

#: Characters.
URL_MAX: Final = 2048
#: Global unicast addresses: mapped, translated, local and multicast ones are all outside.
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
#: A public address by which one cloud's machines ask for their own credentials.
_METADATA: Final = ipaddress.ip_network("168.63.129.16/32")
_LOCALHOST: Final = "localhost"
#: What a URL may consist of; with anything else a header could be smuggled in.
_URL: Final = re.compile(r"[!-~]+")


@dataclass(frozen=True, slots=True)
class WebhookAddress:
    """A parsed URL whose form is allowed."""

    secure: bool
    host: str
    port: int
    #: Path and query.
    path: str
    #: Value of the `host` header.
    authority: str


def parse_webhook_url(url: str, *, local: bool) -> WebhookAddress:
    """The target that a URL names: https, or with `local` also http to this very machine."""
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
    """Raise unless webhooks may go to every address of the target's host."""
    for address in addresses:
        fit = is_public(address) if target.secure else is_loopback(address)
        if not fit:
            raise WebhookUrlRejectedError(
                f"webhook host {target.host[:80]!r} has an address that webhooks may not go to: "
                "use a host with public addresses only"
            )


def is_local(host: str) -> bool:
    """Whether a host names this machine, literally."""
    if host == _LOCALHOST:
        return True
    try:
        return ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        return False


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def is_public(address: str) -> bool:
    """Whether an address is on the public Internet."""
    parsed = ipaddress.ip_address(address)
    if isinstance(parsed, ipaddress.IPv6Address) and parsed not in _GLOBAL_V6:
        return False
    if any(parsed in network for network in (*_REFUSED, _METADATA)):
        return False
    return parsed.is_global and not parsed.is_multicast and not parsed.is_reserved


def _shown(parts: SplitResult) -> str:
    """The URL without what may be secret in it."""
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"[:80]
