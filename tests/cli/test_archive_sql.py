"""SQL over the table of an archive, and copies for other engines, through the command line."""

from __future__ import annotations

import asyncio
import os
import pty
import subprocess
from datetime import timedelta
from pathlib import Path

import duckdb
import pytest

from tests.archive.reading import HISTORY, write_commits, write_history
from tests.archive.tables import START
from tests.cli.commands import COMMAND, Shell, read_terminal
from tests.s3 import S3Server


@pytest.fixture(scope="module")
def shell() -> Shell:
    """A shell that knows of no server."""
    return Shell({})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("archives") / "users"
    asyncio.run(write_history(path))
    return path


def state(shell: Shell, folder: Path, *options: str) -> dict[int, str]:
    found = shell.ok("archive", "sql", str(folder), "from users", "--json", *options).objects
    return {row["id"]: row["name"] for row in found}


def test_sql_reads_the_table_at_the_head_at_a_position_and_at_a_time(
    shell: Shell, folder: Path
) -> None:
    assert state(shell, folder) == HISTORY["31"]
    assert state(shell, folder, "--at", "14") == HISTORY["14"]
    moment = (START + timedelta(minutes=2)).isoformat()
    assert state(shell, folder, "--at", moment) == HISTORY["20"]
    outcome = shell("archive", "sql", str(folder), "from users", "--at", "yesterday")
    assert (outcome.status, "yesterday" in outcome.stderr) == (2, True)


def test_sql_reads_the_table_at_a_position_of_its_database(shell: Shell, tmp_path: Path) -> None:
    asyncio.run(write_commits(tmp_path / "users"))
    assert state(shell, tmp_path / "users", "--at-source", "0/30") == HISTORY["14"]
    both = ("--at", "14", "--at-source", "0/30")
    assert shell("archive", "sql", str(tmp_path / "users"), "from users", *both).status == 2


def test_sql_prints_a_table_and_names_the_position(shell: Shell, folder: Path) -> None:
    statement = "select id, name, null as nothing from public.users order by id"
    outcome = shell.ok("archive", "sql", str(folder), statement)
    assert outcome.text.splitlines() == [
        "id  name  nothing",
        "--  ----  -------",
        " 1  A     NULL",
        " 3  c     NULL",
        " 4  D     NULL",
    ]
    assert outcome.stderr == "3 rows of the table at 31\n"


def test_sql_escapes_control_characters_in_the_table(shell: Shell, folder: Path) -> None:
    statement = "select chr(27) || '[2J' || chr(10) as x"
    assert shell.ok("archive", "sql", str(folder), statement).text.splitlines()[2] == "\\x1b[2J\\n"


def test_sql_refuses_statements_that_write(shell: Shell, folder: Path) -> None:
    found = shell("archive", "sql", str(folder), "delete from users", "--json")
    assert (found.status, found.error["code"], found.stdout) == (1, "statement_failed", b"")


def test_sql_reads_an_archive_in_a_bucket(s3_server: S3Server, folder: Path) -> None:
    remote = Shell(s3_server.environment())
    url = f"s3://{s3_server.bucket}/users"
    remote.ok("archive", "export", str(folder), url)
    found = remote.json("archive", "sql", url, "select count(*) as n from users")
    assert found == {"n": 3}


def test_sql_shows_progress_on_a_terminal(folder: Path) -> None:
    parent, child = pty.openpty()
    done = subprocess.run(
        [*COMMAND, "archive", "sql", str(folder), "from users"],
        stdout=subprocess.PIPE,
        stderr=child,
        check=True,
        timeout=120,
    )
    os.close(child)
    assert b"fetching" in read_terminal(parent)
    assert b"name" in done.stdout


def test_a_table_is_exported_for_other_engines(shell: Shell, folder: Path, tmp_path: Path) -> None:
    target = str(tmp_path / "users.duckdb")
    found = shell.json("archive", "export", str(folder), target, "--duckdb", "--at", "14")
    assert found == {"path": target, "kind": "duckdb", "position": "14", "rows": 3}
    with duckdb.connect(target, read_only=True) as connection:
        assert dict(connection.sql("from public.users").fetchall()) == HISTORY["14"]
    again = shell("archive", "export", str(folder), target, "--duckdb", "--json")
    assert (again.status, again.error["code"]) == (1, "invalid")
    plain = shell("archive", "export", str(folder), target, "--column", "id")
    assert (plain.status, "--delta" in plain.stderr) == (2, True)
