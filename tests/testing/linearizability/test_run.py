"""Runs against real servers with faults, and the commands on good and bad histories."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from streamfold.errors import InvalidError
from streamfold.testing.adversary import FlakyBucket
from streamfold.testing.linearizability import (
    Judgement,
    OperationHistory,
    Verdict,
    check,
    read_history,
    write_history,
)
from streamfold.testing.linearizability.campaign import LinearizabilityRun
from streamfold.testing.linearizability.porcupine import Porcupine, resolved
from tests.testing.linearizability.handmade import RIGHT, WRONG


async def command(*arguments: object) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "streamfold.testing.linearizability", *map(str, arguments)),
        stdout=PIPE,
        stderr=PIPE,
    )
    stdout, stderr = await process.communicate()
    assert process.returncode is not None
    return process.returncode, (stdout + stderr).decode()


async def test_a_server_that_is_killed_and_stopped_is_linearizable(tmp_path: Path) -> None:
    options = ["--seed", 5, "--operations", 800, "--streams", 6, "--stream-operations", 100]
    options += ["--seconds", 0.6, "--report", tmp_path / "report", "--histories", tmp_path / "kept"]
    status, printed = await command("run", *options, "--folder", tmp_path / "run")
    assert status == 0, printed
    assert "seed 5: no violation" in printed
    (line,) = (tmp_path / "report").read_text().splitlines()
    report = json.loads(line)
    assert (report["proof"], report["violations"]) == ("linearizability-local", 0)
    figures = report["figures"]
    assert figures["operations"] > 600
    assert figures["acknowledged appends"] > 100
    assert figures["kills"] + figures["stops"] >= 2
    assert figures["undecided"] == 0
    histories = sorted((tmp_path / "kept").iterdir())
    assert len(histories) == figures["streams"]
    status, printed = await command("check", tmp_path / "kept")
    assert (status, f"linearizable: {figures['streams']}" in printed) == (0, True), printed


async def test_a_server_whose_object_storage_fails_is_linearizable(tmp_path: Path) -> None:
    histories: list[tuple[OperationHistory, Verdict]] = []
    run = LinearizabilityRun(
        4, tmp_path, FlakyBucket(), 120, streams=3, stream_operations=40, seconds=0.5
    )
    run.judged = lambda history, verdict: histories.append((history, verdict))
    figures = await run.run()
    assert figures.storage_faults
    assert figures.acknowledged_appends
    for history, verdict in histories:
        certain = resolved(history, verdict)
        assert not any(operation.unknown for operation in certain.operations)
        assert check(certain).judgement is Judgement.LINEARIZABLE


async def test_a_violation_is_printed_with_the_operations_that_contradict_each_other(
    tmp_path: Path,
) -> None:
    wrong, right = tmp_path / "wrong.jsonl", tmp_path / "right.jsonl.gz"
    history = WRONG["stale_read_after_an_ack"].script().history
    history.fault("server 1 is killed")
    write_history(history, wrong)
    write_history(RIGHT["read_beside_an_append"].script().history, right)
    status, printed = await command("check", wrong, right)
    assert status == 1
    assert "wrong.jsonl: 3 operations, violation" in printed
    assert "right.jsonl.gz: 3 operations, linearizable" in printed
    assert (
        "read 2 began after append 1 had ended (was acknowledged at seq_num 1), and answered tail 1: "
        "it missed append 1\n"
        "  event      2: client 2 begins append 1 of 1 record\n"
        "  event      3: append 1 was acknowledged at seq_num 1\n"
        "  event      4: client 3 begins read 2\n"
        "  event      5: read 2 answered tail 1\n"
    ) in printed


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("no JSON\n", "line 1 of history.jsonl is not an event"),
        ('{"event": {"Finish": "ReadFailure"}, "client_id": 1, "op_id": 7}\n', "KeyError(7)"),
        ('{"event": {"Start": "Dance"}, "client_id": 1, "op_id": 7}\n', "KeyError('Dance')"),
        ('{"event": {"Start": "Read"}, "client_id": 1, "op_id": 7}\n' * 2, "begins twice"),
    ],
)
async def test_files_that_are_no_histories_are_refused(
    tmp_path: Path, text: str, reason: str
) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidError) as caught:
        read_history(path)
    assert reason in caught.value.message


async def test_the_command_says_which_file_it_cannot_read(tmp_path: Path) -> None:
    status, printed = await command("check", tmp_path / "missing.jsonl")
    assert status == 2
    assert f"{tmp_path}/missing.jsonl cannot be read" in printed


def test_the_public_checker_needs_a_program_or_its_source(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="set S2_VERIFICATION_SOURCE to a checkout"):
        Porcupine.find(tmp_path, {"PATH": str(tmp_path)})
    with pytest.raises(InvalidError, match="Go cannot build"):
        Porcupine.find(tmp_path, {"PATH": "", "S2_VERIFICATION_SOURCE": str(tmp_path)})


async def test_the_published_histories_are_linearizable() -> None:
    evidence = Path(__file__).parents[3] / "docs" / "evidence" / "linearizability"
    status, printed = await command("check", evidence / "local", evidence / "s3")
    assert (status, "linearizable: 40\n" in printed) == (0, True), printed
