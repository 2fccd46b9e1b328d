"""Two writers that repeatedly take over one table on storage with real conditional writes."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path

import pytest

from streamfold.archive.destinations.destination import Destination
from streamfold.archive.errors import WriterFencedOutError
from streamfold.archive.maintenance.garbage_collection import Collector
from streamfold.archive.manifest.positions import SEQ_NUM
from tests.archive.plain_reader import read_states
from tests.archive.tables import Clock, changes, new_ids, open_writer, rows
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

    async with asyncio.timeout(300), asyncio.TaskGroup() as group:
        for number in (1, 2):
            group.create_task(write(number))
    assert sorted(written) == list(range(2 * TURNS)), "every position has one writer"
    states = await read_states(Destination.open(url, **options).blobs)
    assert sorted(states[-1][1]) == list(range(2 * TURNS))


async def test_a_writer_learns_that_it_was_fenced_without_a_commit_and_of_pins_too(
    url_and_options: tuple[str, dict[str, str]],
) -> None:
    url, options = url_and_options
    destination = Destination.open(url, **options)
    first = await open_writer(destination, ids="first")
    await first.check_owner()  # there is nothing to own yet
    await first.write_base(rows({1: "a"}), "1", reason="first")
    await first.check_owner()
    collector = Collector([destination], now=Clock().now, new_id=new_ids("pin"), order=SEQ_NUM)
    await collector.pin("kept", 1, timedelta(hours=1))
    await first.check_owner()
    assert first.manifest is not None
    assert len(first.manifest.pins) == 1  # what others may change is taken over
    await open_writer(destination, writer_id="writer-2", ids="second")
    for _ in range(2):
        with pytest.raises(WriterFencedOutError, match="writer-2"):
            await first.check_owner()


async def test_a_writer_learns_that_another_one_wrote_the_first_base(
    url_and_options: tuple[str, dict[str, str]],
) -> None:
    url, options = url_and_options
    destination = Destination.open(url, **options)
    first = await open_writer(destination, ids="first")
    second = await open_writer(destination, writer_id="writer-2", ids="second")
    await second.write_base(rows({}), "-1", reason="first")
    with pytest.raises(WriterFencedOutError, match="writer-2"):
        await first.check_owner()
