"""A server that goes silent: the writer reports it and can be stopped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.spark.server import Server
from tests.spark.snapshotter.feeding import Feed, feed
from tests.spark.snapshotter.process import OURS, Process, configuration
from tests.spark.snapshotter.waiting import wait_for
from tests.spark.unreachable import Proxy

#: As by default, a task is repeated three times: Spark takes more than two minutes to fail it.
_MASTER = "local[2,4]"
#: Seconds: less than Spark takes to notice it three times.
_BEFORE_SPARK = 180.0


@contextmanager
def _started(server: Server, proxy: Proxy, folder: Path, interval: str) -> Iterator[Process]:
    """A writer that reaches the server through the proxy, and follows an empty stream."""
    server.create("changes")
    written = configuration(server, "changes", folder / "archive")
    written = written.replace(server.url, proxy.url).replace('"200ms"', f'"{interval}"')
    (folder / "writer.toml").write_text(written)
    with Process(folder / "writer.toml", folder / "writer.log", master=_MASTER) as process:
        wait_for(process.status, lambda status: bool(status["ready"]))
        yield process


def _lines(folder: Path, proxy: Proxy) -> list[str]:
    """The log's lines about the server."""
    unreachable = f"source.server {proxy.url} cannot be reached (timed out"
    log = (folder / "writer.log").read_text()
    return [line for line in log.splitlines() if unreachable in line]


def test_the_silence_of_a_server_is_said_between_two_intervals_and_forgotten_when_it_answers(
    own_server: Server, tmp_path: Path
) -> None:
    with Proxy(own_server.url) as proxy, _started(own_server, proxy, tmp_path, "1h") as process:
        proxy.silence()
        wait_for(partial(_lines, tmp_path, proxy), lambda lines: len(lines) >= 2)
        status = wait_for(process.status, lambda status: status["state"] == "retrying")
        assert status["last_error"]["code"] == "endpoint_unavailable"
        assert not status["ready"]
        proxy.speak()
        status = wait_for(process.status, lambda status: status["state"] == "running")
        assert status["last_error"] is None
        assert process.stop() == 0, (tmp_path / "writer.log").read_text()


def test_a_task_that_reads_from_a_silent_server_is_said_and_holds_up_no_stop(
    own_server: Server, tmp_path: Path
) -> None:
    with (
        Proxy(own_server.url) as proxy,
        _started(own_server, proxy, tmp_path, "200ms") as process,
    ):
        proxy.silence(b"records?seq_num=")
        feed(own_server, "changes", Feed(1).changes(10))
        wait_for(lambda: proxy.is_silent, bool)
        said = partial(_lines, tmp_path, proxy)
        wait_for(said, lambda lines: len(lines) >= 3, _BEFORE_SPARK)
        assert process.stop() == 1
    lines = (tmp_path / "writer.log").read_text().splitlines()
    assert [line for line in lines if not OURS.fullmatch(line)][:-1] == []  # the last is the error
    assert "the last flush failed: source.server" in lines[-2]
