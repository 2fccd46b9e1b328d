"""The published examples of the snapshotter, E23 to E26, as they are written."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pytest
from google.protobuf.json_format import ParseDict

import streamfold.archive
from streamfold.archive import (
    LAREDO,
    ArchiveWriter,
    Collector,
    Destination,
    Retention,
    TableSchema,
)
from streamfold.archive.events import decode_event
from streamfold.archive.events.event import describe, encode_event
from streamfold.archive.formats import format_of
from streamfold.archive.formats.protobuf.published import DiffChange, SnapshotRow
from streamfold.records.protobuf import varint
from streamfold.snapshotter.config.files import load_configuration
from streamfold.snapshotter.config.model import SnapshotterConfiguration

BASE, HEAD = "0/19F000", "0/1A2B3C"
ROWS = [{"id": "theme", "value": "dark"}, {"id": "lang", "value": "de"}]
CHANGES = [
    {"action": "UPDATE", "key": "lang", "old": ROWS[1], "new": {"id": "lang", "value": "en"}},
    {"action": "DELETE", "key": "theme", "old": ROWS[0]},
]


def lines(objects: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(item, sort_keys=True).encode() + b"\n" for item in objects)


def messages(kind: Any, objects: list[dict[str, Any]]) -> bytes:
    """Length-delimited messages, as the published writer's library makes them."""
    encoded = [ParseDict(item, kind()).SerializeToString() for item in objects]
    return b"".join(varint(len(message)) + message for message in encoded)


#: Contents of the files by their names.
FILES = {
    "snapshot-0_19F000.jsonl": lines(ROWS),
    "snapshot-0_19F000.pb": messages(SnapshotRow, [{"row": row} for row in ROWS]),
    "diff-0_19F000-0_1A2B3C.jsonl": lines(CHANGES),
    "diff-0_19F000-0_1A2B3C.pb": messages(DiffChange, CHANGES),
}


def formats(name: str) -> dict[str, Any]:
    kinds = {"jsonl": f"{name}.jsonl", "protobuf": f"{name}.pb"}
    return {
        kind: {"uri": f"s3://bucket/cfg/epoch=2/{file}", "size_bytes": len(FILES[file])}
        for kind, file in kinds.items()
    }


def manifest() -> dict[str, Any]:
    """The published manifest, with counts and sizes of files that a test can hold."""
    return {
        "manifest_version": 1,
        "table": "public.config_document",
        "epoch": 2,
        "updated_at": "2026-06-03T18:04:05.123456789Z",
        "head_position": HEAD,
        "artifacts": [
            {
                "kind": "snapshot",
                "epoch": 2,
                "from_position": None,
                "to_position": BASE,
                "created_at": "2026-06-03T18:00:00Z",
                "row_count": len(ROWS),
                "formats": formats("snapshot-0_19F000"),
            },
            {
                "kind": "diff",
                "epoch": 2,
                "from_position": BASE,
                "to_position": HEAD,
                "created_at": "2026-06-03T18:04:05Z",
                "change_count": len(CHANGES),
                "formats": formats("diff-0_19F000-0_1A2B3C"),
            },
        ],
    }


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """The archive that the manifest describes, at the published names of its files."""
    epoch = tmp_path / "cfg" / "epoch=2"
    epoch.mkdir(parents=True)
    for name, content in FILES.items():
        (epoch / name).write_bytes(content)
    (epoch.parent / "manifest.json").write_text(json.dumps(manifest()))
    return epoch.parent


@pytest.mark.parametrize("form", ["jsonl", "protobuf"])
async def test_e23_the_published_manifest_is_read(archive: Path, form: str) -> None:
    found = await streamfold.archive.open(archive, formats=[form])
    assert (found.manifest.table, found.manifest.epoch) == ("public.config_document", 2)
    assert found.head == HEAD
    assert (await found.table(position=BASE)).to_pylist() == ROWS
    assert (await found.table()).to_pylist() == [{"id": "lang", "value": "en"}]
    changes = [item async for item in found.changes(BASE)]
    assert [action for item in changes for action in item.batch["action"].to_pylist()] == [
        "UPDATE",
        "DELETE",
    ]
    assert (await found.verify()).ok


