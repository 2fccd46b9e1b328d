from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamfold.archive.errors import PositionInvalidError
from streamfold.archive.manifest.encoding import artifact_path, published_path
from streamfold.archive.manifest.positions import LSN, SEQ_NUM, PositionOrder, parse_time
from streamfold.blob.blob_store import check_key
from streamfold.errors import InvalidError


@pytest.mark.parametrize(
    ("order", "bad"),
    [
        (SEQ_NUM, ["", "-2", "01", "1.0", " 1", "1\n", "٣", "0/1", "x", None, 7]),
        (LSN, ["0", "/", " ", "0/", "/1", "G/1", "0/123456789", "0/1 ", "0/1/2", None, 7]),
    ],
)
def test_text_that_is_not_a_position_is_refused(order: PositionOrder, bad: list[Any]) -> None:
    for position in bad:
        with pytest.raises(PositionInvalidError, match="position"):
            order.rank(position)


def test_before_the_first_record_comes_before_all_others() -> None:
    assert SEQ_NUM.rank("-1") < SEQ_NUM.rank("0") < SEQ_NUM.rank("10") < SEQ_NUM.rank(str(2**64))
    assert LSN.rank("") < LSN.rank("0/0")
    assert LSN.rank("0/A") == LSN.rank("0/a") < LSN.rank("0/FFFFFFFF") < LSN.rank("1/0")


@pytest.mark.parametrize("text", ["0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59"])
def test_a_time_outside_the_calendar_is_refused(text: str) -> None:
    with pytest.raises(InvalidError, match="RFC 3339"):
        parse_time(text)


def test_an_empty_lsn_names_no_file() -> None:
    with pytest.raises(PositionInvalidError, match="begin at 0/0"):
        LSN.sortable("")


@given(st.integers(-1, 2**64 - 1), st.integers(-1, 2**64 - 1))
def test_keys_sort_as_seq_nums_do(left: int, right: int) -> None:
    keys = [SEQ_NUM.sortable(str(number)) for number in (left, right)]
    assert (keys[0] < keys[1]) == (left < right)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_keys_sort_as_lsns_do(left: int, right: int) -> None:
    texts = [f"{number >> 32:X}/{number & 0xFFFFFFFF:x}" for number in (left, right)]
    keys = [LSN.sortable(text) for text in texts]
    assert (keys[0] < keys[1]) == (LSN.rank(texts[0]) < LSN.rank(texts[1])) == (left < right)


def path(**changed: Any) -> str:
    given: dict[str, Any] = {
        "epoch": 3,
        "from_position": "9",
        "to_position": "12",
        "attempt": "a1b2c3d4",
        "extension": ".jsonl",
    }
    return artifact_path(SEQ_NUM, **given | changed)


def test_paths_name_epoch_positions_and_attempt() -> None:
    diff = "epoch=3/diff-00000000000000000009-00000000000000000012-a1b2c3d4.jsonl"
    assert path() == diff
    assert path(from_position=None, bucket=7, extension=".parquet") == (
        "epoch=3/snapshot-00000000000000000012-a1b2c3d4-b00007.parquet"
    )
    check_key(path(from_position="-1", to_position="0"))
    with pytest.raises(InvalidError, match="attempt"):
        path(attempt="../up")


class OwnOrder:
    """An order that does not care what its positions look like in a key."""

    name = "own"

    def rank(self, position: str) -> int:
        return len(position)

    def sortable(self, position: str) -> str:
        return position


def test_an_order_of_ones_own_cannot_leave_the_folder() -> None:
    name = artifact_path(
        OwnOrder(),
        epoch=1,
        from_position=None,
        to_position="../a b:é",
        attempt="a1b2c3d4",
        extension=".pb",
    )
    assert name == "epoch=1/snapshot-.._a_b__-a1b2c3d4.pb"
    check_key(name)


def test_paths_of_other_writers_follow_the_published_rule() -> None:
    assert published_path("protobuf", epoch=2, from_position="0/1", to_position="0/A:B C") == (
        "epoch=2/diff-0_1-0_A_B_C.pb"
    )
    assert published_path("jsonl", epoch=1, from_position=None, to_position="") == (
        "epoch=1/snapshot-0.jsonl"
    )
    with pytest.raises(InvalidError, match="'avro' has no path"):
        published_path("avro", epoch=1, from_position=None, to_position="1")
