"""Serves the console's files, which contain no data, so anyone may load them.

The page fetches all data through the public HTTP APIs, with the token that its user enters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import TYPE_CHECKING, Final

import msgspec
from blake3 import blake3

from streamfold import __version__
from streamfold.server.auth import Access
from streamfold.server.console.history import HistoryHandler
from streamfold.server.console.servers import Servers, ThisServer
from streamfold.server.http.bodies import answer, answer_json
from streamfold.server.http.drain import DrainGate
from streamfold.server.http.request import Request
from streamfold.server.http.router import PUBLIC, Router

if TYPE_CHECKING:
    from streamfold.archive.preview import ReadLimits  # needs the extra `archive`

ROOT: Final = "/console"
_INDEX: Final = "index.html"
_SETTINGS: Final = "settings.json"
_MEDIA_TYPES: Final = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "json": "application/json",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
#: Scripts and styles come only from this server's files, and markup is never created from text.
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS: Final = (
    (b"content-security-policy", _POLICY.encode()),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    # Browsers revalidate each time, so a new version of the server takes effect at once.
    (b"cache-control", b"no-cache"),
)


@dataclass(frozen=True, slots=True)
class ConsoleSettings:
    """Settings of a server's console."""

    #: Offer nothing that changes stored data. Access tokens still decide what a caller may do.
    read_only: bool = False
    #: Folders and URLs below which published tables are shown.
    tables: tuple[str, ...] = ()
    #: Addresses of snapshotters whose status is shown, or @ and a file that contains an address.
    snapshotters: tuple[str, ...] = ()
    #: Addresses of the store's other servers, which stand by.
    servers: tuple[str, ...] = ()
    #: Limits for reading a table; None = the defaults.
    table_limits: ReadLimits | None = None


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    media_type: str
    tag: str

    @classmethod
    def of(cls, name: str, body: bytes) -> _File:
        suffix = name.rpartition(".")[2]
        return cls(body, _MEDIA_TYPES[suffix], f'W/"{blake3(body).hexdigest(16)}"')


def add_console(
    router: Router,
    settings: ConsoleSettings,
    access: Access,
    drain_gate: DrainGate,
    history: HistoryHandler,
    this: ThisServer,
) -> None:
    """Route everything below /console. The files and settings are always public."""
    history.add_to(router, f"{ROOT}/history")
    console = _Console(settings, guarded=not access.open)
    if settings.tables:
        from streamfold.server.console.tables import TableHandlers  # needs the extra `archive`

        tables = TableHandlers(settings.tables, settings.table_limits, access, drain_gate)
        tables.add_to(router, f"{ROOT}/tables")
    Servers(this, settings.servers, access).add_to(router, f"{ROOT}/servers")
    if settings.snapshotters:
        # Imports an HTTP client, as `other_servers` does.
        from streamfold.server.console.snapshotters import Snapshotters

        Snapshotters(settings.snapshotters, access).add_to(router, f"{ROOT}/snapshotters")
    for method in ("GET", "HEAD"):
        router.add(method, ROOT, PUBLIC, console.redirect)
        router.add(method, f"{ROOT}/{{...}}", PUBLIC, console.show)


class _Console:
    """Serves the console's files, all of which are in memory."""

    def __init__(self, settings: ConsoleSettings, *, guarded: bool) -> None:
        shown = {
            "version": __version__,
            "read_only": settings.read_only,
            "guarded": guarded,
            "tables": bool(settings.tables),
            "snapshotters": bool(settings.snapshotters),
        }
        self._files = {
            **{name: _File.of(name, body) for name, body in _static_files()},
            _SETTINGS: _File.of(_SETTINGS, msgspec.json.encode(shown)),
        }

    async def redirect(self, request: Request) -> None:
        """Redirect to the URL to which the page's links are relative."""
        await request.respond(308, ((b"location", b"console/"),))

    async def show(self, request: Request, path: str) -> None:
        file = self._files.get(path or _INDEX)
        if file is None:
            problem = {"code": "not_found", "message": f"the console has no file {path[:80]!r}"}
            await answer_json(request, problem, 404)
            return
        headers = ((b"etag", file.tag.encode()), *_HEADERS)
        if request.header("if-none-match") == file.tag:
            await request.respond(304, headers)
            return
        typed = (b"content-type", file.media_type.encode())
        await answer(request, file.body, 200, (typed, *headers))


def _static_files() -> Iterator[tuple[str, bytes]]:
    """Yield the path and content of each file in the package."""
    folders: list[tuple[str, Traversable]] = [("", files(__package__) / "static")]
    while folders:
        prefix, folder = folders.pop()
        for entry in folder.iterdir():
            if entry.is_dir():
                folders.append((f"{prefix}{entry.name}/", entry))
            else:
                yield prefix + entry.name, entry.read_bytes()
