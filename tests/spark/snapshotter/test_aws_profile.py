"""Archives on S3 with an AWS profile alone: executors find credentials as the driver does."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyspark
import pytest

from tests.s3_gate import Gate, issued, prepare_home
from tests.spark.server import Server
from tests.spark.snapshotter.feeding import Feed, feed, replayed
from tests.spark.snapshotter.process import Process, configuration
from tests.spark.snapshotter.waiting import wait_for

#: One executor in a Java process of its own, with one core and so many MiB.
MASTER = "local-cluster[1,1,1024]"
#: Starts in half the time.
_QUICK = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
#: Programs below which tasks run: executors, and in a local session Spark's Python processes.
_EXECUTOR, _WORKER = _PARENTS = ("CoarseGrainedExecutorBackend", "pyspark.daemon")
#: A credential process that notes which programs it was called by.
_ISSUE = """
import pathlib, sys, psutil
folder = pathlib.Path(sys.argv[1])
parents = " ".join(" ".join(process.cmdline()) for process in psutil.Process().parents())
with (folder / "asked").open("a") as asked:
    asked.write(parents.replace("\\n", " ") + "\\n")
print((folder / "issued.json").read_text())
"""
_READ = """
import json, sys
from streamfold.spark import local_session
spark = local_session("reader", cores=1, quick=True)
rows = spark.read.format("streamfold-archive").load(sys.argv[1]).select("id").collect()
print(json.dumps(sorted(row.id for row in rows)))
spark.stop()
"""


class Asked:
    """Who has asked for the credentials of the profile."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "asked"
        self._file.touch()

    def take(self) -> set[str]:
        """Where the calls since the last time came from."""
        lines = self._file.read_text().splitlines()
        self._file.write_text("")
        return {next((name for name in _PARENTS if name in line), "driver") for line in lines}


@pytest.fixture
def asked(tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """A profile in files that only variables name."""
    prepare_home(tmp_path, monkeypatch)
    (tmp_path / "issued.json").write_text(json.dumps({"Version": 1, **issued("PROFILE")}))
    (tmp_path / "issue.py").write_text(_ISSUE)
    (tmp_path / "config").write_text(
        f"[profile archive]\nregion = {gate.region}\nendpoint_url = {gate.endpoint}\n"
        f"credential_process = {sys.executable} {tmp_path / 'issue.py'} {tmp_path}\n"
    )
    (tmp_path / "credentials").touch()
    monkeypatch.setenv("SPARK_HOME", str(_spark_home(tmp_path / "spark")))
    monkeypatch.setenv("AWS_PROFILE", "archive")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    return Asked(tmp_path)


def _spark_home(folder: Path) -> Path:
    """A home of Spark that executors may write to: their folders are in it."""
    folder.mkdir()
    for item in Path(pyspark.__file__).parent.iterdir():
        (folder / item.name).symlink_to(item)
    (folder / "conf").mkdir()
    settings = (f"spark.executor.extraJavaOptions {_QUICK}",)
    (folder / "conf/spark-defaults.conf").write_text("\n".join(settings))
    return folder


def test_a_profile_is_all_that_a_writer_and_a_reader_of_an_archive_on_s3_need(
    server: Server, fresh: Callable[[], str], gate: Gate, asked: Asked, tmp_path: Path
) -> None:
    stream, bodies = fresh(), list(Feed(11).changes(40))
    feed(server, stream, bodies)
    file, log = tmp_path / "writer.toml", tmp_path / "writer.log"
    local = configuration(server, stream, tmp_path)
    file.write_text(local.replace(f'type = "local", path = "{tmp_path}"', _place(gate)))
    with Process(file, log, master=MASTER) as process:
        wait_for(process.status, lambda status: status["manifest_head"] == "39")
        process.stop()
    assert asked.take() >= {"driver", _EXECUTOR}, log.read_text()

    command = [sys.executable, "-c", _READ, f"s3://{gate.bucket}/items"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert json.loads(ended.stdout.splitlines()[-1]) == sorted(replayed(bodies))
    assert _WORKER in asked.take()
    assert {*gate.used} == {"PROFILE"}


def _place(gate: Gate) -> str:
    return f'type = "s3", bucket = "{gate.bucket}"'
