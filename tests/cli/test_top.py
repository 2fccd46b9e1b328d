"""The live view of a server: activity, contents, and a server that goes away."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import select
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from subprocess import Popen
from typing import Any

from streamfold.cli.servers.server_metrics import Reading, parse_metrics, view
from tests.cli.commands import COMMAND, Shell, line_of
from tests.cli.conftest import create
from tests.ports import free_port

#: Seconds in which a process must draw something.
_TIMEOUT = 120

METRICS = """\
# HELP s2_append_ack_latency_seconds Time
s2_append_ack_latency_seconds_bucket{le="0.001"} 10.0
s2_append_ack_latency_seconds_bucket{le="0.01"} 90.0
s2_append_ack_latency_seconds_bucket{le="+Inf"} 100.0
s2_append_ack_latency_seconds_count 100.0
s2_append_batch_records_sum 500.0
process_resident_memory_bytes 1.048576e+06
streamfold_storage_full 1.0
"""


class _Metrics(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(METRICS)))
        self.end_headers()
        self.wfile.write(METRICS.encode())

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def _serving(port: int) -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", port), _Metrics) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


async def test_appends_and_followers_are_seen(shell: Shell, stream_uri: str) -> None:
    async with (
        shell.running("top", "--json", "--interval", "0.3") as view_,
        shell.running("read", stream_uri, "--follow") as follower,
    ):
        seen = [json.loads(await line_of(view_))]
        while not seen[-1]["followers"]:
            seen.append(json.loads(await line_of(view_)))
        # A rate is the difference to the reading before, and a stream is busy for 5 to 10 s: where a
        # reading takes longer, a later append is seen.
        busy: list[dict[str, Any]] = []
        while not busy:
            await asyncio.to_thread(shell.ok, "append", stream_uri, stdin=b"one\ntwo\n")
            seen.append(json.loads(await line_of(view_)))
            busy = [one for one in seen[-1]["busiest"] if one["basin"] in stream_uri]
        assert await line_of(follower) == "one\n"
        while not any(one["records_per_second"] for one in seen):
            seen.append(json.loads(await line_of(view_)))
    assert seen[-1]["memory_bytes"] > 1 << 20
    assert [f"s2://{one['basin']}/{one['stream']}" for one in busy] == [stream_uri]
    assert busy[0]["records_per_second"] > 0
    assert any(one["ack_ms"] and one["ack_ms"]["p99"] > 0 for one in seen)


def test_one_interval_is_shown_as_text_where_there_is_no_terminal(shell: Shell) -> None:
    shown = shell.ok("top", "--interval", "0.1").text
    assert [line.split()[0] for line in shown.splitlines()[:7]] == [
        "appends", "ack", "flush", "commits", "followers", "cpu", "stored",
    ]  # fmt: skip
    assert "\x1b" not in shown


def test_a_server_that_goes_away_is_shown_and_waited_for_until_q_is_pressed() -> None:
    shell = Shell({"TERM": "xterm", "NO_COLOR": "1"})
    with _serving(free_port()) as port:
        terminal, theirs = pty.openpty()
        arguments = [*COMMAND, "top", "--interval", "0.1", "--endpoint", f"127.0.0.1:{port}"]
        process = Popen(arguments, stdin=theirs, stdout=theirs, stderr=theirs,
                        env=shell.environment)  # fmt: skip
        os.close(theirs)
        try:
            _await(terminal, "storage is full")
            before = port
        except BaseException:
            process.kill()
            raise
    try:
        _await(terminal, "trying again")
        with _serving(before):
            _await(terminal, "storage is full", without="trying again")
        os.write(terminal, b"q")
        _await(terminal, "\x1b[?7h\x1b[?25h\x1b[?1049l")  # wrapping, the cursor, the first screen
        assert process.wait(timeout=_TIMEOUT) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def test_names_of_busy_streams_have_no_effect_and_fit_a_line(
    variables: dict[str, str], shell: Shell
) -> None:
    create(variables, "basins/top-basin")
    name = "long/" * 20 + "\x1b[2J end"
    shell.ok("create-stream", f"s2://top-basin/{name}")
    busy: list[str] = []
    # What was appended is counted for 5 to 10 s, which a slow machine can spend on starting `top`.
    while not busy:
        shell.ok("append", f"s2://top-basin/{name}", stdin=b"much\n" * 1000)
        shown = shell.ok("top", "--interval", "0.1").text
        busy = [line for line in shown.splitlines() if line.startswith("…")]
    [heading] = [line for line in shown.splitlines() if line.startswith("busiest streams")]
    assert heading.split()[-2:] == ["records", "bytes"]
    assert "ong/long/\\u001b[2J end" in busy[0]
    assert busy[0].split()[-1] in ("B/s", "KiB/s")
    assert max(map(len, shown.splitlines())) <= 80


def test_a_server_without_metrics_is_refused_in_one_line(shell: Shell) -> None:
    away = shell("top", "--endpoint", "127.0.0.1:1", "--json")
    assert (away.status, away.error["code"]) == (1, "unreachable")
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        other = shell("top", "--endpoint", f"127.0.0.1:{server.server_port}", "--json")
        server.shutdown()
        thread.join()
    assert other.error["code"] == "metrics_missing"


def test_rates_and_quantiles_are_those_between_two_readings() -> None:
    later = METRICS.replace("500.0", "700.0").replace(" 90.0", " 190.0").replace("100.0", "200.0")
    shape = view(Reading(0.0, parse_metrics(METRICS)), Reading(2.0, parse_metrics(later)))
    assert shape["records_per_second"] == 100
    assert shape["ack_ms"] == {"p50": 5.5, "p90": 9.1, "p99": 9.91}
    assert shape["memory_bytes"] == 1 << 20
    assert shape["followers"] is None
    restarted = METRICS.replace("500.0", "10.0")
    shape = view(Reading(0.0, parse_metrics(METRICS)), Reading(2.0, parse_metrics(restarted)))
    assert shape["records_per_second"] == 5


def _await(terminal: int, text: str, *, without: str = "") -> None:
    """Read the terminal until a screen shows `text`, and lacks `without`."""
    deadline, shown = time.monotonic() + _TIMEOUT, ""
    while time.monotonic() < deadline:
        ready, _, _ = select.select([terminal], [], [], 1.0)
        if ready:
            shown += os.read(terminal, 1 << 16).decode(errors="replace")
        screen = shown.rpartition("\x1b[H")[2]
        if text in screen and (not without or without not in screen):
            return
    raise AssertionError(f"{text!r} was not shown within {_TIMEOUT} s: {shown[-2000:]!r}")
