"""Exit statuses of programs that used object storage, on a busy machine."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from streamfold.archive import Destination
from tests.archive.tables import open_writer, rows
from tests.cli.commands import COMMAND
from tests.interop.serving import serving
from tests.proving import PROVING
from tests.s3 import S3Server

ROOT = Path(__file__).parents[2]
RUNS = 200 if PROVING else 3
#: Busy loops beside the programs: with idle processors a native thread is never late. Other tests
#: keep the processors busy, too, and would be slowed down.
BUSY_LOOPS = 3 if PROVING else 0

#: Ends while a native thread is still in `call_soon_threadsafe`, each time: it stays there longer than
#: the main thread needs to reach the shutdown of the interpreter, which then takes longer still.
LATE_THREAD = """
import asyncio, sys, time
from streamfold.blob import open_blob_store

class SlowLoop(asyncio.SelectorEventLoop):
    def call_soon_threadsafe(self, *args, **kwargs):
        handle = super().call_soon_threadsafe(*args, **kwargs)
        sys.stdout.write("in Python")
        time.sleep(0.2)
        return handle

class SlowEnd:
    def __init__(self, sleep):
        self.sleep = sleep

    def __del__(self):
        self.sleep(2)

async def main():
    await open_blob_store("memory:").put("key", b"value")

kept = SlowEnd(time.sleep)
with asyncio.Runner(loop_factory=SlowLoop) as runner:
    runner.run(main())
sys.exit(7)
"""

FOLLOW = """
import asyncio, os, sys
from streamfold.follow import SnapshotTaker, external, follow
from tests.sdk import sdk_client

async def main():
    snapshots = external(f"s3://{sys.argv[1]}/{os.getpid()}")
    async with sdk_client(os.environ["S2_ACCOUNT_ENDPOINT"]) as s2:
        stream = s2.basin("exit-basin").stream("orders")
        folding = {"fold": lambda state, record: state + 1, "initial": int, "snapshots": snapshots}
        async with SnapshotTaker(stream, **folding) as snapshotter:
            await snapshotter.take()
        async with follow(stream, **folding) as state:
            print(state.value)

asyncio.run(main())
"""


@pytest.fixture
def busy_processors() -> Iterator[None]:
    """Loops that take all the time that they get."""
    loops = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BUSY_LOOPS)
    ]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def statuses(command: Sequence[str], environment: dict[str, str]) -> Counter[int]:
    """How often a command ended with which status, in `RUNS` runs, three at a time."""

    def run(_: int) -> int:
        return subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | environment,
            capture_output=True,
            check=False,
            timeout=300,
        ).returncode

    with ThreadPoolExecutor(3) as runs:
        return Counter(runs.map(run, range(RUNS)))


def test_a_program_ends_with_its_status_although_a_native_thread_is_late() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LATE_THREAD], capture_output=True, check=False, timeout=120
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (7, b"in Python", b"")


@pytest.mark.usefixtures("busy_processors")
def test_an_archive_verb_on_s3_ends_with_its_status_each_time(s3_server: S3Server) -> None:
    uri = f"s3://{s3_server.bucket}/tables/users"

    async def publish() -> None:
        writer = await open_writer(Destination.open(uri, **s3_server.options()))
        await writer.write_base(rows({1: "a"}), "9", reason="first")

    asyncio.run(publish())
    show = [*COMMAND, "archive", "show"]
    assert statuses([*show, uri], s3_server.environment()) == {0: RUNS}
    assert statuses([*show, f"{uri}-missing"], s3_server.environment()) == {4: RUNS}


@pytest.mark.usefixtures("busy_processors")
def test_a_program_that_follows_with_snapshots_on_s3_ends_well_each_time(
    s3_server: S3Server,
) -> None:
    with serving("--host", "127.0.0.1", "--no-access-log") as exports:
        environment = exports | s3_server.environment()
        for verb in (["create-basin", "exit-basin"], ["create-stream", "exit-basin/orders"]):
            subprocess.run([*COMMAND, *verb], env=os.environ | environment, check=True)
        command = [sys.executable, "-c", FOLLOW, f"{s3_server.bucket}/follow"]
        assert statuses(command, environment) == {0: RUNS}
