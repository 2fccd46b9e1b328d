"""Two writers that keep taking one table from each other, on storage with real conditions."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from streamfold.archive.destinations.destination import Destination
from streamfold.archive.errors import WriterFencedOutError
from tests.archive.plain_reader import read_states
from tests.archive.tables import changes, open_writer, rows
from tests.s3 import S3Server

#: Diffs that each writer gets in before it is done.
TURNS = 4


@pytest.fixture(params=["local", "s3"])
def url_and_options(
    request: pytest.FixtureRequest, tmp_path: Path, s3_server: S3Server, s3_url: str
) -> tuple[str, dict[str, str]]:
    if request.param == "local":
        return tmp_path.as_uri(), {}
    return s3_url, s3_server.options()


async def test_writers_that_take_turns_by_force_lose_nothing(
    url_and_options: tuple[str, dict[str, str]],
) -> None:
    url, options = url_and_options
    written: list[int] = []

    async def write(number: int) -> None:
        destination = Destination.open(url, **options)
        done = tries = 0
        while done < TURNS:
            tries += 1
            try:
                name = f"w{number}t{tries:03d}"
                writer = await open_writer(destination, writer_id=name, ids=f"{name}x")
                if writer.head is None:
                    await writer.write_base(rows({}), "-1", reason="first")
                position = str(int(str(writer.head)) + 1)
                insert = changes(("INSERT", int(position), str(number)))
                await writer.write_diff(insert, str(writer.head), position)
            except WriterFencedOutError:
                continue
            written.append(int(position))
            done += 1

    async with asyncio.timeout(100), asyncio.TaskGroup() as group:
        for number in (1, 2):
            group.create_task(write(number))
    assert sorted(written) == list(range(2 * TURNS)), "every position has one writer"
    states = await read_states(Destination.open(url, **options).blobs)
    assert sorted(states[-1][1]) == list(range(2 * TURNS))
