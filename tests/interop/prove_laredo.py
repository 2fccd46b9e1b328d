"""Laredo's own reader and writer against ours. Run by `make prove`; needs Laredo's code."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from streamfold.archive import LAREDO, ArchiveWriter, Destination
from tests.interop.laredo_module import LaredoModule
from tests.interop.test_laredo_layout import BOTH, KEYS, as_decoded, write_history
from tests.interop.test_laredo_written import HISTORIES, ODD, check_states, item

FORMS = ("jsonl", "protobuf")


@pytest.fixture(scope="module")
def laredo(tmp_path_factory: pytest.TempPathFactory) -> LaredoModule:
    return LaredoModule.build(tmp_path_factory.mktemp("laredo"))


@pytest.mark.parametrize("name", KEYS)
async def test_laredo_rebuilds_every_state_that_ours_wrote(
    tmp_path: Path, laredo: LaredoModule, name: str
) -> None:
    keys = KEYS[name]
    states = await write_history(tmp_path, keys)
    for form in FORMS:
        for position, state in states.items():
            found = laredo.read(tmp_path, form, keys.names, position)
            assert (found["table"], found["head"]) == ("public.orders", "1/21")
            assert found["position"] == position
            rows = sorted(found["rows"], key=lambda row: json.dumps(row, sort_keys=True))
            assert rows == as_decoded(keys, state), (form, position)


@pytest.mark.parametrize("name", HISTORIES)
async def test_ours_reads_every_state_that_laredo_wrote(
    tmp_path: Path, laredo: LaredoModule, name: str
) -> None:
    history = HISTORIES[name]
    laredo.write_steps(tmp_path, "public.orders", history.keys, history.steps)
    for form in FORMS:
        for typed in (False, True):
            await check_states(tmp_path, history, form, typed=typed)


async def test_laredo_reads_an_archive_of_its_own_that_ours_continued(
    tmp_path: Path, laredo: LaredoModule
) -> None:
    history = HISTORIES["two_keys"]
    laredo.write_steps(tmp_path, "public.orders", history.keys, history.steps)
    writer = await ArchiveWriter.open(
        "public.orders",
        history.schema,
        [Destination.open(tmp_path.as_uri())],
        formats=BOTH,
        writer_id="writer-1",
        layout=LAREDO,
    )
    fresh = {"tenant": 2_000_000, "code": "c"}
    changes = [
        {"action": "DELETE", "key": {"tenant": 1, "code": ""}},
        {"action": "INSERT", "key": fresh, "after": item(2_000_000, "c", ODD)},
    ]
    batch = pa.RecordBatch.from_pylist(changes, schema=history.schema.changes)
    await writer.write_diff([batch], "0/6", "1/8")
    for form in FORMS:
        found = laredo.read(tmp_path, form, history.keys, "1/8")
        assert found["rows"] == [item(2_000_000, "c", ODD)]
