"""Table jobs for tests, and their archives' contents."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import streamfold.archive
from streamfold.archive import Archive, Checked, Manifest, TableSchema, Thresholds
from streamfold.archive.formats.format import format_of
from streamfold.archive.manifest.positions import SEQ_NUM
from streamfold.snapshotter.decoding import EnvelopeDecoder, parse_ddl
from streamfold.snapshotter.spark.destinations import DeadLetterFolder, DestinationSpec
from streamfold.snapshotter.spark.table_job import TableJob
from tests.spark.server import Server
from tests.spark.snapshotter.feeding import State, replayed

DDL = "id BIGINT NOT NULL, name STRING, price DOUBLE"


def table_schema() -> TableSchema:
    return parse_ddl(DDL, ["id"])


def table_job(server: Server, stream: str, folder: Path, **changed: Any) -> TableJob:
    """A job that publishes a stream in a local folder."""
    spec = DestinationSpec(folder.as_uri())
    given: dict[str, Any] = {
        "table": "public.items",
        "stream": stream,
        "source": server.options,
        "decoder": EnvelopeDecoder(("id",)),
        "destination_specs": (spec,),
        "formats": (format_of("parquet"),),
        "diff_formats": (format_of("parquet"),),
        "dead_letters": DeadLetterFolder(spec, "public.items", stream),
        "writer_id": "writer-1",
        "schema": table_schema(),
        "interval": timedelta(milliseconds=500),
        "thresholds": Thresholds(max_chain_diffs=4),
    }
    return TableJob(**{**given, **changed})


async def _open(folder: Path) -> Archive:
    return await streamfold.archive.open(folder)


def manifest_of(folder: Path) -> Manifest:
    return asyncio.run(_open(folder)).manifest


def state_of(folder: Path, position: str | None = None, at_source: str | None = None) -> State:
    """The table that the archive's own reader rebuilds."""

    async def read() -> State:
        archive = await _open(folder)
        rows = (await archive.table(position=position, at_source=at_source)).to_pylist()
        found = {row["id"]: row for row in rows}
        assert len(found) == len(rows)
        return found

    return asyncio.run(read())


def check_every_boundary(folder: Path, bodies: Sequence[bytes]) -> int:
    """The archive equals a replay of the stream at the end of every artifact; how many there are."""
    positions = {artifact.to_position for artifact in manifest_of(folder).artifacts}
    for position in sorted(positions, key=int):
        expected = _with_nulls(replayed(bodies[: int(position) + 1]))
        assert _with_nulls(state_of(folder, position)) == expected, f"at {position}"
    assert asyncio.run(_problems(folder)) == ()
    return len(positions)


async def _problems(folder: Path) -> tuple[Checked, ...]:
    return (await (await streamfold.archive.open(folder)).verify(deep=True)).problems


def _with_nulls(state: State) -> State:
    """Rows without the columns that are null: absent and null are the same."""
    return {
        key: {name: value for name, value in row.items() if value is not None}
        for key, row in state.items()
    }


def place_manifest(spec: DestinationSpec) -> Manifest:
    """What is committed at a destination, read with its own credentials."""
    stored = asyncio.run(spec.open().read(SEQ_NUM))
    assert stored is not None
    return stored.manifest
