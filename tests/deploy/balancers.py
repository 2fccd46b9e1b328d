"""Load balancers of `deploy/` before servers on this machine, as processes of their own."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import STDOUT
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypeAlias

from tests.deploy.test_manifests import DEPLOY
from tests.ports import free_port

HAPROXY, NGINX = DEPLOY / "haproxy/haproxy.cfg", DEPLOY / "nginx/nginx.conf"


class Urls(NamedTuple):
    """Where a load balancer takes connections, by protocol."""

    h1: str
    h2: str


#: Runs a load balancer before servers at two ports of this machine; its files are in a folder.
Balancer: TypeAlias = Callable[[Path, tuple[int, int]], AbstractAsyncContextManager[Urls]]


def localized(configuration: Path, addresses: Mapping[str, str]) -> str:
    """The text of a configuration with addresses of this machine, each of which it must name."""
    text = configuration.read_text()
    for address, local in addresses.items():
        assert address in text, address
        text = text.replace(address, local)
    return text


@asynccontextmanager
async def haproxy(folder: Path, ports: tuple[int, int]) -> AsyncIterator[Urls]:
    port = free_port()
    file = folder / "haproxy.cfg"
    file.write_text(
        localized(
            HAPROXY,
            {
                "10.0.0.11:8080": f"127.0.0.1:{ports[0]}",
                "10.0.0.12:8080": f"127.0.0.1:{ports[1]}",
                "bind :8080": f"bind 127.0.0.1:{port}",
            },
        )
    )
    command = ("haproxy", "-db", "-f", str(file))
    async with _running(folder / "haproxy.log", (port,), *command):
        yield Urls(_url(port), _url(port))


@asynccontextmanager
async def nginx(folder: Path, ports: tuple[int, int]) -> AsyncIterator[Urls]:
    h1, h2 = free_port(), free_port()
    file = folder / "nginx.conf"
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = " ".join(f"{kind}_temp_path {folder / kind};" for kind in kinds)
    file.write_text(
        localized(
            NGINX,
            {
                "10.0.0.11:8080": f"127.0.0.1:{ports[0]}",
                "10.0.0.12:8080": f"127.0.0.1:{ports[1]}",
                "listen 8080": f"listen 127.0.0.1:{h1}",
                "listen 8081": f"listen 127.0.0.1:{h2}",
                "/run/nginx.pid": str(folder / "nginx.pid"),
                "access_log off;": f"access_log off; {temporary}",
            },
        )
    )
    command = ("nginx", "-p", str(folder), "-c", str(file), "-g", "daemon off;")
    async with _running(folder / "nginx.log", (h1, h2), *command):
        yield Urls(_url(h1), _url(h2))


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


@asynccontextmanager
async def _running(log: Path, ports: tuple[int, ...], *command: str) -> AsyncIterator[None]:
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=STDOUT)
    ended = asyncio.create_task(process.wait())
    try:
        async with asyncio.timeout(120):
            for port in ports:
                while not await _listens(port) and not ended.done():  # noqa: ASYNC110 - nothing says so
                    await asyncio.sleep(0.02)
        assert not ended.done(), _text(log)
        yield
        assert not ended.done(), _text(log)
    finally:
        if not ended.done():
            process.terminate()
        await ended


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return True


async def logged(log: Path, text: str) -> None:
    """Return once a load balancer's log has this text."""
    async with asyncio.timeout(120):
        while text not in _text(log):  # noqa: ASYNC110 - a file announces nothing
            await asyncio.sleep(0.01)


def _text(log: Path) -> str:
    return log.read_text()
