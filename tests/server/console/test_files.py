"""Console files: content, headers and content security policy."""

from __future__ import annotations

import hashlib
import json
import re
from importlib.resources import files
from pathlib import Path

import pytest

from streamfold import __version__
from streamfold.model.access_tokens import Secret
from streamfold.server.console import ConsoleSettings
from streamfold.server.main import running_server
from tests.server.conftest import configuration
from tests.server.raw_h2 import H2Client, h2_client

STATIC = Path(str(files("streamfold.server.console"))) / "static"
BROWSER = (("accept", "text/html,application/xhtml+xml,*/*;q=0.8"),)


async def test_a_browser_at_the_root_is_sent_to_the_console(h2: H2Client) -> None:
    answer = await h2.exchange("GET", "/", BROWSER)
    assert (answer.status, answer.headers["location"]) == (302, "console/")


async def test_the_address_without_a_slash_leads_to_the_one_with_it(h2: H2Client) -> None:
    answer = await h2.exchange("GET", "/console")
    assert (answer.status, answer.headers["location"]) == (308, "console/")


async def test_the_policy_allows_no_inline_script_and_no_other_origin(h2: H2Client) -> None:
    answer = await h2.exchange("GET", "/console/")
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy


async def test_every_file_is_served_with_its_type_and_a_tag(h2: H2Client) -> None:
    types = {".html": "text/html", ".css": "text/css", ".js": "text/javascript",
             ".svg": "image/svg+xml", ".txt": "text/plain"}  # fmt: skip
    for path in (path for path in STATIC.rglob("*") if path.is_file()):
        address = f"/console/{path.relative_to(STATIC).as_posix()}"
        answer = await h2.exchange("GET", address)
        assert (answer.status, bytes(answer.body)) == (200, path.read_bytes())
        assert answer.headers["content-type"].startswith(types[path.suffix])
        tagged = await h2.exchange("GET", address, (("if-none-match", answer.headers["etag"]),))
        assert (tagged.status, bytes(tagged.body)) == (304, b"")


@pytest.mark.parametrize("path", ["nowhere", "../pages.py", "%2e%2e/pages.py", "pages", "style/"])
async def test_nothing_else_is_served(h2: H2Client, path: str) -> None:
    assert (await h2.exchange("GET", f"/console/{path}")).status == 404


async def test_settings_say_what_the_page_must_know_before_it_has_a_token() -> None:
    console = ConsoleSettings(read_only=True)
    async with (
        running_server(configuration(console=console)) as server,
        h2_client(server.port) as client,
    ):
        answer = await client.exchange("GET", "/console/settings.json")
    assert json.loads(answer.body) == {
        "version": __version__, "read_only": True, "guarded": False, "tables": False,
        "snapshotters": False,
    }  # fmt: skip


async def test_servers_are_shown_to_those_who_may_see_metrics() -> None:
    async with (
        running_server(configuration(root_token=Secret("root-token-of-a-test"))) as server,
        h2_client(server.port) as client,
    ):
        assert (await client.exchange("GET", "/console/servers")).status == 401
        allowed = (("authorization", "Bearer root-token-of-a-test"),)
        answer = await client.exchange("GET", "/console/servers", allowed)
    assert json.loads(answer.body)["this"]["state"] == "active"


async def test_without_a_console_the_front_page_is_what_a_browser_gets() -> None:
    async with (
        running_server(configuration(console=None)) as server,
        h2_client(server.port) as client,
    ):
        assert (await client.exchange("GET", "/", BROWSER)).status == 200
        assert (await client.exchange("GET", "/console/")).status == 400  # reserved


def test_the_page_has_no_inline_script_or_style_and_loads_nothing_from_elsewhere() -> None:
    markup = (STATIC / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)", markup)
    assert not re.search(r"<style|\sstyle=|\son\w+=", markup)
    for source in re.findall(r'(?:src|href)="([^"]+)"', markup):
        assert (STATIC / source).is_file(), source


def test_no_script_makes_markup_from_text() -> None:
    scripts = [path for path in STATIC.rglob("*.js") if path.parent.name != "vendor"]
    assert len(scripts) > 10
    for path in scripts:
        found = re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function",
            path.read_text(),
        )
        assert found is None, (path.name, found)


def test_every_module_that_a_script_imports_exists() -> None:
    for path in STATIC.rglob("*.js"):
        for target in re.findall(r'^(?:import|export) .*?from "([^"]+)"', path.read_text(), re.M):
            assert (path.parent / target).is_file(), (path.name, target)


def test_the_page_announces_every_module_so_that_none_waits_for_another() -> None:
    announced = re.findall(
        r'rel="modulepreload" href="([^"]+)"', (STATIC / "index.html").read_text()
    )
    modules = {path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*.js")}
    # theme.js is a plain script, and app.js is named as the page's own.
    assert sorted(announced) == sorted(modules - {"theme.js", "app.js"})


def test_the_vendored_library_is_the_published_one() -> None:
    content = (STATIC / "vendor/htm-preact.js").read_bytes()
    assert hashlib.sha256(content).hexdigest() in (STATIC / "vendor/versions.txt").read_text()