async def test_e23_layout_laredo_writes_the_published_manifest(tmp_path: Path) -> None:
    schema = TableSchema.of(pa.schema([("id", pa.string()), ("value", pa.string())]), ["id"])
    destination = Destination.open((tmp_path / "cfg").as_uri())
    writer = await ArchiveWriter.open(
        "public.config_document",
        schema,
        [destination],
        formats=[format_of("jsonl"), format_of("protobuf")],
        writer_id="writer-1",
        layout=LAREDO,
    )
    rows = [pa.RecordBatch.from_pylist(ROWS, schema=schema.arrow)]
    for reason in ("first", "forced"):
        await writer.write_base(rows, BASE, reason=reason)
    changes = [
        {
            "action": change["action"],
            "key": {"id": change["key"]},
            "before": change["old"],
            "after": change.get("new"),
        }
        for change in CHANGES
    ]
    diff = pa.RecordBatch.from_pylist(changes, schema=schema.changes)
    await writer.write_diff([diff], BASE, HEAD)
    collector = Collector([destination], now=lambda: datetime.now(UTC), new_id=lambda: uuid4().hex)
    await collector.collect(Retention(keep_epochs=1))
    found, expected = json.loads((tmp_path / "cfg" / "manifest.json").read_text()), manifest()
    for name in ("manifest_version", "table", "epoch", "head_position"):
        assert found[name] == expected[name]
    for written, published in zip(found["artifacts"], expected["artifacts"], strict=True):
        assert {n: v for n, v in written.items() if n in published and n != "created_at"} == {
            **{n: v for n, v in published.items() if n != "created_at"},
            "formats": written["formats"],
        }
        for form, files in published["formats"].items():
            name = files["uri"].removeprefix("s3://bucket/cfg/")
            assert written["formats"][form]["uri"] == destination.uri + name
            stored = (tmp_path / "cfg" / name).read_bytes()
            assert len(stored) == written["formats"][form]["size_bytes"]
            if form == "jsonl":
                given = FILES[name.rpartition("/")[2]]
                assert sorted(map(json.loads, stored.splitlines()), key=str) == sorted(
                    map(json.loads, given.splitlines()), key=str
                )


async def test_e24_the_event_has_the_published_fields(archive: Path) -> None:
    found = await streamfold.archive.open(archive)
    [_, diff] = found.manifest.artifacts
    uri = Destination.open("s3://bucket/cfg", region="us-east-1").manifest_uri
    event = json.loads(encode_event(describe(found.manifest, diff, uri)))
    assert {name: event[name] for name in event if name not in ("event_id", "gap")} == {
        "table": "public.config_document",
        "kind": "diff",
        "epoch": 2,
        "from_position": BASE,
        "to_position": HEAD,
        "head_position": HEAD,
        "manifest_uri": "s3://bucket/cfg/manifest.json",
        "formats": {
            "jsonl": "s3://bucket/cfg/epoch=2/diff-0_19F000-0_1A2B3C.jsonl",
            "protobuf": "s3://bucket/cfg/epoch=2/diff-0_19F000-0_1A2B3C.pb",
        },
        "created_at": "2026-06-03T18:04:05Z",
    }
    assert decode_event(json.dumps(event)).table == "public.config_document"


PUBLISHED = """
snapshotter {
  source {
    server    = "laredo:4002"      // the fan-out
    schema    = public
    table     = config_document
    client_id = snapshotter-1
  }
  diff { interval = 30s }
  snapshot {
    min_interval       = 5m        # the floor
    max_interval       = 6h
    max_diff_bytes     = 33554432  /* 32 MiB */
    max_diff_fraction  = 0.25
    max_churn_records  = 100000
    max_churn_fraction = 0.5
  }
  destinations [
    { type = s3, bucket = config-archive, prefix = "cfg/", region = us-east-1, credentials = writer }
    { type = local, path = "/var/lib/laredo/archive" }
  ]
  formats {
    snapshot = [jsonl, protobuf]
    diff     = [protobuf]
  }
  events [
    { type = sns, topic_arn = "arn:aws:sns:us-east-1:111122223333:cfg", credentials = announcer }
    { type = kinesis, stream = cfg-changes, credentials = announcer }
  ]
  credentials { /* named profiles */
    writer { type = ambient }
    announcer {
      type     = assume_role
      role_arn = "arn:aws:iam::444455556666:role/announcer"
    }
  }
  http { port = 8080 }
}
"""


def published(tmp_path: Path, text: str = PUBLISHED) -> SnapshotterConfiguration:
    file = tmp_path / "snapshotter.conf"
    file.write_text(text)
    return load_configuration(file, environment={})


def test_e25_the_published_configuration_is_read_with_its_comments(tmp_path: Path) -> None:
    found = published(tmp_path)
    [table] = found.tables
    assert table.name == "public.config_document"
    assert (table.source.server, table.source.client_id) == ("http://laredo:4002", "snapshotter-1")
    assert table.source.stream == "public.config_document"
    assert table.interval == timedelta(seconds=30)
    assert table.thresholds.max_diff_bytes == 32 << 20
    assert [destination.url for destination in table.destinations] == [
        "s3://config-archive/cfg",
        "file:///var/lib/laredo/archive",
    ]
    assert table.formats.snapshot == (("jsonl", "none"), ("protobuf", "none"))
    assert table.formats.diff == (("protobuf", "none"),)
    assert [event.type for event in table.events] == ["sns", "kinesis"]
    assert sorted(found.credentials) == ["announcer", "writer"]
    assert found.http.port == 8080


def test_e25_credentials_may_be_a_comment_alone(tmp_path: Path) -> None:
    found = published(
        tmp_path,
        """
        snapshotter {
          source { server = "localhost:8080", schema = public, table = t }
          destinations [ { type = local, path = ./archive } ]
          credentials { /* named profiles */ }
        }
        """,
    )
    assert found.credentials == {}
