"""A starting writer: its answers and output before, and without, its server."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tests.ports import free_port
from tests.spark.snapshotter.process import OURS, Process
from tests.spark.snapshotter.waiting import wait_for
from tests.spark.unreachable import address, dropping_server, silent_server


def test_what_is_wrong_is_said_before_spark_starts_and_again_and_again_until_the_stop(
    tmp_path: Path,
) -> None:
    port = free_port()  # nothing listens there
    file, log = tmp_path / "writer.toml", tmp_path / "writer.log"
    with dropping_server() as dropping, silent_server() as silent:
        servers = {
            "waiting": f"http://127.0.0.1:{port}",
            "dropping": address(dropping),
            "silent": address(silent),
        }
        file.write_text('http = { port = 0, host = "127.0.0.1" }\n')
        for table, server in servers.items():
            _add_table(file, table, server, tmp_path / "archive")
        _add_table(file, "nowhere", servers["waiting"], Path("/dev/null/x"))
        with Process(file, log) as process:
            assert process.ask("/health/live")  # Java takes seconds to start, and is not there yet
            causes = {"waiting": "Connection refused"}
            expected = {
                table: f"source.server {server} cannot be reached ({causes.get(table, 'timed out')}"
                for table, server in servers.items()
            }
            expected["nowhere"] = "folder /dev/null/x/nowhere cannot be used (Not a directory)"
            for table, start in expected.items():
                status = wait_for(partial(process.status, table), lambda s: bool(s["last_error"]))
                assert (status["state"], status["ready"]) == ("retrying", False)
                assert status["last_error"]["message"].startswith(start)
            for table in servers:
                wait_for(partial(_lines_with, log, expected[table]), lambda lines: len(lines) >= 3)
            assert process.stop() in (0, 1)  # 0: Spark had not even started
    lines = log.read_text().splitlines()
    assert [line for line in lines if not OURS.fullmatch(line)][:-1] == []  # the last is the error


def _add_table(file: Path, table: str, server: str, folder: Path) -> None:
    with file.open("a") as written:
        written.write(
            f"""
            [[tables]]
            source = {{ server = "{server}", table = "{table}" }}
            destinations = [{{ type = "local", path = "{folder}" }}]
            """
        )


def _lines_with(log: Path, text: str) -> list[str]:
    return [line for line in log.read_text().splitlines() if text in line]


def test_a_writer_that_is_stopped_while_spark_starts_ends(tmp_path: Path) -> None:
    file, log = tmp_path / "writer.toml", tmp_path / "writer.log"
    file.write_text(
        f"""
        source = {{ server = "127.0.0.1:{free_port()}", table = "t" }}
        destinations = [{{ type = "local", path = "{tmp_path / "archive"}" }}]
        http = {{ port = 0, host = "127.0.0.1" }}
        """
    )
    with Process(file, log) as process:
        assert process.stop() == 0, log.read_text()
