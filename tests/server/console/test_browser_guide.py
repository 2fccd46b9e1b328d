"""The page of the guide to browsers, opened in a real one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.docs.markdown import blocks_of
from tests.docs.test_reading import ROOT
from tests.server.console.conftest import ConsoleServer

GUIDE = ROOT / "docs/guides/browser-sync.md"


@pytest.fixture
def page_url(tmp_path: Path) -> Iterator[str]:
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as files:
        thread = threading.Thread(target=files.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{files.server_port}"
        finally:
            files.shutdown()
            thread.join()


def test_what_one_window_adds_appears_in_both_also_after_a_restart_of_the_server(
    tmp_path: Path, page_url: str, browser: Browser
) -> None:
    [page] = [block for block in blocks_of(GUIDE) if block.language == "html"]
    with ConsoleServer(tmp_path / "data") as server:
        html = page.text.replace("localhost:8080", f"127.0.0.1:{server.port}")
        (tmp_path / "index.html").write_text(html)
        json = {"content-type": "application/json"}
        server.http.put("/shop-basin/cart", headers=json).raise_for_status()
        server.http.post("/shop-basin/cart", headers=json, content='{"add": "<b>fig</b>"}')
        windows = [browser.new_page(), browser.new_page()]
        for window in windows:
            window.goto(page_url)
            expect(window.locator("li")).to_have_text(["<b>fig</b>"])
        windows[0].get_by_placeholder("item").fill("plum")
        windows[0].get_by_text("Add").click()
        for window in windows:
            expect(window.locator("li")).to_have_text(["<b>fig</b>", "plum"])
        server.stop()
        server.start()
        windows[1].get_by_placeholder("item").fill("pear")
        windows[1].get_by_text("Add").click()
        for window in windows:
            expect(window.locator("li")).to_have_text(["<b>fig</b>", "plum", "pear"])
            window.close()
