"""Files that an earlier version wrote, which every later one must read.

`python -m tests.archive.formats.test_golden` writes those that are missing, and never another.
"""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from streamfold.archive.formats import FORMATS, Format, format_of
from streamfold.testing.format_kit import assert_same, read, write
from streamfold.testing.format_samples import ORDERS, changes_of, orders

FOLDER = Path(__file__).parent / "golden"
ROWS = orders(20)
CHANGES = changes_of(ORDERS, ROWS)

EVERY_FORMAT = [
    *(format_of(name) for name in FORMATS.ids()),
    format_of("jsonl", "gzip"),
    format_of("jsonl", "zstd"),
]
#: Formats whose bytes are ours alone: no library's version has a say in them.
OURS = [
    chosen for chosen in EVERY_FORMAT if chosen.id != "parquet" and chosen.compression == "none"
]


def paths(chosen: Format) -> tuple[Path, Path]:
    return FOLDER / f"rows{chosen.extension}", FOLDER / f"changes{chosen.extension}"


@pytest.mark.parametrize("chosen", EVERY_FORMAT, ids=lambda f: f.extension)
def test_files_of_earlier_versions_are_read(chosen: Format) -> None:
    rows, changes = (io.BytesIO(path.read_bytes()) for path in paths(chosen))
    assert_same(read(chosen.read_rows(rows, ORDERS), ORDERS.arrow), ROWS)
    assert_same(read(chosen.read_changes(changes, ORDERS), ORDERS.changes), CHANGES)


@pytest.mark.parametrize("chosen", OURS, ids=lambda f: f.extension)
def test_the_same_rows_still_give_the_same_bytes(chosen: Format) -> None:
    rows, changes = paths(chosen)
    assert write(chosen.write_rows, ORDERS, [ROWS])[0] == rows.read_bytes()
    assert write(chosen.write_changes, ORDERS, [CHANGES])[0] == changes.read_bytes()


def write_missing() -> None:
    for chosen in EVERY_FORMAT:
        rows, changes = paths(chosen)
        if not rows.exists():
            rows.write_bytes(write(chosen.write_rows, ORDERS, [ROWS])[0])
        if not changes.exists():
            changes.write_bytes(write(chosen.write_changes, ORDERS, [CHANGES])[0])


if __name__ == "__main__":
    write_missing()
