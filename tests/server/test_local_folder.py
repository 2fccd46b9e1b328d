"""`serve` on a folder asks before taking a store over or dropping damaged records."""

from __future__ import annotations

import json
import os
import signal
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from s2_sdk import S2, AppendInput, Record

from streamfold.cli.exit_status import ExitStatus
from tests.cli.commands import Shell, ending_of, line_of
from tests.sdk import sdk_client

BASIN, STREAM = "test-basin", "orders"
COMMITS = 12


@pytest.fixture
def shell() -> Shell:
    return Shell({})


def command(folder: Path, *more: str) -> tuple[str, ...]:
    here = ("--host", "127.0.0.1", "--port", "0", "--json", "--no-access-log")
    return ("serve", *here, "--local-root", str(folder), *more)


@asynccontextmanager
async def a_server(shell: Shell, folder: Path, *more: str) -> AsyncIterator[tuple[Process, S2]]:
    async with shell.running(*command(folder, *more)) as process:
        url = json.loads(await line_of(process))["url"]
        async with sdk_client(url) as client:
            yield process, client


async def test_a_second_server_on_a_folder_is_refused_and_the_first_one_goes_on(
    shell: Shell, tmp_path: Path
) -> None:
    async with a_server(shell, tmp_path) as (first, s2):
        refused = shell(*command(tmp_path))
        assert refused.status == ExitStatus.FAILURE
        error = json.loads(refused.stderr.splitlines()[-1])["error"]
        assert error["code"] == "store_in_use"
        assert f"in use by process {first.pid} " in error["message"]
        assert "--take-over" in error["message"]
        await s2.create_basin(BASIN)
        first.send_signal(signal.SIGKILL)
        await first.wait()
    async with a_server(shell, tmp_path) as (second, s2):  # a killed process holds no lock
        assert [basin.name for basin in (await s2.list_basins()).items] == [BASIN]
        async with a_server(shell, tmp_path, "--take-over") as (third, _):
            assert (await ending_of(second)).status == ExitStatus.FENCED
            refused = shell(*command(tmp_path))
            assert f"in use by process {third.pid} " in refused.stderr


async def test_a_server_drops_damaged_records_only_if_the_operator_names_the_file(
    shell: Shell, tmp_path: Path
) -> None:
    async with a_server(shell, tmp_path) as (process, s2):
        await s2.create_basin(BASIN)
        stream = s2.basin(BASIN).stream(STREAM)
        await s2.basin(BASIN).create_stream(STREAM)
        for number in range(COMMITS):
            await stream.append(AppendInput([Record(b"%d" % number)]))
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
    database = tmp_path / "db"
    damaged = sorted((database / "wal").iterdir())[-6]
    content = bytearray(damaged.read_bytes())
    content[30:38] = bytes(8)
    damaged.write_bytes(content)
    marker = json.loads((database / "restore-point").read_text())
    (database / "restore-point").write_text(json.dumps(marker | {"boot": "another"}))
    refused = shell(*command(tmp_path))
    assert refused.status == ExitStatus.FAILURE
    error = json.loads(refused.stderr.splitlines()[-1])["error"]
    assert error["code"] == "data_corrupt"
    number = int(damaged.stem)
    assert str(damaged) in error["message"]
    assert f"--accept-loss {number} " in error["message"]
    accepting = ("--accept-loss", str(number))
    async with a_server(shell, tmp_path, *accepting) as (process, s2):
        assert (await s2.basin(BASIN).stream(STREAM).check_tail()).seq_num == COMMITS - 6
        process.terminate()
        ended = await ending_of(process)
    dropped = f"dropped: records {COMMITS - 5} to {COMMITS - 1} of stream {BASIN}/{STREAM}"
    assert dropped in ended.stderr
    assert len(list((database / "set-aside").rglob("*.sst"))) == 6
