"""`streamfold snapshot` as a user runs it, against a server in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from s2_sdk import AppendInput, Record

from tests.cli.forking import COMMANDS
from tests.distributions import install_example
from tests.interop.serving import serving
from tests.sdk import sdk_client

BASIN = "verbs-basin"
RUN = "from streamfold.cli.main import main; main()"


@pytest.fixture(scope="module")
def variables() -> Iterator[dict[str, str]]:
    with serving("--host", "127.0.0.1", "--no-access-log") as exports:
        yield exports


class Verbs:
    """Runs verbs on one stream."""

    def __init__(self, variables: dict[str, str], stream: str, folder: Path) -> None:
        self.stream_uri = f"s2://{BASIN}/{stream}"
        self._stream = stream
        self._variables = variables
        self._folder = folder

    def start(self, name: str, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", RUN, "snapshot", name, self.stream_uri, *options]
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self._folder,
            env={**os.environ, **self._variables},
        )

    def run(self, name: str, *options: str) -> tuple[int, str, str]:
        done = COMMANDS.run(
            ["snapshot", name, self.stream_uri, *options],
            {**os.environ, **self._variables},
            folder=self._folder,
        )
        return done.returncode, done.stdout.decode(), done.stderr.decode()

    def ok(self, name: str, *options: str) -> str:
        status, out, err = self.run(name, *options)
        assert status == 0, err
        return out

    def json(self, name: str, *options: str) -> list[Any]:
        return [json.loads(line) for line in self.ok(name, *options, "--json").splitlines()]

    async def append(self, *bodies: str) -> None:
        endpoint = self._variables["S2_ACCOUNT_ENDPOINT"]
        async with sdk_client(endpoint) as s2:
            await s2.ensure_basin(BASIN)
            await s2.basin(BASIN).ensure_stream(self._stream)
            stream = s2.basin(BASIN).stream(self._stream)
            await stream.append(AppendInput([Record(body.encode()) for body in bodies]))


@pytest.fixture
def verbs(variables: dict[str, str], tmp_path: Path, request: pytest.FixtureRequest) -> Verbs:
    return Verbs(variables, request.node.name, tmp_path)


async def test_a_codec_of_an_installed_package_is_offered_and_used(
    verbs: Verbs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(install_example(tmp_path / "site-packages")))
    assert "--codec [json|msgpack|json-zlib]" in verbs.ok("take", "--help")
    where = ["--snapshots", f"file://{tmp_path}/snapshots", "--codec", "json-zlib"]
    fold = ["--fold", "last-value", "--key-field", "id"]
    await verbs.append('{"id":"a","n":1}')
    verbs.ok("take", *where, *fold)
    assert [file.suffix for file in (tmp_path / "snapshots").glob("0*")] == [".json-zlib"]
    assert json.loads(verbs.ok("restore", *where, *fold)) == {"a": {"id": "a", "n": 1}}
    status, _, err = verbs.run("restore", *where[:2], "--codec", "json-zlip", *fold)
    assert status == 2
    assert "'json-zlip' must be one of json, msgpack, json-zlib; did you mean json-zlib?" in err


async def test_external_snapshots_from_take_to_prune(verbs: Verbs, tmp_path: Path) -> None:
    where = ["--snapshots", f"file://{tmp_path}/snapshots"]
    fold = ["--fold", "last-value", "--key-field", "id"]
    await verbs.append('{"id":"a","n":1}', '{"id":"b","n":1}')
    assert verbs.ok("take", *where, *fold) == "taken  2  external\n"
    await verbs.append('{"id":"a","n":2}', '{"id":"b"}')
    (taken,) = verbs.json("take", *where, *fold)
    assert taken == {
        "outcome": "taken",
        "cursor": 4,
        "place": "external",
        "reason": "the state before 4 is saved",
    }
    status, out, err = verbs.run("take", *where, *fold)
    assert (status, out) == (6, "")
    assert "no snapshot was taken: a snapshot covers everything before 4 already" in err
    await verbs.append('{"id":"c","n":3}')
    text = verbs.ok("plan", *where)
    assert "load    external snapshot 00000000000000000004.json (cursor 4" in text
    assert "replay  1 record from 4" in text
    (plan,) = verbs.json("plan", *where)
    assert (plan["read_from"], plan["tail"], plan["records"]) == (4, 5, 1)
    state = {"a": {"id": "a", "n": 2}, "c": {"id": "c", "n": 3}}
    assert json.loads(verbs.ok("restore", *where, *fold)) == state
    (restored,) = verbs.json("restore", *where, *fold)
    assert (restored["cursor"], restored["state"]) == (5, state)
    verbs.ok("restore", *where, *fold, "--output", "state.json")
    assert json.loads((tmp_path / "state.json").read_text()) == state
    assert [info["cursor"] for info in verbs.json("list", *where)] == [4, 2]
    assert [info["cursor"] for info in verbs.json("prune", *where, "--keep", "1")] == [2]
    assert verbs.ok("list", *where).split()[:3] == ["4", "external", "json"]


async def test_snapshots_in_a_folder_of_a_plain_name(verbs: Verbs, tmp_path: Path) -> None:
    await verbs.append("1", "2", "3")
    where = ["--fold", "counter", "--snapshots", "snapshots"]
    verbs.ok("take", *where)
    assert list((tmp_path / "snapshots").iterdir())
    [restored] = verbs.json("restore", *where)
    assert restored["plan"]["snapshot"]["place"] == "external"


async def test_snapshots_in_the_stream(verbs: Verbs) -> None:
    await verbs.append("1", "2", "3")
    assert verbs.ok("take", "--fold", "counter").split() == ["taken", "3", "record"]
    await verbs.append("10")
    assert verbs.ok("restore", "--fold", "counter") == "16\n"
    (info,) = verbs.json("list")
    assert (info["place"], info["cursor"], info["bytes"]) == ("record", 3, 1)


async def test_snapshots_in_the_stream_that_leave_the_history(verbs: Verbs) -> None:
    where = ["--snapshots", "in-stream", "--no-trim"]
    await verbs.append("1", "2", "3")
    verbs.ok("take", *where, "--fold", "counter")
    await verbs.append("10")
    assert verbs.json("plan", *where)[0]["first"] == 0
    assert verbs.ok("restore", *where, "--fold", "counter") == "16\n"


async def test_snapshots_on_the_server(verbs: Verbs, variables: dict[str, str]) -> None:
    where = ["--snapshots", variables["S2_ACCOUNT_ENDPOINT"]]
    await verbs.append("1", "2", "3")
    assert verbs.ok("take", *where, "--fold", "counter").split() == ["taken", "3", "external"]
    await verbs.append("10")
    (plan,) = verbs.json("plan", *where)
    assert (plan["snapshot"]["cursor"], plan["records"]) == (3, 1)
    assert verbs.ok("restore", *where, "--fold", "counter") == "16\n"


async def test_plain_snapshots(verbs: Verbs, tmp_path: Path) -> None:
    where = ["--snapshots", f"file://{tmp_path}/snapshots", "--shape", "plain"]
    await verbs.append("1", "2", "3")
    verbs.ok("take", *where, "--fold", "counter")
    assert (tmp_path / "snapshots" / "3.json").read_text() == "6"
    assert verbs.ok("restore", *where, "--fold", "counter") == "6\n"


@pytest.mark.parametrize("where", ["in-stream", "file"])
async def test_a_snapshot_of_another_fold_is_refused(
    variables: dict[str, str], tmp_path: Path, where: str
) -> None:
    verbs = Verbs(variables, f"other-fold-{where}", tmp_path)
    location = ["--snapshots", f"file://{tmp_path}" if where == "file" else where]
    await verbs.append('{"id":"a","n":1}')
    verbs.ok("take", *location, "--fold", "last-value", "--key-field", "id")
    for other in (["merge-patch"], ["last-value", "--key-field", "n"]):
        status, out, err = verbs.run("restore", *location, "--fold", *other)
        assert (status, out) == (1, ""), err
        assert "was made with the fold 'last-value by field id'" in err
        assert err.count("\n") == 1


async def test_a_fold_of_ones_own(verbs: Verbs, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def longest(state, record):\n    return max(state, record.body.decode(), key=len)\n"
        "longest.initial = str\n"
    )
    await verbs.append("a", "abc", "ab")
    assert verbs.ok("restore", "--fold", "mine:longest") == '"abc"\n'
    assert verbs.ok("restore", "--fold", "mine:longest", "--initial", '"abcdef"') == '"abcdef"\n'


async def test_merge_patches(verbs: Verbs) -> None:
    await verbs.append('{"a":{"b":1,"c":2}}', '{"a":{"b":null},"d":[1]}')
    assert json.loads(verbs.ok("restore", "--fold", "merge-patch")) == {"a": {"c": 2}, "d": [1]}


async def test_running_takes_snapshots_until_interrupted(verbs: Verbs) -> None:
    await verbs.append("1")
    options = ("--fold", "counter", "--snapshots", "in-stream", "--records", "3", "--json")
    with verbs.start("run", *options) as process:
        try:
            assert process.stdout is not None
            await verbs.append("1", "1", "1")
            line = await asyncio.to_thread(process.stdout.readline)
            assert json.loads(line)["outcome"] == "taken"
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=120)
        finally:
            process.kill()
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["restore", "--fold", "nonsense"], "last-value, merge-patch, counter, or module:function"),
        (["restore", "--fold", "absent_module:fold"], "cannot be loaded"),
        (["restore", "--fold", "counter", "--snapshots", "ftp://x"], "must begin with memory:"),
        (["restore", "--fold", "counter", "--snapshots", "in-steam"], "neither auto nor in-stream"),
        (["restore", "--fold", "os:name"], "is not a function"),
        (["restore", "--fold", "..:fold"], "cannot be loaded"),
        (["run", "--fold", "counter", "--age", "0"], "policy age 0 must be more than 0"),
        (["run", "--fold", "counter", "--bytes", "0"], "policy bytes 0 must be more than 0"),
        (["prune", "--keep", "1"], "only external snapshots are pruned"),
        (["prune"], "nothing to prune by"),
        (["take", "--fold", "counter", "--fence"], "fencing_token is needed"),
        (["restore", "--fold", "merge-patch"], "record 0 is not JSON"),
    ],
)
async def test_mistakes_are_reported_with_the_way_out(
    variables: dict[str, str], tmp_path: Path, options: list[str], text: str
) -> None:
    verbs = Verbs(variables, "mistakes", tmp_path)
    await verbs.append("{no json")
    status, _, err = verbs.run(*options)
    assert status != 0
    assert text in err
