"""What a browser shows at `/`: which server this is, and where its interfaces are."""

from __future__ import annotations

from typing import Final

from streamfold import __version__
from streamfold.server.http.request import Request
from streamfold.server.http.router import Router

_HEADERS: Final = (
    (b"content-type", b"text/html; charset=utf-8"),
    # The page has no script and loads nothing.
    (b"content-security-policy", b"default-src 'none'; base-uri 'none'; form-action 'none'"),
)
_PAGE: Final = f"""<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>Streamfold {__version__}</title></head>
<body>
<h1>Streamfold {__version__}</h1>
<p>A durable stream store that knows about snapshots. This server works; it is meant for programs:</p>
<ul>
<li><code>/v1/basins</code>, <code>/v1/streams</code>:
<a href="https://s2.dev/docs">S2 v1</a></li>
<li><code>/&#123;bucket&#125;/&#123;stream&#125;</code>, <code>/v1/stream/&#123;path&#125;</code>:
<a href="https://github.com/durable-streams/durable-streams">Durable Streams</a></li>
<li><a href="/health">/health</a>, <a href="/ready">/ready</a>, <a href="/metrics">/metrics</a>:
its state</li>
</ul>
<p>On a command line, <code>streamfold --help</code> lists the verbs, and the documentation is in the
folder <code>docs</code> of the sources.</p>
</body>
</html>
""".encode()


def add_front_page(router: Router) -> None:
    """Answer `GET /` with the page."""
    for method in ("GET", "HEAD"):
        router.add(method, "/", _show)


async def _show(request: Request) -> None:
    await request.respond(200, _HEADERS, _PAGE)
