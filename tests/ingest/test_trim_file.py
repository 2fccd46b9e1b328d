"""The file by which `publish` has the ingester trim its streams."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from streamfold.archive.write.layout import STREAMFOLD
from streamfold.cli.publishing.trimming import TrimFile
from streamfold.cli.servers.ingest import trim_points
from streamfold.snapshotter.status.table_status import State, TableStatus

LAYOUT = STREAMFOLD


def status(head: int) -> TableStatus:
    return TableStatus(
        table="t", stream="public.t", state=State.RUNNING, manifest_head=LAYOUT.position(head)
    )


@pytest.mark.parametrize("content", ["", '{"public.t": 1', '{"public.t": "1"}'])
def test_a_trim_file_that_is_not_readable_trims_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    file = tmp_path / "trim.json"
    file.write_text(content)
    assert trim_points(file) == {}
    assert f"--trim-file {file}" in caplog.text
    file.write_text('{"public.t": 1}')
    assert trim_points(file) == {"public.t": 1}


def test_a_trim_file_that_does_not_exist_trims_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert trim_points(tmp_path / "absent") == {}
    assert not caplog.records


def test_a_trim_file_that_cannot_be_written_is_written_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    now = 0.0
    file = tmp_path / "trim.json"
    obstacle = tmp_path / "trim.draft"
    trim = TrimFile(file, LAYOUT, lambda: now)
    obstacle.mkdir()
    trim.update([status(5000)])
    trim.update([status(5001)])
    assert len(caplog.records) == 1
    assert "cannot be written" in caplog.text
    obstacle.rmdir()
    now = 60.0
    trim.update([status(5001)])
    assert json.loads(file.read_text()) == {"public.t": 5002}
