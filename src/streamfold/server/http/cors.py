"""Which web pages may use the server: one rule for all paths, and the headers that browsers need.

A browser sends many requests of a foreign page before it asks whether the page may read the answer: a
form's POST arrives whatever the answer's headers say. A server without access tokens therefore
refuses such requests instead of only leaving headers out. With access tokens every page may call: it
needs a token, and browsers never add one on their own, since credentials are never allowed.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from ipaddress import ip_address
from typing import Final, NamedTuple

from streamfold.errors import InvalidError
from streamfold.server.http.headers import text_of
from streamfold.server.http.request import Request
from streamfold.server.http.router import memoize_short

#: Stands for all origins.
ANY: Final = "*"

#: On every answer: what streams hold is untrusted, and a browser must not guess what it is.
NOSNIFF: Final = (b"x-content-type-options", b"nosniff")
#: On every answer while pages may use the server, so that caches do not mix up what origins get.
_VARY: Final = (b"vary", b"origin")
#: Response headers that a page may read beside the harmless ones.
_EXPOSED: Final = (
    b"access-control-expose-headers",
    b"stream-next-offset, stream-cursor, stream-up-to-date, stream-closed, producer-epoch, "
    b"producer-seq, producer-expected-seq, producer-received-seq, stream-snapshot-offset, "
    b"stream-snapshot-digest, stream-snapshot-part, ursula-max-request-bytes, "
    b"ursula-max-snapshot-bytes, ursula-max-staged-parts, ursula-max-staged-bytes, "
    b"stream-retained-offset, stream-sse-data-encoding, etag, "
    b"content-type, content-encoding, location, link, vary, retry-after, retry-after-ms, "
    b"s2-provision-result",
)
_METHODS: Final = (b"access-control-allow-methods", b"GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS")
#: Seconds for which a browser may remember a preflight: a day.
_MAX_AGE: Final = (b"access-control-max-age", b"86400")

_LOCALHOST: Final = "localhost"
_LOOPBACK: Final = re.compile(rb"https?://(?:localhost|127(?:\.[0-9]{1,3}){3}|\[::1\])(?::[0-9]+)?")
_ORIGIN: Final = re.compile(r"(https?)://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{1,5}))?")
_PORTS: Final = {"http": "80", "https": "443"}
_AUTHORITY: Final = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:@/\[\]]+)(?::[0-9]*)?")


class CrossOriginRefusal(NamedTuple):
    """Why a request is refused: a code, and a sentence for the client."""

    code: str
    message: str


class PagePolicy:
    """Judges requests by what only browsers say truthfully: `Origin`, `Sec-Fetch-Site` and `Host`.

    `guarded` says that requests need access tokens. `known_hosts` are names of this server beside
    `localhost` and addresses; None if it may be reached by any name.
    """

    def __init__(
        self,
        *,
        guarded: bool,
        enabled: bool = True,
        origins: Collection[str] = (),
        known_hosts: Collection[str] | None = None,
    ) -> None:
        self.enabled = enabled
        self._any = enabled and (guarded or ANY in origins)
        self._origins = frozenset(origin.encode() for origin in origins) if enabled else frozenset()
        self._refusing = not (guarded or self._any)
        self._known_hosts = known_hosts if self._refusing else None
        self._is_own_name = memoize_short(self._look_up_name)
        self._plain = (NOSNIFF, _VARY) if enabled else (NOSNIFF,)

    def judge(self, request: Request) -> CrossOriginRefusal | None:
        """Why the request is refused, if it is; adds the headers that its answer needs."""
        request.added_headers = self._plain
        headers = request.headers
        if self._known_hosts is not None:
            authority = headers.get(b"host") or headers.get(b":authority")
            if authority and not self._is_own_name(authority):
                return CrossOriginRefusal(
                    "host_not_allowed",
                    f"this server listens for this machine alone, and {_shown(authority)} is not "
                    "one of its names: use localhost or an address, or start it with --public-url, "
                    "--host or --auth",
                )
        origin = headers.get(b"origin")
        if origin is None:
            judged = self._refusing and b"sec-fetch-site" in headers
            return self._judge_embedding(request) if judged else None
        if self._allows(origin):
            granted = b"*" if self._any else origin
            allowed = (b"access-control-allow-origin", granted)
            request.added_headers = (*self._plain, allowed, _EXPOSED)
        elif self.enabled and is_preflight(request):
            # It does nothing, and its answer names no origin, which browsers take as a refusal. The
            # protocol's conformance suite wants to see which headers could be sent.
            return None
        elif self._refusing and not _is_own(origin, request):
            return CrossOriginRefusal(
                "origin_not_allowed",
                f"pages of {_shown(origin)} may not use this server, which asks for no access "
                "tokens: start it with --cors-origin to allow them, or with --auth",
            )
        return None

    def _allows(self, origin: bytes) -> bool:
        if self._any or origin in self._origins:
            return True
        return self.enabled and _LOOPBACK.fullmatch(origin) is not None

    def _judge_embedding(self, request: Request) -> CrossOriginRefusal | None:
        """Refuse what a foreign page embeds, as an image or a script: that has no `Origin`."""
        foreign = request.headers.get(b"sec-fetch-site") == b"cross-site"
        if not foreign or request.headers.get(b"sec-fetch-mode") == b"navigate":
            return None
        return CrossOriginRefusal(
            "origin_not_allowed",
            "pages of other sites may not embed what this server holds, which asks for no access "
            "tokens: start it with --cors-origin '*' to allow them, or with --auth",
        )

    def _look_up_name(self, authority: bytes) -> bool:
        """Whether a name is this server's; a web page may point its own name at this address."""
        match = _AUTHORITY.fullmatch(text_of(authority))
        host = match[1].lower() if match else ""
        return host == _LOCALHOST or host in (self._known_hosts or ()) or _is_address(host)


def is_preflight(request: Request) -> bool:
    """Whether a browser asks what a page of another origin may do."""
    asks = b"access-control-request-method" in request.headers
    return request.method == "OPTIONS" and asks and b"origin" in request.headers


async def answer_preflight(request: Request) -> None:
    """Allow all headers that a page asks to send; its origin must have been checked."""
    headers = request.headers.get(b"access-control-request-headers", b"")
    allowed = ((b"access-control-allow-headers", headers),) if headers else ()
    await request.respond(204, (_METHODS, *allowed, _MAX_AGE))


def parse_origin(text: str) -> str:
    """`text` as browsers write the origin of a page, or ANY; InvalidError if it is neither."""
    if text == ANY:
        return text
    match = _ORIGIN.fullmatch(text.lower())
    if match is None:
        raise InvalidError(
            f"origin {text[:80]!r} is not valid: give only scheme, host and port, as in "
            f"https://app.example, or {ANY} for all"
        )
    scheme, host, port = match.groups()
    # Browsers leave out the default port of a scheme.
    return f"{scheme}://{host}" + (f":{port}" if port and port != _PORTS[scheme] else "")


def is_loopback(host: str) -> bool:
    """Whether a server that listens at `host` can be reached from this machine alone."""
    return host == _LOCALHOST or (_is_address(host) and ip_address(host).is_loopback)


def _is_own(origin: bytes, request: Request) -> bool:
    """Whether a page came from this server itself; a proxy may have changed the scheme."""
    return origin.partition(b"://")[2] == _authority(request)


def _authority(request: Request) -> bytes | None:
    return request.headers.get(b"host") or request.headers.get(b":authority")


def _is_address(host: str) -> bool:
    try:
        ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def _shown(value: bytes) -> str:
    return repr(text_of(value[:80]))
