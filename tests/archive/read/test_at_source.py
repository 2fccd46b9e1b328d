"""Tables at a position of the database that they come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamfold.archive import (
    PositionInvalidError,
    PositionPrunedError,
    read_manifest,
    write_manifest,
)
from streamfold.errors import InvalidError, StreamfoldError
from tests.archive.reading import (
    HISTORY,
    commits,
    folder_at,
    names_by_id,
    reopened,
    write_commits,
    write_history,
)
from tests.archive.tables import open_writer, rows


@pytest.mark.parametrize(
    ("lsn", "position"),
    [
        ("0/10", "9"),
        ("0/1f", "9"),
        ("0/2F", "14"),
        ("0/FFFFFFFE", "14"),
        ("0/FFFFFFFF", "20"),
        ("1/8", "25"),
        ("A/0", "25"),
        ("A/2", "31"),
        ("FFFFFFFF/0", "31"),
    ],
)
async def test_the_newest_table_without_a_later_commit_is_rebuilt(
    tmp_path: Path, lsn: str, position: str
) -> None:
    await write_commits(tmp_path)
    archive = await reopened(tmp_path)
    assert archive.plan(at_source=lsn).position == position
    assert names_by_id(await archive.table(at_source=lsn)) == HISTORY[position]


@pytest.mark.parametrize(
    ("lsn", "problem", "words"),
    [
        ("0/20", PositionInvalidError, ["0/20 to 0/2F", "0/10 or 0/2F"]),
        ("1/3", PositionInvalidError, ["1/0 to 1/8", "0/FFFFFFFF or 1/8"]),
        ("A/1", PositionInvalidError, ["A/1 to A/2", "1/8 or A/2"]),
        ("0/F", PositionPrunedError, ["goes back to 0/10"]),
        ("17", PositionInvalidError, ["is not an LSN"]),
    ],
)
async def test_a_position_that_no_artifact_ends_at_is_refused_with_the_nearest(
    tmp_path: Path, lsn: str, problem: type[StreamfoldError], words: list[str]
) -> None:
    await write_commits(tmp_path)
    archive = await reopened(tmp_path)
    with pytest.raises(problem) as raised:
        archive.plan(at_source=lsn)
    assert [word for word in words if word not in raised.value.message] == []


async def test_an_archive_without_source_positions_says_so(tmp_path: Path) -> None:
    await write_history(tmp_path)
    archive = await reopened(tmp_path)
    assert archive.plan().source_position is None
    with pytest.raises(PositionInvalidError, match="no positions of its source"):
        archive.plan(at_source="0/10")
    with pytest.raises(InvalidError, match="give one of them"):
        archive.plan(at_source="0/10", position="9")


async def test_a_table_whose_first_copy_is_not_complete_has_no_source_position_yet(
    tmp_path: Path,
) -> None:
    writer = await open_writer(folder_at(tmp_path))
    copying = commits(None, "0/10", copying=True)
    await writer.write_base(rows({1: "a"}), "8", reason="first", source_range=copying)
    with pytest.raises(PositionInvalidError, match="is not complete"):
        (await reopened(tmp_path)).plan(at_source="0/10")


async def test_source_ranges_are_stored_as_they_were_given(tmp_path: Path) -> None:
    await write_commits(tmp_path)
    stored = (tmp_path / "manifest.json").read_bytes()
    found = read_manifest(stored)
    assert write_manifest(found) == stored
    assert [a.source_range and a.source_range.last for a in found.artifacts] == [
        "0/10", "0/10", "0/2F", "0/FFFFFFFF", "1/8", "1/8", "A/2",
    ]  # fmt: skip
    assert [a.is_base for a in found.artifacts if a.source_range and not a.source_range.first] == [
        True,
        True,
    ]
