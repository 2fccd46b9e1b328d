"""The doctor reports OK or a fix for each check, and its exit status reflects failures."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.cli.commands import Shell
from tests.s3 import S3Server, run_s3_server


def _findings(printed: str) -> dict[str, Any]:
    return {one["check"]: one for one in map(json.loads, printed.splitlines())}


class _Careless(BaseHTTPRequestHandler):
    """A server that lives in 2001, and replaces objects whatever the conditions are."""

    def do_GET(self) -> None:
        self._answer(b'{"basins":[],"has_more":false}')

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self._answer(b"")

    do_DELETE = do_GET  # noqa: N815 - the name that http.server looks for

    def date_time_string(self, timestamp: float | None = None) -> str:
        return "Mon, 01 Jan 2001 00:00:00 GMT"

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("etag", '"the-same"')
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def _careless() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Careless) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def _with_storage(shell: Shell, endpoint: str, server: S3Server | None = None) -> Shell:
    other = Shell({})
    other.environment = {
        **shell.environment,
        "AWS_ENDPOINT_URL_S3": endpoint,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": server.access_key_id if server else "x",
        "AWS_SECRET_ACCESS_KEY": server.secret_access_key if server else "x",
    }
    return other


def test_what_works_is_ok_line_by_line(shell: Shell, tmp_path: Path) -> None:
    with run_s3_server() as server:
        other = _with_storage(shell, server.endpoint, server)
        root = tmp_path / "not-yet" / "there"
        options = ("--bucket", server.bucket, "--local-root", str(root))
        found = _findings(other.ok("doctor", *options, "--json").text)
    checked = ("endpoint", "token", "clock", "bucket", "extra server", "java")
    assert {name: found[name]["status"] for name in checked} == dict.fromkeys(checked, "ok")
    assert found["disk"]["status"] in ("ok", "warning")  # the disk of this machine may be slow
    assert not root.exists()


def test_failures_are_named_with_their_fix_and_end_with_status_1(shell: Shell) -> None:
    with _careless() as url:
        other = _with_storage(shell, url)
        failed = other("doctor", "--endpoint", url, "--bucket", "any", "--json")
    found = _findings(failed.text)
    assert failed.status == 1
    assert failed.error["code"] == "checks_failed"
    assert found["clock"]["status"] == found["bucket"]["status"] == "failure"
    assert "NTP" in found["clock"]["fix"]
    assert "conditional writes" in found["bucket"]["fix"]


def test_a_server_that_does_not_answer_is_a_failure_and_no_server_at_all_is_not(
    shell: Shell,
) -> None:
    failed = shell("doctor", "--endpoint", "127.0.0.1:1")
    assert failed.status == 1
    line = next(line for line in failed.text.splitlines() if "FAILURE" in line)
    assert line.split()[1] == "endpoint"
    assert "Connection refused" in line
    assert "\x1b" not in failed.text
    other = Shell({})
    other.environment = {
        name: value for name, value in shell.environment.items() if not name.startswith("S2_")
    }
    assert _findings(other.ok("doctor", "--json").text)["endpoint"]["status"] == "skipped"


def test_an_address_that_serves_something_else_is_a_failure() -> None:
    class Other(_Careless):
        def do_GET(self) -> None:
            self.send_error(404)

    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        failed = Shell({})("doctor", "--endpoint", url, "--json")
        server.shutdown()
        thread.join()
    assert failed.status == 1
    assert "S2 API" in _findings(failed.text)["endpoint"]["fix"]
