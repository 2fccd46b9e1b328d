"""The JSON lines of the `ingest` commands."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.cli.commands import Shell, line_of
from tests.cli.documented_json import documented
from tests.ingest.conftest import BASIN
from tests.ingest.postgres import database_name, execute


@pytest.mark.usefixtures("s2")
async def test_the_verbs_print_the_json_lines_that_are_documented(
    database: str, endpoint: str
) -> None:
    execute(
        database,
        "CREATE TABLE orders (id int PRIMARY KEY)",
        "INSERT INTO orders VALUES (1)",
        "CREATE TABLE keyless (id int)",
    )
    shell = Shell({"STREAMFOLD_POSTGRES_DSN": database})
    named = ("--slot", database_name(database), "--publication", database_name(database))
    running = ("ingest", "postgres", "--table", "orders", "--basin", BASIN, "--endpoint", endpoint)
    async with shell.running(*running, *named, "--json") as process:
        shown = [json.loads(await line_of(process))]
        while shown[-1]["state"] != "following":
            shown.append(json.loads(await line_of(process)))
        process.terminate()
        await process.wait()
    seen = {"ingest postgres": shown}
    for verb, options in (("tables", ()), ("status", named[:2]), ("drop", (*named, "--yes"))):
        done = await asyncio.to_thread(shell.ok, "ingest", verb, *options, "--json")
        seen[f"ingest {verb}"] = done.objects
    for verb, lines in seen.items():
        assert lines
        for line in lines:
            assert any(shape.fits(line) for shape in documented(verb)), (verb, line)
    assert {"refused" in line for line in seen["ingest tables"]} == {True, False}
