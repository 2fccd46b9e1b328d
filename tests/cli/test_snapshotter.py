"""The snapshotter's command line, as far as it works without Spark."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.cli.commands import Shell, ending_of


@pytest.fixture(scope="module")
def shell() -> Shell:
    """A shell that knows of no server."""
    return Shell({})


@pytest.fixture
def wrong(tmp_path: Path) -> Path:
    """A file with two problems."""
    file = tmp_path / "writer.toml"
    file.write_text(
        """
        [[tables]]
        source = { server = "localhost:8080", table = "orders" }
        destinations = [{ type = "local", path = "/tmp/archive" }]
        difff = { interval = "5s" }
        snapshot = { max_diff_fraction = 1.5 }
        """
    )
    return file


@pytest.mark.parametrize("verb", ["validate", "run"])
def test_problems_of_a_configuration_are_listed_one_per_line(
    shell: Shell, wrong: Path, verb: str
) -> None:
    outcome = shell("snapshotter", verb, "--config", str(wrong))
    assert outcome.status == 1
    assert outcome.stderr.splitlines() == [
        "tables[0].snapshot.max_diff_fraction: 1.5 must be between 0 and 1",
        "tables[0].difff: is not known; did you mean diff?",
        f"error: {wrong} has 2 problems, which are listed above: correct it",
    ]


def test_a_port_in_use_is_reported_in_one_line_before_anything_starts(
    shell: Shell, tmp_path: Path
) -> None:
    file = tmp_path / "writer.toml"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        file.write_text(
            f"""
            source = {{ server = "127.0.0.1:1", table = "orders" }}
            destinations = [{{ type = "local", path = "{tmp_path / "archive"}" }}]
            http = {{ host = "127.0.0.1", port = {port} }}
            """
        )
        scratch = tmp_path / "new" / "scratch"
        outcome = shell("snapshotter", "run", "--config", str(file), "--scratch", str(scratch))
    assert outcome.status == 1
    assert scratch.is_dir()  # it is created
    assert outcome.stderr == (
        f"error: http.port {port} on 127.0.0.1 cannot be used (Address already in use): choose "
        "another http.port or http.host, or stop the process that listens there\n"
    )
    assert not (tmp_path / "archive").exists()


def test_problems_of_a_configuration_are_one_json_line_for_scripts(
    shell: Shell, wrong: Path
) -> None:
    outcome = shell("snapshotter", "validate", "--config", str(wrong), "--json")
    assert outcome.error["code"] == "configuration_invalid"
    assert len(outcome.error["message"].splitlines()) == 2


async def test_the_start_names_an_address_that_a_browser_can_open(
    shell: Shell, tmp_path: Path
) -> None:
    file = tmp_path / "writer.toml"
    file.write_text(
        f"""
        source = {{ server = "127.0.0.1:1", table = "orders" }}
        destinations = [{{ type = "local", path = "{tmp_path / "archive"}" }}]
        http = {{ host = "0.0.0.0", port = 0 }}
        """
    )
    async with shell.running("snapshotter", "run", "--config", str(file)) as process:
        assert process.stderr is not None
        line = await process.stderr.readline()
        process.terminate()
        await ending_of(process)
    assert line.startswith(b"Publishing 1 table; status at http://localhost:")
