"""Lets pages of any origin use the server: what they ask for is what they are allowed."""

from __future__ import annotations

from typing import Final

from streamfold.server.http import Request

#: Response headers that a page may read beside the harmless ones.
_EXPOSED: Final = b"s2-provision-result, retry-after-ms, content-encoding"
#: Seconds for which a browser may remember what it is allowed: a day.
_MAX_AGE: Final = b"86400"


def allow_origin(request: Request) -> None:
    """Add to the answer that its sender's origin may read it."""
    request.added_headers = (
        (b"access-control-allow-origin", request.headers[b"origin"]),
        (b"access-control-allow-credentials", b"true"),
        (b"access-control-expose-headers", _EXPOSED),
        (b"vary", b"origin"),
    )


def is_preflight(request: Request) -> bool:
    """Whether a browser asks what a page of another origin may do."""
    asks = request.header("access-control-request-method") is not None
    return request.method == "OPTIONS" and asks and request.header("origin") is not None


async def answer_preflight(request: Request) -> None:
    method = request.header("access-control-request-method") or ""
    wanted = request.header("access-control-request-headers") or ""
    await request.respond(
        204,
        (
            (b"access-control-allow-methods", method.encode(errors="surrogateescape")),
            (b"access-control-allow-headers", wanted.encode(errors="surrogateescape")),
            (b"access-control-max-age", _MAX_AGE),
        ),
    )
