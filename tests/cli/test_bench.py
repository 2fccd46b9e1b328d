"""The benchmark of the command line: bounded, checked, and gone when it ends."""

from __future__ import annotations

import asyncio
import signal
import subprocess

import pytest
from s2_sdk import SequencedRecord

from streamfold.cli.exit_status import VerbFailedError
from streamfold.cli.records.load import Chain
from tests.cli.commands import COMMAND, Shell, ending_of

#: The bytes end it, however long they take.
_SHORT = ("-b", "1KiB", "-t", "0", "-d", "5m", "--max-bytes", "200KiB")


def test_records_are_appended_followed_and_read_again_within_the_bounds(
    shell: Shell, basin: str
) -> None:
    found = shell.json("bench", basin, *_SHORT, "-w", "0s", "-c", "express")
    assert found["stream"].startswith(f"s2://{basin}/bench/")
    assert found["verified"] is True
    for part in ("append", "follow", "catch_up"):
        assert (found[part]["records"], found[part]["bytes"]) == (200, 200 * 1024)
    for part in ("append", "follow"):
        latency = found[part]["latency_ms"]
        assert 0 < latency["min"] <= latency["p50"] <= latency["p99"] <= latency["max"]
    listed = shell.ok("ls", f"s2://{basin}", "--json").objects
    assert [one["name"] for one in listed if one["deleted_at"] is None] == []


def test_one_record_is_appended_at_least_however_short_the_time(shell: Shell, basin: str) -> None:
    found = shell.json("bench", basin, "-b", "1MiB", "-t", "0.001", "-d", "1s")
    assert (found["append"]["records"], found["catch_up"]["records"]) == (1, 1)


def test_without_a_basin_one_is_made_and_removed(shell: Shell) -> None:
    done = shell.ok("bench", "-b", "128", "-t", "0.5", "-d", "5m", "--max-bytes", "256KiB")
    assert [line.split()[0] for line in done.text.splitlines()[1:4]] == [
        "append", "follow", "catch-up",
    ]  # fmt: skip
    assert "\x1b" not in done.text + done.stderr
    left = shell.ok("list-basins", "--prefix", "bench-", "--json").objects
    assert [one["name"] for one in left if one["deleted_at"] is None] == []


async def test_an_interruption_removes_the_stream_and_the_basin(shell: Shell) -> None:
    async with shell.running("bench", "-d", "10m") as process:
        assert process.stderr is not None
        async with asyncio.timeout(120):
            stream = (await process.stderr.readline()).decode().split()[-1]
            while (await asyncio.to_thread(shell.json, "check-tail", stream))["seq_num"] < 10:
                pass
        process.send_signal(signal.SIGINT)
        assert (await ending_of(process)).status == 130
    left = shell.ok("list-basins", "--prefix", "bench-", "--json").objects
    assert [one["name"] for one in left if one["deleted_at"] is None] == []


def test_what_is_out_of_bounds_is_refused(shell: Shell) -> None:
    assert "128 to 1048576" in shell("bench", "-b", "100").stderr
    assert shell("bench", "-d", "0s").status == shell("bench", "--max-bytes", "1").status == 2
    missing = shell("bench", "no-such-basin", "--json")
    assert missing.error["code"] == "basin_not_found"


def test_a_changed_missing_or_repeated_record_is_noticed() -> None:
    written, bodies = Chain(), [b"a", b"b", b"c"]
    hashes = [written.extend(body) for body in bodies]
    records = [
        SequencedRecord(seq_num=index, body=body, headers=[(b"hash", hashes[index])], timestamp=0)
        for index, body in enumerate(bodies)
    ]
    whole = Chain()
    for record in records:
        whole.check(record)
    changed = SequencedRecord(seq_num=1, body=b"B", headers=records[1].headers, timestamp=0)
    for second in (changed, records[2], records[0]):
        reader = Chain()
        reader.check(records[0])
        with pytest.raises(VerbFailedError, match="something else than was appended") as found:
            reader.check(second)
        assert found.value.reason == "content_differs"


def test_the_benchmark_needs_no_package_of_the_repository() -> None:
    command = [COMMAND[0], "-I", "-c", "import streamfold.cli.records.bench, sys; "
               "print([name for name in sys.modules if name.split('.')[0] == 'bench'])"]  # fmt: skip
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"
