"""The guide to PostgreSQL, followed as a reader does, with a PostgreSQL of the test's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.docs.markdown import blocks_of
from tests.docs.test_reading import ROOT, WRONG, lend, reading
from tests.ingest.postgres import binaries, temporary_postgres

GUIDE = ROOT / "docs/guides/postgres.md"


@pytest.mark.timeout(1800)  # dozens of commands, some of which start Spark
def test_the_guide_to_postgres_can_be_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "reader"
    folder.mkdir()
    lend(tmp_path / "lent")
    with temporary_postgres() as uri:
        monkeypatch.setenv("STREAMFOLD_POSTGRES_DSN", uri)
        monkeypatch.setenv("PATH", f"{os.environ['PATH']}:{binaries()}")
        with reading(folder, tmp_path / "lent") as reader:
            for block in blocks_of(GUIDE):
                if "ingest drop" in block.text:
                    reader.interrupt("ingest")
                shown = reader.follow(block)
                wrong = [text for text in WRONG if text in shown]
                assert not wrong, f"{GUIDE.name}:{block.line} showed {wrong}:\n{shown}"
                expected = block.how.get("expect", "")
                assert expected in shown, f"{block.line} did not show {expected!r}:\n{shown}"
