"""Commands in pipelines: large input, slow input, closed output, Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from asyncio.subprocess import Process

from tests.cli.commands import COMMAND, Shell, ending_of, line_of


def test_much_input_is_appended_whole_and_in_order(shell: Shell, stream_uri: str) -> None:
    lines = b"".join(b"%d\n" % number for number in range(200_000))
    reported = shell.json("append", stream_uri, stdin=lines)
    assert reported["records"] == 200_000
    assert reported["batches"] < 1000
    assert shell.ok("read", stream_uri).stdout == lines


def test_long_lines_fill_batches_by_their_bytes(shell: Shell, stream_uri: str) -> None:
    lines = b"".join(b"%d" % digit * 700_000 + b"\n" for digit in range(8))
    assert shell.json("append", stream_uri, stdin=lines)["batches"] == 8
    assert shell.ok("read", stream_uri).stdout == lines


def test_a_reader_that_has_had_enough_ends_the_read_quietly(shell: Shell, stream_uri: str) -> None:
    shell.ok("append", stream_uri, stdin=b"a line of some length, many times\n" * 50_000)
    done = subprocess.run(
        ["bash", "-c", '"$@" | head -n 1; echo "${PIPESTATUS[0]}"', "-", *COMMAND, "read", stream_uri],
        env=shell.environment, capture_output=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout == b"a line of some length, many times\n141\n"
    assert done.stderr == b""


async def test_a_closed_output_ends_a_follower_that_has_nothing_to_print(
    shell: Shell, stream_uri: str
) -> None:
    shell.ok("append", stream_uri, stdin=b"only\n")
    script = '"$@" | head -n 1; echo "${PIPESTATUS[0]}"'
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", script, "-", *COMMAND, "tail", "-f", stream_uri,
        env=shell.environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    ended = await ending_of(process)
    assert (ended.stdout, ended.stderr) == (b"only\n141\n", "")


async def test_a_follower_prints_what_comes_until_it_is_interrupted(
    shell: Shell, stream_uri: str
) -> None:
    shell.ok("append", stream_uri, stdin=b"before\n")
    for verb in (("read", "--follow"), ("tail", "-n", "5", "-f")):
        async with shell.running(*verb, "--json", stream_uri) as follower:
            assert json.loads(await line_of(follower))["body"] == "before"
            tail = (await asyncio.to_thread(shell.json, "check-tail", stream_uri))["seq_num"]
            for _ in range(tail - 1):
                await line_of(follower)
            await asyncio.to_thread(shell.ok, "append", stream_uri, stdin=b"after\n")
            assert json.loads(await line_of(follower))["body"] == "after"
            follower.send_signal(signal.SIGINT)
            ended = await ending_of(follower)
        assert (ended.status, ended.stdout, ended.stderr.strip()) == (130, b"", "")


async def test_slow_input_is_sent_as_it_arrives_and_an_interruption_says_how_far(
    shell: Shell, stream_uri: str
) -> None:
    async with (
        shell.running("tail", "-f", stream_uri) as follower,
        shell.running("append", stream_uri) as appender,
    ):
        for line in (b"one\n", b"two\n"):
            await _type(appender, line)
            assert await line_of(follower) == line.decode()
        appender.send_signal(signal.SIGINT)
        assert appender.stderr is not None
        reported = (await appender.stderr.readline()).decode()
        assert reported.startswith("acknowledged: 2 records in 2 batches, seq_num 0 to 1")
        assert (await ending_of(appender)).status == 130
    assert shell.ok("read", stream_uri).stdout == b"one\ntwo\n"


async def test_an_append_that_is_refused_ends_although_input_is_still_open(
    shell: Shell, stream_uri: str
) -> None:
    async with shell.running("append", stream_uri, "--fencing-token", "wrong") as appender:
        await _type(appender, b"one\n")
        assert appender.stderr is not None
        async with asyncio.timeout(120):
            errors = (await appender.stderr.read()).decode()
            status = await appender.wait()
        assert status == 3
        assert errors.startswith("acknowledged: nothing\nerror: the stream's fencing token is ''")


async def _type(process: Process, line: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(line)
    await process.stdin.drain()


def _in_shell(shell: Shell, script: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["bash", "-c", script, "-", *COMMAND, *arguments],
        env=shell.environment, capture_output=True, timeout=120, check=False,
    )  # fmt: skip


def test_output_that_cannot_be_written_is_a_failure_in_one_line(
    shell: Shell, stream_uri: str
) -> None:
    shell.ok("append", stream_uri, stdin=b"1\n")
    for arguments in (("read", stream_uri), ("completion", "bash"), ("--help",)):
        done = _in_shell(shell, '"$@" > /dev/full', *arguments)
        assert done.returncode == 1
        assert done.stderr.startswith(b"error: ")
        assert done.stderr.endswith(b"No space left on device\n")
        assert done.stderr.count(b"\n") == 1
    restore = ("snapshot", "restore", stream_uri, "--fold", "counter", "--output")
    refused = shell(*restore, "/nonexistent/state")
    assert (refused.status, refused.stderr) == (
        1,
        "error: /nonexistent/state: No such file or directory\n",
    )


def test_standard_streams_that_are_closed_do_not_fail_a_verb(shell: Shell, stream_uri: str) -> None:
    for closed in ("2>&-", ">&-", "<&-"):
        done = _in_shell(shell, f'echo 1 | ("$@" {closed})', "append", stream_uri)
        assert (done.returncode, b"Traceback" in done.stderr) == (0, False)
    assert shell.ok("read", stream_uri).stdout == b"1\n1\n"


def test_a_closed_output_ends_verbs_of_snapshots_quietly(shell: Shell, stream_uri: str) -> None:
    shell.ok("append", stream_uri, stdin=b"1\n")
    restore = ("snapshot", "restore", stream_uri, "--fold", "counter")
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*COMMAND, *restore],
        env=shell.environment, stdout=writing, stderr=subprocess.PIPE, timeout=120, check=False,
    )  # fmt: skip
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")
