"""A real server as a process, and a real browser that shows its console."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.ports import free_port

BASIN, STREAM = "test-basin", "orders"
#: Installed by `make`, see tests/tools.
CHROMIUM, NODE = (Path(sys.executable).parent / name for name in ("chromium", "node"))
#: Milliseconds that the page gets on a busy machine; a check that holds earlier returns earlier.
TIMEOUT = 60_000
#: A browser without a window, as root, that looks for nothing outside this machine.
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip

expect.set_options(timeout=TIMEOUT)
# Playwright's own needs libatomic, which minimal systems do not have.
os.environ["PLAYWRIGHT_NODEJS_PATH"] = str(NODE)


class ConsoleServer:
    """A server that can go away and come back at the same address."""

    def __init__(self, folder: Path, options: Sequence[str] = (), token: str = "") -> None:
        self.folder = folder
        self._options = options
        self._token = token
        self._process: subprocess.Popen[str] | None = None
        # One that no connection takes while the server is away.
        self.port = free_port()
        self.start()
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self.http = httpx.Client(base_url=self.url, headers=headers, timeout=60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self.stop()

    def start(self) -> None:
        command = [sys.executable, "-m", "streamfold.cli.main", "serve", "--json", "--no-fsync",
                   "--host", "127.0.0.1", "--port", str(self.port), "--no-access-log",
                   "--local-root", str(self.folder), *self._options]  # fmt: skip
        environment = {**os.environ, "STREAMFOLD_ROOT_TOKEN": self._token}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert process.stdout is not None
        self._process = process
        assert json.loads(process.stdout.readline())["port"] == self.port

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.communicate(timeout=60)
            self._process = None

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
        self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def page(self, *segments: str, query: str = "") -> str:
        path = "/".join(quote(segment, safe="") for segment in segments)
        return f"{self.url}/console/#/{path}{query}"

    def create(self, basin: str, *streams: str) -> None:
        self.http.put(f"/v1/basins/{basin}").raise_for_status()
        for stream in streams:
            path = f"/v1/streams/{quote(stream, safe='')}"
            self.http.put(path, headers={"s2-basin": basin}).raise_for_status()

    def append(
        self,
        bodies: Sequence[bytes],
        stream: str = STREAM,
        headers: Sequence[tuple[bytes, bytes]] = (),
        timestamps: Sequence[int] | None = None,
    ) -> None:
        pairs = [[_text(name), _text(value)] for name, value in headers]
        records: list[dict[str, Any]] = [{"body": _text(one), "headers": pairs} for one in bodies]
        for record, timestamp in zip(records, timestamps or (), strict=False):
            record["timestamp"] = timestamp
        path = f"/v1/streams/{quote(stream, safe='')}/records"
        sent = {"s2-basin": BASIN, "s2-format": "base64"}
        self.http.post(path, json={"records": records}, headers=sent).raise_for_status()

    def tail(self, stream: str) -> int:
        path = f"/v1/streams/{quote(stream, safe='')}/records/tail"
        answer = self.http.get(path, headers={"s2-basin": BASIN}).raise_for_status().json()
        return int(answer["tail"]["seq_num"])


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleServer]:
    with ConsoleServer(tmp_path_factory.mktemp("data")) as running:
        running.create(BASIN, STREAM)
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=list(_FLAGS))
        yield running
        running.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page in a fresh profile; whatever it reports as an error fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    errors: list[str] = []
    shown = context.new_page()
    shown.set_default_timeout(TIMEOUT)
    shown.on("pageerror", lambda error: errors.append(str(error)))
    shown.on("dialog", lambda dialog: errors.append(f"a dialog: {dialog.message}"))
    shown.on(
        "console",
        lambda message: (
            errors.append(message.text) if "Content Security Policy" in message.text else None
        ),
    )
    yield shown
    context.close()
    assert errors == []
