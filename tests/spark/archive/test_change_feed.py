"""Changes between two positions as rows, without starting Spark."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pytest

from streamfold.archive import ChainGapError, PositionInvalidError, PositionPrunedError
from streamfold.archive.formats import FORMATS
from tests.archive.golden_table import FOLDER
from tests.archive.tables import START

from .conftest import Written
from .reading import PlainRead, as_spark
from .tables import BUCKETS, Row, State, folder_at, rows, write_history


def feed(uri: object, since: object, **options: object) -> list[Row]:
    given = {"readChangeFeed": "true", "startingPosition": since, **options}
    found: list[Row] = PlainRead(uri, **given).table().to_pylist()
    return found


def applied(state: State, changes: list[Row]) -> dict[int, Row]:
    """The table after the changes, as a consumer of the changes alone would keep it."""
    found: dict[int, Row] = {r["id"]: r for r in _plain(state)}
    order = sorted(changes, key=lambda c: (int(c["_to_position"]), c["_action"] != "TRUNCATE"))
    for change in order:
        match change["_action"]:
            case "TRUNCATE":
                found.clear()
            case "DELETE":
                assert repr(found.pop(change["id"])) == repr(change["before"])
            case "INSERT" | "UPDATE" as action:
                assert (change["id"] in found) == (action == "UPDATE")
                found[change["id"]] = change["after"]
    return found


def _plain(state: State) -> list[Row]:
    table = as_spark(pa.Table.from_batches(rows(state.values())))
    found: list[Row] = table.to_pylist()
    return found


@pytest.mark.parametrize("buckets", [BUCKETS, None])
def test_changes_lead_from_one_position_to_another_across_bases(
    written: Written, buckets: int | None
) -> None:
    folder, history = written(buckets=buckets, form="parquet")
    found = feed(folder, 9)
    assert {(c["_from_position"], c["_to_position"], c["_epoch"]) for c in found} == {
        ("9", "14", 1), ("14", "20", 1), ("20", "31", 2), ("31", "40", 2),
    }  # fmt: skip
    kept = applied(history.states["9"], found)
    wanted = {row["id"]: row for row in _plain(history.states["40"])}
    assert repr(sorted(kept.items())) == repr(sorted(wanted.items()))
    some = feed(folder, 14, endingPosition=31)
    within = [change for change in found if change["_from_position"] in ("14", "20")]
    assert repr(some) == repr(within)
    assert feed(folder, 40) == []


def test_columns_and_filters_narrow_the_feed(written: Written) -> None:
    folder, _ = written(buckets=BUCKETS, form="parquet")
    whole = feed(folder, 9, columns="name,id")
    assert list(whole[0]) == [
        "_action", "_from_position", "_to_position", "_epoch", "id", "before", "after",
    ]  # fmt: skip
    assert all(set(c["after"] or c["before"]) == {"id", "name"} for c in whole)
    tests = '[["_action", "=", "DELETE"], ["id", ">", 5]]'
    deleted = feed(folder, 9, columns="name,id", filters=tests)
    assert deleted == [c for c in whole if c["_action"] == "DELETE" and c["id"] > 5]


def test_times_stand_for_what_was_published_by_then(written: Written) -> None:
    folder, _ = written(buckets=BUCKETS, form="parquet")

    def minute(number: float) -> str:
        return (START + timedelta(minutes=number)).isoformat()

    given = {"readChangeFeed": "true", "columns": "id"}
    between = PlainRead(
        folder, startingTimestamp=minute(2.5), endingTimestamp=minute(5.5), **given
    ).table()
    assert set(between["_to_position"].to_pylist()) == {"20", "31"}


@pytest.mark.parametrize("marked", [True, False])
def test_a_truncate_is_one_row_whatever_the_number_of_files(tmp_path: Path, marked: bool) -> None:
    history = write_history(folder_at(tmp_path), buckets=BUCKETS, marked=marked, size=20)
    history.diff(dict(history.states["9"]), "50", truncate=True)
    found = feed(tmp_path, 40)
    [cleared] = [change for change in found if change["_action"] == "TRUNCATE"]
    assert cleared["id"] is cleared["before"] is cleared["after"] is None
    assert sorted(applied(history.states["40"], found)) == sorted(history.states["9"])


@pytest.mark.parametrize("format_id", FORMATS.ids())
def test_changes_of_older_archives_are_read_in_every_format(format_id: str) -> None:
    found = feed(FOLDER, 9, formats=format_id)
    assert [change["_action"] for change in found] == [
        "UPDATE", "DELETE", "DELETE", "INSERT", "INSERT", "TRUNCATE", "INSERT",
    ]  # fmt: skip


def test_positions_that_are_gone_or_never_existed_are_reported(written: Written) -> None:
    folder, _ = written(buckets=BUCKETS, form="parquet")
    with pytest.raises(PositionPrunedError, match="goes back to '9'; begin there or later"):
        feed(folder, 8)
    with pytest.raises(ChainGapError, match="begin and end where artifacts do"):
        feed(folder, 15)
    with pytest.raises(ChainGapError, match="begin and end where artifacts do"):
        feed(folder, 14, endingPosition=30)
    with pytest.raises(PositionInvalidError, match="after the head '40'"):
        feed(folder, 14, endingPosition=41)
    with pytest.raises(PositionInvalidError, match="not a sequence number"):
        feed(folder, "0/1")
