"""A table whose decoder, format, destination and sink come from another package."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import Shell
from tests.distributions import install_example
from tests.spark.server import BASIN, Server
from tests.spark.snapshotter.feeding import feed
from tests.spark.snapshotter.process import Process
from tests.spark.snapshotter.waiting import wait_for


def change(kind: str, **data: Any) -> bytes:
    """A record of Maxwell's."""
    return json.dumps({"database": "shop", "table": "items", "type": kind, "data": data}).encode()


def test_a_table_is_published_and_read_with_the_extensions_of_an_installed_package(
    server: Server, fresh: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Processes that Spark starts get the path as well: the package is installed there, too.
    monkeypatch.setenv("PYTHONPATH", str(install_example(tmp_path / "site-packages")))
    stream, disk, events = fresh(), tmp_path / "disk", tmp_path / "events.jsonl"
    disk.mkdir()
    (disk / ".mounted").touch()
    file, log = tmp_path / "snapshotter.toml", tmp_path / "snapshotter.log"
    file.write_text(
        f"""
        source = {{ server = "{server.url}", basin = "{BASIN}", stream = "{stream}", table = "items" }}
        decoder = {{ kind = "maxwell", table = "items" }}
        diff = {{ interval = "200ms" }}
        destinations = [{{ type = "disk", mount = "{disk}" }}]
        formats = {{ snapshot = ["jsonl-xz"], diff = ["jsonl-xz"] }}
        events = [{{ type = "file", path = "{events}" }}]
        http = {{ port = 0, host = "127.0.0.1" }}
        """
    )
    feed(server, stream, [change("insert", id=1, name="pear"), change("insert", id=2, name="fig")])
    with Process(file, log) as process:
        wait_for(lambda: process.status()["ready"], bool)
        more = [change("update", id=1, name="plum"), change("delete", id=2, name="fig")]
        feed(server, stream, more)
        wait_for(lambda: process.status()["position"], lambda position: position == 3)
        wait_for(events.exists, bool)
        wait_for(lambda: events.read_text().splitlines(), lambda lines: len(lines) >= 2)
        assert process.stop() == 0, log.read_text()[-3000:]
    restored = Shell({})("archive", "restore", f"disk://{disk}/archives/items")
    assert restored.stderr == ""
    assert restored.objects == [{"id": 1, "name": "plum"}]
    announced = [json.loads(line)["formats"] for line in events.read_text().splitlines()]
    assert all(list(found) == ["jsonl-xz"] for found in announced)
