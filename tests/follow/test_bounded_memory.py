"""Large framed snapshots restore in no more than twice their size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interop.serving import serving

ROOT = Path(__file__).parents[2]
#: Bytes of state.
SIZE = 200_000_000

TAKE = """
import asyncio, os
from s2_sdk import AppendInput, Record
from streamfold.follow import BytesCodec, SnapshotTaker, in_stream
from tests.sdk import sdk_client
{codec}

def grow(state, record):
    return make(int(record.body))

async def main():
    async with sdk_client(os.environ["S2_ACCOUNT_ENDPOINT"]) as s2:
        await s2.ensure_basin("large-basin")
        await s2.basin("large-basin").ensure_stream("{name}")
        stream = s2.basin("large-basin").stream("{name}")
        await stream.append(AppendInput([Record(b"{size}")]))
        async with SnapshotTaker(
            stream, fold=grow, initial=empty, snapshots=in_stream(codec=codec)
        ) as taker:
            print((await taker.take()).placement)

asyncio.run(main())
"""

RESTORE = """
import asyncio, json, os, resource
from streamfold.follow import BytesCodec, follow, in_stream
from tests.sdk import sdk_client
{codec}

async def main():
    async with sdk_client(os.environ["S2_ACCOUNT_ENDPOINT"]) as s2:
        stream = s2.basin("large-basin").stream("{name}")
        await stream.check_tail()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        async with follow(
            stream, fold=None, initial=empty, snapshots=in_stream(codec=codec)
        ) as state:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            place = state.plan.snapshot.placement
            size = measure(state.value)
            print(json.dumps(dict(grown=(peak - before) * 1024, size=size, place=place)))

asyncio.run(main())
"""

BYTES = """
codec, empty, measure = BytesCodec(), bytes, len
def make(size):
    return b"0123456789abcdef" * (size // 16)
"""
ARROW = """
import pyarrow as pa
from streamfold.follow.encoding.arrow_codec import ArrowCodec
codec = ArrowCodec()
def make(size):
    return pa.table({"n": pa.array(range(size // 8), pa.int64())})
def empty():
    return make(0)
def measure(table):
    return table.nbytes
"""


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What programs need to reach a server on local disk."""
    folder = str(tmp_path_factory.mktemp("store"))
    quiet = ("--host", "127.0.0.1", "--no-access-log", "--no-fsync")
    with serving(*quiet, "--local-root", folder) as exports:
        yield {**os.environ, **exports}


@pytest.mark.parametrize(
    ("name", "codec"), [("bytes", BYTES), ("arrow", ARROW)], ids=["bytes", "arrow"]
)
def test_200_megabytes_restore_within_twice_that(
    name: str, codec: str, variables: dict[str, str]
) -> None:
    def run(script: str) -> str:
        text = script.replace("{codec}", codec).replace("{name}", name)
        text = text.replace("{size}", str(SIZE))
        done = subprocess.run(
            [sys.executable, "-c", text],
            cwd=ROOT,
            env=variables,
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert run(TAKE) == "framed"
    found = json.loads(run(RESTORE))
    assert found["place"] == "framed"
    assert found["size"] >= SIZE * 0.99
    assert found["grown"] <= 2 * SIZE, f"{found['grown'] / SIZE:.2f} times its size"
