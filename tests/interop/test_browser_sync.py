"""Yjs and TanStack DB as their users have them: npm packages in browsers, our servers below."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.docs.test_reading import ROOT
from tests.interop.conftest import follow_guide, install_packages
from tests.interop.serving import UvicornProcess
from tests.interop.test_durable_streams_typescript import run_node
from tests.ports import free_port
from tests.server.console.conftest import TIMEOUT, ConsoleServer

EXAMPLE = ROOT / "examples" / "browser_sync"


class YjsGateway:
    """`streamfold-yjs` as a process, which can be killed and started again at the same address."""

    def __init__(self, streamfold: ConsoleServer, compact_after: int) -> None:
        self.port = free_port()
        self._options = ["--streamfold", streamfold.url, "--compact-after", str(compact_after)]
        self.start()

    def __enter__(self) -> YjsGateway:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "streamfold_yjs", "--port", str(self.port)]
        paths = os.pathsep.join([str(ROOT / "integrations/yjs/src"), *sys.path])
        self._process = UvicornProcess(
            [*command, *self._options], env={**os.environ, "PYTHONPATH": paths}
        )

    def kill(self) -> None:
        self._process.kill()


@pytest.fixture(scope="module")
def pages_url() -> Iterator[str]:
    """The built pages of the example, served to this machine."""
    install_packages(EXAMPLE)
    build = ["npm", "run", "--silent", "build"]
    subprocess.run(build, cwd=EXAMPLE, check=True, timeout=300, capture_output=True)
    handler = partial(SimpleHTTPRequestHandler, directory=str(EXAMPLE / "dist"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as files:
        thread = threading.Thread(target=files.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{files.server_port}"
        finally:
            files.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def streamfold(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleServer]:
    with ConsoleServer(tmp_path_factory.mktemp("data")) as server:
        yield server


@pytest.fixture
def windows(browser: Browser) -> Iterator[list[Page]]:
    pages = [browser.new_page() for _ in range(3)]
    for page in pages:
        page.set_default_timeout(TIMEOUT)
    yield pages
    for page in pages:
        page.close()


def expect_text(windows: Sequence[Page], text: str) -> None:
    for window in windows:
        expect(window.locator("textarea")).to_have_value(text)


def expect_items(windows: Sequence[Page], *items: str) -> None:
    for window in windows:
        expect(window.locator("li")).to_have_text(list(items))


def await_snapshot(streamfold: ConsoleServer, updates: str, size: int) -> None:
    """Return once the newest snapshot of a document has so many bytes: it is made in the background."""
    deadline = time.monotonic() + 120
    while True:
        snapshots = streamfold.http.get(f"{updates}/snapshots").json()["snapshots"]
        if snapshots and snapshots[0]["size_bytes"] >= size:
            return
        assert time.monotonic() < deadline, snapshots
        time.sleep(0.02)


@pytest.mark.usefixtures("durable_packages")
def test_the_yjs_provider_converges_on_documents_of_any_size(streamfold: ConsoleServer) -> None:
    updates = "/v1/stream/yjs/interop/docs/large/.updates"
    with YjsGateway(streamfold, 1 << 20) as gateway:
        assert run_node("yjs.mjs", gateway.url).count("ok ") == 3
        await_snapshot(streamfold, updates, 3_000_000)
    assert streamfold.http.get(updates).status_code == 410, "the snapshot has replaced the updates"


def test_windows_converge_on_a_text_though_both_servers_were_away(
    streamfold: ConsoleServer, pages_url: str, windows: list[Page]
) -> None:
    first, second, late = windows
    with YjsGateway(streamfold, 2_000) as gateway:
        address = f"{pages_url}/text.html?yjs={gateway.url}#shared"
        for window in (first, second):
            window.goto(address)
            expect(window.get_by_role("status")).to_have_text("connected")
        first.locator("textarea").press_sequentially("one ")
        expect_text([second], "one ")
        second.locator("textarea").press_sequentially("two ")
        expect_text([first, second], "one two ")
        long = "one two " + "x" * 3_000
        first.locator("textarea").fill(long)
        expect_text([second], long)
        gateway.kill()
        streamfold.stop()
        first.locator("textarea").fill(f"zero {long}")
        second.locator("textarea").fill(f"{long} three")
        streamfold.start()
        gateway.start()
        expect_text([first, second], f"zero {long} three")
        # A browser hides redirects from the provider, so that a new window reads from the beginning.
        late.goto(address)
        expect_text([late], f"zero {long} three")
        updates = "/v1/stream/yjs/texts/docs/shared/.updates"
        await_snapshot(streamfold, updates, 1)
    assert streamfold.http.get(updates).status_code == 410


def test_windows_converge_on_a_list_of_tanstack_db_though_the_server_was_killed(
    streamfold: ConsoleServer, pages_url: str, windows: list[Page]
) -> None:
    first, second, late = windows
    for window in (first, second):
        window.goto(f"{pages_url}/list.html?streamfold={streamfold.url}#shared")
        expect(window.get_by_text("Add")).to_be_enabled()
    first.get_by_placeholder("item").fill("apples")
    first.get_by_text("Add").click()
    expect_items([first, second], "apples")
    second.get_by_text("apples").click()
    expect_items([first, second], "apples ✓")
    other = {"type": "other", "key": "1", "value": {}, "headers": {"operation": "insert"}}
    streamfold.http.post("/v1/stream/lists/shared", json=[other]).raise_for_status()
    streamfold.kill()
    streamfold.start()
    second.get_by_placeholder("item").fill("pears")
    second.get_by_text("Add").click()
    expect_items([first, second], "apples ✓", "pears")
    late.goto(first.url)
    expect_items([late], "apples ✓", "pears")


@pytest.mark.usefixtures("pages_url")
def test_the_guide_can_be_followed(tmp_path: Path) -> None:
    follow_guide(ROOT / "docs/guides/collaboration.md", tmp_path)
