"""Net changes: the rules in a table, and all of them against a plain dict."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamfold.archive.formats import ParquetFormat
from streamfold.snapshotter.decoding import decoded_schema, parse_ddl
from streamfold.snapshotter.net_changes import net_changes, net_schema

PAIRS = parse_ddl("a STRING NOT NULL, b INT NOT NULL, x INT, y STRING", ["a", "b"])
Key = tuple[str, int]
Row = dict[str, Any]


def row(key: Key, x: int | None, y: str | None = None) -> Row:
    return {"a": key[0], "b": key[1], "x": x, "y": y}


def change(op: str, key: Key | None = None, **more: Any) -> Row:
    names = None if key is None else {"a": key[0], "b": key[1]}
    usual: Row = {
        "op": op,
        "key": names,
        "before": None,
        "after": None,
        "unchanged": [],
        "txn": None,
    }
    return usual | more


def run(changes: list[Row]) -> pa.Table:
    rows = [{"seq_num": number, **item} for number, item in enumerate(changes)]
    return pa.Table.from_pylist(rows, schema=decoded_schema(PAIRS))


def net(*changes: Row) -> list[Row]:
    found: list[Row] = net_changes([run(list(changes))], PAIRS).to_pylist()
    return found


K: Key = ("k", 1)
OLD, MID, NEW = row(K, 1), row(K, 2), row(K, 3)
INSERT = change("insert", K, after=MID)
READ = change("read", K, after=MID)
UPDATE = change("update", K, before=OLD, after=MID)
LATER = change("update", K, before=MID, after=NEW)
DELETE = change("delete", K, before=OLD)
TRUNCATE = change("truncate")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([INSERT], ("INSERT", None, MID)),
        ([READ], ("INSERT", None, MID)),
        ([UPDATE], ("UPDATE", OLD, MID)),
        ([DELETE], ("DELETE", OLD, None)),
        ([INSERT, LATER], ("INSERT", None, NEW)),
        ([UPDATE, LATER], ("UPDATE", OLD, NEW)),
        ([INSERT, DELETE], ("DELETE", None, None)),
        ([UPDATE, DELETE], ("DELETE", OLD, None)),
        ([DELETE, INSERT], ("UPDATE", OLD, MID)),
        ([DELETE, INSERT, LATER], ("UPDATE", OLD, NEW)),
        ([DELETE, DELETE], ("DELETE", OLD, None)),
        ([INSERT, DELETE, READ], ("INSERT", None, MID)),
    ],
)
def test_changes_of_one_key_become_one(changes: list[Row], expected: tuple[Any, ...]) -> None:
    (found,) = net(*changes)
    assert (found["action"], found["before"], found["after"]) == expected
    assert found["key"] == {"a": "k", "b": 1}


@pytest.mark.parametrize(
    ("changes", "actions"),
    [
        ([TRUNCATE], ["TRUNCATE"]),
        ([INSERT, TRUNCATE], ["TRUNCATE"]),
        ([TRUNCATE, INSERT], ["TRUNCATE", "INSERT"]),
        ([UPDATE, TRUNCATE, LATER], ["TRUNCATE", "INSERT"]),
        ([TRUNCATE, INSERT, DELETE], ["TRUNCATE"]),
        ([TRUNCATE, DELETE], ["TRUNCATE"]),
        ([TRUNCATE, INSERT, TRUNCATE, READ], ["TRUNCATE", "INSERT"]),
        ([], []),
    ],
)
def test_a_truncate_comes_first_and_undoes_what_was_before(
    changes: list[Row], actions: list[str]
) -> None:
    found = net(*changes)
    assert [item["action"] for item in found] == actions
    assert all(item["before"] is None for item in found)


def test_unchanged_columns_come_from_an_earlier_row_of_the_run() -> None:
    sparse = change("update", K, after=row(K, 9), unchanged=["y"])
    (found,) = net(change("insert", K, after=row(K, 1, "kept")), sparse)
    assert (found["after"], found["unchanged"]) == (row(K, 9, "kept"), [])


def test_unchanged_columns_that_the_run_never_sent_stay_marked() -> None:
    both = change("update", K, after=row(K, None), unchanged=["x", "y"])
    one = change("update", K, after=row(K, 9), unchanged=["y"])
    (found,) = net(one, both)
    assert (found["after"], found["unchanged"]) == (row(K, 9), ["y"])


def test_a_null_that_was_sent_is_a_value() -> None:
    sparse = change("update", K, after=row(K, 9), unchanged=["y"])
    (found,) = net(change("update", K, after=row(K, 1)), sparse)
    assert found["unchanged"] == []


def test_changes_are_sorted_by_their_typed_key() -> None:
    keys = [("b", 2), ("a", 10), ("a", 9), ("B", 1), ("", 0)]
    found = net(*(change("insert", key, after=row(key, 1)) for key in keys))
    assert [(f["key"]["a"], f["key"]["b"]) for f in found] == sorted(keys)


def test_keys_that_look_alike_are_not_one() -> None:
    schema = parse_ddl("a STRING NOT NULL, b STRING NOT NULL", ["a", "b"])
    keys = [{"a": "x y", "b": "z"}, {"a": "x", "b": "y z"}]
    rows = [
        {"seq_num": n, "op": "insert", "key": k, "after": k, "unchanged": []}
        for n, k in enumerate(keys)
    ]
    table = pa.Table.from_pylist(rows, schema=decoded_schema(schema))
    assert len(net_changes([table], schema)) == 2


def test_runs_of_older_schemas_are_brought_together() -> None:
    older = parse_ddl("a STRING NOT NULL, b INT NOT NULL, x TINYINT", ["a", "b"])
    key = {"a": "k", "b": 1}
    first = {"seq_num": 1, "op": "insert", "key": key, "after": key | {"x": 5}, "unchanged": []}
    truncate = {"seq_num": 0, "op": "truncate", "unchanged": []}
    runs = [
        pa.Table.from_pylist([truncate], schema=decoded_schema(None)),
        pa.Table.from_pylist([first], schema=decoded_schema(older)),
        run([change("update", K, after=row(K, 6, "new"))]),
    ]
    found = net_changes(runs, PAIRS)
    assert found.schema == net_schema(PAIRS)
    assert [item["action"] for item in found.to_pylist()] == ["TRUNCATE", "INSERT"]
    assert found.to_pylist()[1]["after"] == row(K, 6, "new")


KEYS = st.tuples(st.sampled_from(["", "a", "b"]), st.integers(0, 2))
STEPS = st.one_of(
    st.tuples(
        st.sampled_from(["insert", "update", "read"]), KEYS, st.none() | st.integers(0, 9),
        st.sampled_from([None, "p", "q"]), st.sets(st.sampled_from(["x", "y"])), st.booleans(),
    ),
    st.tuples(st.just("delete"), KEYS, st.booleans()),
    st.tuples(st.just("truncate")),
)  # fmt: skip


class Model:
    """A table as a dict, and the last values that a row ever had."""

    def __init__(self, rows: dict[Key, Row]) -> None:
        self.rows = dict(rows)
        self._known = dict(rows)

    def take(self, step: tuple[Any, ...]) -> Row:
        """Do what the step says, and return the change that records it."""
        if step[0] == "truncate":
            self.rows, self._known = {}, {}
            return change("truncate")
        op, key = step[:2]
        before = self.rows.get(key) if step[-1] else None
        if op == "delete":
            self.rows.pop(key, None)
            return change(op, key, before=before)
        sent = row(key, step[2], step[3])
        unchanged = sorted(step[4])
        sent |= dict.fromkeys(unchanged)
        known = self._known.get(key, {})
        whole = sent | {name: known.get(name) for name in unchanged}
        self.rows[key] = self._known[key] = whole
        return change(op, key, before=before, after=sent, unchanged=unchanged)


def applied(rows: dict[Key, Row], changes: list[Row]) -> dict[Key, Row]:
    state = dict(rows)
    for item in changes:
        if item["action"] == "TRUNCATE":
            state = {}
            continue
        key = (item["key"]["a"], item["key"]["b"])
        if item["action"] == "DELETE":
            state.pop(key, None)
        else:
            kept = {name: state.get(key, {}).get(name) for name in item["unchanged"]}
            state[key] = item["after"] | kept
    return state


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(KEYS, st.integers(0, 9), max_size=6), st.lists(STEPS, max_size=30), st.data()
)
def test_net_changes_do_what_all_changes_did(
    start: dict[Key, int], steps: list[tuple[Any, ...]], data: st.DataObject
) -> None:
    begin = {key: row(key, x, "start") for key, x in start.items()}
    model = Model(begin)
    changes = [model.take(step) for step in steps]
    cut = data.draw(st.integers(0, len(changes)))
    table = net_changes([run(changes[:cut]), run(changes[cut:])], PAIRS)
    found = table.to_pylist()

    assert applied(begin, found) == model.rows
    assert applied(applied(begin, found), found) == model.rows
    keys = [(f["key"]["a"], f["key"]["b"]) for f in found if f["key"]]
    assert keys == sorted(set(keys))
    assert all(f["action"] != "TRUNCATE" for f in found[1:])
    for item in found:
        if item["before"] is not None:
            assert item["before"] == begin[item["key"]["a"], item["key"]["b"]]
    merged = table.drop_columns(["unchanged"]).combine_chunks().to_batches()
    assert ParquetFormat().write_changes(io.BytesIO(), PAIRS, merged) == len(found)
