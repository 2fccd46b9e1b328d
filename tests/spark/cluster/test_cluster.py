"""The snapshotter on a cluster: the same job, the same archive, whichever process dies.

Workers have no Streamfold installed: tasks run what the driver shipped.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.spark.cluster.cluster import WORKERS, Cluster
from tests.spark.cluster.driver import SMALL, Driver
from tests.spark.cluster.mortal import EXECUTOR, WORKER
from tests.spark.server import Server
from tests.spark.snapshotter.feeding import Feed, feed
from tests.spark.snapshotter.process import configuration
from tests.spark.snapshotter.tables import check_every_boundary, manifest_of
from tests.spark.snapshotter.waiting import wait_for

#: Seconds for a test: five processes of Java and a dozen of Python start on two cores.
pytestmark = pytest.mark.timeout(900)

SEED = 20260719
#: Seconds for one step, far above what it takes.
TIMEOUT = 300.0
_CONFS = [word for name, value in SMALL.items() for word in ("--conf", f"{name}={value}")]
#: What the name of a part has of the task that wrote it; before it is the plan of the job.
_TASK = re.compile(r"t\d+(?=-b\d+\.)")
_BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    running = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        yield running.start()
    finally:
        running.stop()


class Published:
    """A stream of changes, the archive that is made of it, and the writer that makes it."""

    def __init__(self, server: Server, stream: str, folder: Path, cluster: Cluster) -> None:
        self._server, self._stream, self._cluster = server, stream, cluster
        self._changes, self.bodies = Feed(SEED), list[bytes]()
        self.folder = folder
        self.file = folder / "writer.toml"
        self.file.write_text(configuration(server, stream, folder / "published"))
        self.driver: Driver | None = None

    def append(self, count: int) -> None:
        more = list(self._changes.changes(count))
        feed(self._server, self._stream, more)
        self.bodies += more

    def start(self, *command: str | Path) -> Driver:
        self.driver = Driver(command, self._cluster, self.folder / "driver.log")
        return self.driver

    def wait_until_caught_up(self) -> dict[str, Any]:
        driver, last = self.driver, str(len(self.bodies) - 1)
        assert driver is not None
        return wait_for(
            driver.status, lambda seen: seen["ready"] and seen["manifest_head"] == last, TIMEOUT
        )

    def attempts(self) -> dict[str, list[int]]:
        """How many tasks wrote each file of each plan, whether or not the archive has it."""
        names = [file.name for file in (self.folder / "published").rglob("*-b*.*")]
        found: dict[str, list[int]] = {}
        for name, count in Counter(_TASK.sub("", name) for name in names).items():
            kind = "base" if name.startswith("snapshot") else name.rpartition(".")[2]
            found.setdefault(kind, []).append(count)
        return {kind: sorted(counts) for kind, counts in found.items()}

    def check(self) -> None:
        """The archive ends where the stream does, and equals it there and at every artifact."""
        table = self.folder / "published" / "items"
        assert manifest_of(table).head_position == str(len(self.bodies) - 1)
        assert check_every_boundary(table, self.bodies), f"{SEED=}"


@pytest.fixture
def published(
    server: Server, fresh: Callable[[], str], tmp_path: Path, cluster: Cluster
) -> Iterator[Published]:
    made = Published(server, fresh(), tmp_path, cluster)
    yield made
    if made.driver is not None:
        made.driver.kill()
    wait_for(cluster.applications, lambda names: not names, TIMEOUT)


def test_with_a_master_workers_do_the_work_and_may_die_in_the_middle_of_it(
    cluster: Cluster, published: Published
) -> None:
    """Spark repeats tasks of dead processes, and the query continues, until Spark itself dies."""
    cluster.order_death(WORKER)
    published.append(300)
    run = (_BIN / "streamfold", "snapshotter", "run", "--json", "--master", cluster.url)
    driver = published.start(*run, "--config", published.file, *_CONFS)
    published.wait_until_caught_up()
    assert not cluster.awaits_death()
    assert cluster.applications() == ["streamfold snapshotter"]
    assert [worker["coresused"] for worker in cluster.workers()] == [1] * WORKERS
    assert cluster.is_at_work()

    before = {process.pid for process in cluster.executors()}
    cluster.order_death(EXECUTOR)
    published.append(100)
    published.wait_until_caught_up()
    assert not cluster.awaits_death()
    assert before - {process.pid for process in cluster.executors()}

    epoch = driver.status()["epoch"]
    cluster.order_death(WORKER)
    driver.request_snapshot()  # a fold
    wait_for(driver.status, lambda found: found["epoch"] > epoch, TIMEOUT)
    assert not cluster.awaits_death()

    driver.child("java").kill()
    assert driver.wait() == 1
    error = json.loads(driver.log.read_text().splitlines()[-1])["error"]
    assert error["code"] == "java_ended"
    published.check()
    # Each of the dead left a file. A task that takes records in plans its artifact itself, so its next
    # attempt wrote another; the fold's plan is the driver's, so its next attempt wrote the same. On a
    # slow machine a table may leave its batch, which is one more attempt.
    attempts, fewest = published.attempts(), {"base": [1, 1, 2], "jsonl": [1, 1], "parquet": [1]}
    assert {kind: attempts[kind][-len(least) :] for kind, least in fewest.items()} == fewest


def test_spark_submit_runs_it_with_a_package_that_no_machine_has_installed(
    cluster: Cluster, published: Published
) -> None:
    absent = subprocess.run([cluster.python, "-c", "import pyspark, polars, streamfold"], stderr=-1)
    assert b"No module named 'streamfold'" in absent.stderr
    job = published.folder / "job"
    pack = (_BIN / "streamfold", "snapshotter", "pack", "--json", job)
    packed = json.loads(subprocess.run(pack, stdout=-1, check=True).stdout)
    published.append(300)
    submit = (_BIN / "spark-submit", "--master", cluster.url, *_CONFS)
    driver = published.start(
        *(*submit, "--py-files", packed["package"]),
        *(packed["script"], "--json", "--config", published.file),
    )
    published.wait_until_caught_up()
    published.append(100)
    driver.child(f"{cluster.python} {packed['script']}").send_signal(signal.SIGTERM)
    assert driver.wait() == 0, driver.log.read_text()[-3000:]
    published.check()
