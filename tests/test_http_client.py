"""Requests to other servers: destinations, logging, and the single HTTP client."""

from __future__ import annotations

import ast
import gzip
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

import streamfold
from streamfold.http_client import AsyncHttp, build_request, cause_of, open_transport
from tests.ports import free_port

Send = Callable[[httpx.Request], bytes]
#: Other ways to speak HTTP.
CLIENTS = {"http.client", "urllib.request", "aiohttp", "requests", "urllib3"}


@pytest.fixture
def origin() -> Iterator[httpx.URL]:
    """A server that answers with the target of the request, compressed."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = gzip.compress(self.path.encode(), mtime=0)
            self.send_response(200)
            self.send_header("content-encoding", "gzip")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield httpx.URL(scheme="http", host="127.0.0.1", port=server.server_port)
    server.shutdown()
    server.server_close()


def blocking(request: httpx.Request) -> bytes:
    with open_transport(request.url) as transport:
        response = transport.handle_request(request)
        return b"".join(response.iter_raw())


async def on_a_loop(request: httpx.Request) -> bytes:
    async with AsyncHttp().send(request) as response:
        return b"".join([piece async for piece in response.aiter_raw()])


async def test_a_request_goes_to_its_url_whatever_the_environment_says(
    origin: httpx.URL, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    for target in ("/a/../b?c=%2F%2f&d", "/./%2e%2E//x"):
        answers = [
            blocking(build_request("GET", origin, target, {}, timeout=60)),
            await on_a_loop(build_request("GET", origin, target, {}, timeout=60)),
        ]
        # As sent: an answer is not decompressed, and a path is not changed.
        assert answers == [gzip.compress(target.encode(), mtime=0)] * 2


# Upstream defect 16.
async def test_a_url_with_a_secret_is_not_logged(
    origin: httpx.URL, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    for _ in range(2):
        request = build_request(
            "GET", origin, "/hooks/sesame?k=sesame", {"x": "sesame"}, timeout=60
        )
        blocking(request)
        await on_a_loop(request)
    assert "sesame" not in caplog.text


async def test_the_cause_of_a_failure_is_the_error_of_the_system() -> None:
    nobody = httpx.URL(scheme="http", host="127.0.0.1", port=free_port())
    with pytest.raises(httpx.ConnectError) as failure:
        blocking(build_request("GET", nobody, "/", {}, timeout=60))
    assert isinstance(cause_of(failure.value), ConnectionRefusedError)
    with pytest.raises(httpx.ConnectError) as failure:
        await on_a_loop(build_request("GET", nobody, "/", {}, timeout=60))
    assert isinstance(cause_of(failure.value), ConnectionRefusedError)


def test_no_module_speaks_http_in_another_way() -> None:
    folder = Path(streamfold.__path__[0])
    others = {
        (str(path.relative_to(folder)), name)
        for path in folder.rglob("*.py")
        for name in _imported(ast.parse(path.read_text()))
        if name in CLIENTS
    }
    assert others == set()


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
