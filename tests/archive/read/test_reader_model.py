"""Any history of a table, read at every position in every way, against a plain dict."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

import streamfold.archive
from streamfold.archive.formats import format_of
from tests.archive.reading import Consumer, folder_at, names_by_id
from tests.archive.tables import Change, changes, net_changes, open_writer, rows

IDS = st.integers(0, 12)
#: A step: a truncate or not, names by id after it (None deletes), and whether it is a re-base.
STEPS = st.lists(
    st.tuples(
        st.booleans(),
        st.dictionaries(IDS, st.sampled_from(["x", "y", "z"]) | st.none(), max_size=8),
        st.sampled_from(["diff", "diff", "rebase", "buckets"]),
    ),
    max_size=7,
)
FORMATS = st.sampled_from(["parquet", "jsonl", "protobuf-typed"])

Step = tuple[bool, dict[int, str | None], str]


def applied(state: dict[int, str], step: Step) -> dict[int, str]:
    truncates, touched, _ = step
    found: dict[int, str | None] = {**({} if truncates else state), **touched}
    return {number: name for number, name in found.items() if name is not None}


def net(state: dict[int, str], after: dict[int, str], truncates: bool) -> list[Change]:
    start: dict[int, str] = {} if truncates else state
    batches = net_changes(start, after)
    found: list[Change] = [
        (c["action"], c["key"]["id"], c["after"] and c["after"]["name"])
        for batch in batches
        for c in batch.to_pylist()
    ]
    return [("TRUNCATE", None, None), *found] if truncates else found


async def check_history(folder: Path, steps: Sequence[Step], format_id: str) -> None:
    writer = await open_writer(folder_at(folder), formats=[format_of(format_id)])
    state: dict[int, str] = {1: "x", 2: "y", 3: "z"}
    states = {"0": state}
    await writer.write_base(rows(state), "0", reason="first")
    for number, step in enumerate(steps):
        before, state = state, applied(state, step)
        given_changes = changes(*net(before, state, step[0]))
        position = str(number + 1)
        if step[2] == "diff":
            await writer.write_diff(given_changes, str(number), position)
        else:
            parts = {b: rows({i: n for i, n in state.items() if i % 2 == b}) for b in (0, 1)}
            whole = parts if step[2] == "buckets" else rows(state)
            await writer.rebase(whole, given_changes, position, reason="forced")
        states[position] = state
    archive = await streamfold.archive.open(folder)
    for position, expected in states.items():
        assert names_by_id(await archive.table(position=position)) == expected
        seen = Consumer(expected)
        async for item in archive.changes(position):
            seen.take(item)
        assert seen.state == state
    assert (await archive.verify()).ok


@settings(max_examples=40, deadline=None, derandomize=True, print_blob=True)
@given(steps=STEPS, format_id=FORMATS)
def test_every_position_of_any_history_is_rebuilt(steps: list[Step], format_id: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(check_history(Path(folder), steps, format_id))
