"""The driver is killed at random, and the archive always equals a replay of the stream."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.proving import PROVING
from tests.spark.server import Server
from tests.spark.snapshotter.feeding import Feed, feed
from tests.spark.snapshotter.process import OURS, Process, configuration
from tests.spark.snapshotter.tables import check_every_boundary, manifest_of
from tests.spark.snapshotter.waiting import wait_for

#: Seconds: Spark starts three times, each in a process of its own.
pytestmark = pytest.mark.timeout(900)

SEED = 20260603
#: Each costs a start of Spark.
KILLS = 20 if PROVING else 2
#: Seconds after a commit within which a process is killed: into the next diffs and folds.
WINDOW = 2.5


def test_the_archive_equals_a_replay_after_kills_at_any_point(
    server: Server, fresh: Callable[[], str], tmp_path: Path
) -> None:
    """A failure names the seed; the moments of the kills depend on the machine, too."""
    rng, changes = random.Random(SEED), Feed(SEED)
    stream, folder, log = fresh(), tmp_path / "published", tmp_path / "writer.log"
    file = tmp_path / "writer.toml"
    file.write_text(configuration(server, stream, folder))
    bodies: list[bytes] = []

    def append(count: int) -> None:
        more = list(changes.changes(count))
        feed(server, stream, more)
        bodies.extend(more)

    append(300)
    for number in range(KILLS):
        seen = commits(folder / "items")
        with Process(file, log) as process:
            # The first one goes before its first commit, the others in the middle of their work.
            while number and commits(folder / "items") <= seen + 1:
                append(50)
                time.sleep(0.1)
            time.sleep(rng.uniform(0, WINDOW))
            process.kill()
        if (folder / "items" / "manifest.json").exists():
            assert check_every_boundary(folder / "items", bodies), f"{SEED=} {number=}"
    with Process(file, log) as process:
        append(200)
        wait_for(lambda: process.status()["ready"], bool)
        append(10)
        assert process.hang_up() == 0, log.read_text()[-3000:]
    noise = [line for line in log.read_text().splitlines() if not OURS.fullmatch(line)]
    assert noise == []  # neither Spark's banner nor tracebacks of its workers
    assert manifest_of(folder / "items").head_position == str(len(bodies) - 1)
    assert check_every_boundary(folder / "items", bodies) > KILLS, f"{SEED=}"


def test_the_end_of_java_ends_the_process_although_records_wait(
    server: Server, fresh: Callable[[], str], tmp_path: Path
) -> None:
    file, log, stream = tmp_path / "writer.toml", tmp_path / "writer.log", fresh()
    file.write_text(configuration(server, stream, tmp_path / "published"))
    with Process(file, log) as process:
        wait_for(lambda: process.status()["ready"], bool)
        feed(server, stream, Feed(1).changes(10))
        process.java().kill()
        assert process.wait() == 1
    assert '"code": "java_ended"' in log.read_text().splitlines()[-1]


def commits(folder: Path) -> int:
    """How often the manifest was committed; opening the table is a commit, too."""
    return manifest_of(folder).commit_number if (folder / "manifest.json").exists() else 0
