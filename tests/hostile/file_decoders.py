"""Decoders of other programs' output: archives, events, changes, configurations, PostgreSQL."""

from __future__ import annotations

import gzip
import io
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from streamfold.archive.events.cursor import _decode as decode_cursor
from streamfold.archive.events.event import decode_event
from streamfold.archive.formats.format import Format, format_of
from streamfold.archive.manifest.encoding import read_manifest
from streamfold.archive.manifest.positions import parse_time
from streamfold.archive.schema import type_from_json
from streamfold.errors import StreamfoldError
from streamfold.ingest.postgres.pgoutput import decode_message, parse_lsn
from streamfold.model.resource_spec import parse_resource_spec
from streamfold.model.units import parse_duration, parse_size
from streamfold.snapshotter.config.files import load_configuration
from streamfold.snapshotter.decoding.ddl import parse_ddl
from streamfold.snapshotter.decoding.debezium import DebeziumDecoder
from streamfold.snapshotter.decoding.decoder import ChangeDecoder
from streamfold.snapshotter.decoding.envelope import EnvelopeDecoder
from streamfold.snapshotter.decoding.upserts import UpsertDecoder
from streamfold.spark.stream.exactly_once import Marker
from streamfold.testing.change_decoder_kit import ROW, TABLE, records
from streamfold.testing.format_samples import ORDERS, changes_of, orders
from tests.hostile.decoder import Decoder

_GOLDEN = Path(__file__).parents[1] / "archive" / "golden"
_EXAMPLES = Path(__file__).parents[2] / "examples"
_DEEP = b"[" * 3_000 + b"]" * 3_000
_DEEP_OBJECT = b'{"a":' * 2_000 + b"1" + b"}" * 2_000


def _format(form: Format) -> Decoder:
    """Bases and diffs of one format; the first byte says which."""

    def decode(raw: bytes) -> None:
        read = form.read_rows if raw[:1] == b"r" else form.read_changes
        for schema in (ORDERS, None):
            for batch in read(io.BytesIO(raw[1:]), schema):
                batch.validate()

    table = orders(3)
    base, diff = io.BytesIO(), io.BytesIO()
    form.write_rows(base, ORDERS, [table])
    form.write_changes(diff, ORDERS, [changes_of(ORDERS, table)])
    odd = (b"r", b"c" + _DEEP_OBJECT, b"rnull\n{}\n", b"cnull,\n")
    seeds = (b"r" + base.getvalue(), b"c" + diff.getvalue(), *odd)
    return Decoder(f"archive, {form.id} {form.compression}", decode, seeds, weight=0.4)


def _changes(decoder: ChangeDecoder, *bodies: object) -> Decoder:
    """Records of a change stream, one per line; what cannot be used is a dead letter, not an error."""

    def decode(raw: bytes) -> None:
        table = records(raw.split(b"\n"))
        for schema in (TABLE, None):
            decoder.decode(table, schema)

    seeds = tuple(json.dumps(body).encode() for body in bodies)
    extra = (b"\n".join(seeds), b"", _DEEP_OBJECT, seeds[0] + b"\n" + _DEEP)
    return Decoder(f"changes, {type(decoder).__name__}", decode, (*seeds, *extra), weight=0.15)


def _configuration(suffix: str) -> Callable[[bytes], object]:
    def decode(raw: bytes) -> object:
        with tempfile.NamedTemporaryFile(suffix=suffix) as file:
            file.write(raw)
            file.flush()
            return load_configuration(Path(file.name), environment={})

    return decode


def _text(function: Callable[[str], object]) -> Callable[[bytes], object]:
    return lambda raw: function(raw.decode("utf-8", "replace"))


_SPEC = json.dumps(
    {
        "basins": [
            {
                "name": "shop-basin",
                "streams": [{"name": "orders", "config": {"retention_policy": "7d"}}],
            }
        ]
    }
).encode()
_PGOUTPUT = (
    b"B" + bytes(8) + bytes(8) + b"\0\0\0\x05",
    b"C\0" + bytes(24),
    b"R\0\0\0\x01public\0orders\0d\0\x02\x01id\0\0\0\0\x17\xff\xff\xff\xff\0name\0\0\0\0\x19\xff\xff\xff\xff",
    b"I\0\0\0\x01N\0\x02t\0\0\0\x011n",
    b"U\0\0\0\x01O\0\x01t\0\0\0\x011N\0\x01u",
    b"D\0\0\0\x01K\0\x01t\0\0\0\x011",
    b"T\0\0\0\x01\0\0\0\0\x01",
    b"T\xff\xff\xff\xff\0",
    b"Y", b"O", b"M",
)  # fmt: skip
_TYPES = (
    b'"int64"', b'{"list":{"type":"string","nullable":true}}', b'"timestamp[us, UTC]"',
    b'"decimal128(38, 2)"',
    b'{"struct":[{"name":"a","type":{"map":{"type":"int8","nullable":false}},"nullable":true}]}',
    b'"timestamp[us, Nowhere/Else]"', b'"timestamp[ns, +99:99]"', b'"decimal128(0, 0)"',
)  # fmt: skip


def file_decoders() -> Iterator[Decoder]:
    """Every decoder of files and of messages of other programs."""
    manifests = tuple(
        (_GOLDEN / name).read_bytes() for name in ("streamfold-v1.json", "published.json")
    )
    deep = b'{"manifest_version":1,"x":' + _DEEP + b"}"
    yield Decoder(
        "manifest", read_manifest, (*manifests, _DEEP, deep, b'{"manifest_version":1e400}')
    )
    for format_id, compression in (
        ("jsonl", "none"), ("jsonl", "gzip"), ("jsonl", "zstd"), ("protobuf", "none"),
        ("protobuf-typed", "none"), ("parquet", "none"),
    ):  # fmt: skip
        yield _format(format_of(format_id, compression))
    yield Decoder(
        "column types",
        lambda raw: type_from_json(_json(raw)),
        _TYPES,
        (StreamfoldError, ValueError),
    )
    event = (
        b'{"event_id":"e","table":"t","kind":"diff","epoch":1,"from_position":null,"to_position":"1",'
        b'"head_position":"1","manifest_uri":"u","formats":{},"created_at":"c"}'
    )
    yield Decoder("events", decode_event, (event, _DEEP))
    cursor = (
        b'{"version":1,"sink":"s","revision":2,"updated_at":"u","event_id":"e","place":{"archive_id":null,'
        b'"commit_id":"c","kind":"diff","epoch":1,"from_position":null,"to_position":"1"}}'
    )
    yield Decoder("event cursors", lambda raw: decode_cursor("key", raw), (cursor, _DEEP, b"\xff"))
    yield _changes(UpsertDecoder(("id",)), ROW, {"id": 8, "name": None}, {"id": 1e300}, {"id": [1]})
    yield _changes(
        DebeziumDecoder(("id",)),
        {"op": "u", "before": ROW, "after": ROW, "source": {"lsn": 5}, "ts_ms": 1},
        {"schema": {}, "payload": {"op": "d", "before": ROW, "after": None}},
        {"op": "c", "after": {"id": 1, "amount": "AQ=="}},
    )
    yield _changes(
        EnvelopeDecoder(("id",)),
        {"op": "insert", "after": ROW},
        {"op": "delete", "key": {"id": 7}},
        {"op": "truncate"},
        {"op": "schema", "columns": [{"name": "id", "type": "BIGINT", "nullable": False}]},
    )
    ddl = b"id BIGINT NOT NULL, a ARRAY<STRUCT<b: DECIMAL(12,2), c: MAP<STRING, INT>>>, t TIMESTAMP"
    yield Decoder("table definitions", _text(parse_ddl), (ddl, b"a " + b"ARRAY<" * 500, b"`x` INT"))
    toml = (b"a=" + b"[" * 3_000, b"a=0x" + b"f" * 5_000)
    hocon = (b"a" + b"{a" * 500, b'a = "\\ud800"', b"a = " + b"9" * 5_000)
    for suffix, odd in ((".toml", toml), (".conf", hocon)):
        example = (_EXAMPLES / f"snapshotter{suffix}").read_bytes()
        seeds = (example, *odd)
        yield Decoder(f"configuration, {suffix}", _configuration(suffix), seeds, weight=0.15)
    yield Decoder(
        "resource files", lambda raw: parse_resource_spec(raw, "file"), (_SPEC, _DEEP_OBJECT)
    )
    yield Decoder(
        "durations",
        _text(parse_duration),
        (b"1h 30m", b"7d", b"9" * 400 + b"d", b"1e400s"),
        (StreamfoldError, ValueError),
    )
    yield Decoder(
        "sizes",
        _text(parse_size),
        (b"64MiB", b"1.5GB", b"9" * 5_000),
        (StreamfoldError, ValueError),
    )
    yield Decoder(
        "times", _text(parse_time), (b"2026-06-03T12:00:00.000000Z", b"0001-01-01T00:00:00+23:59")
    )
    yield Decoder("PostgreSQL messages", decode_message, _PGOUTPUT)
    yield Decoder("PostgreSQL positions", _text(parse_lsn), (b"16/B374D848", b"0/0"))
    yield Decoder(
        "Spark markers",
        Marker.decode,
        (b"t\n1\n2\n3\nd", b"t\n\xd9\xa1\n2\n3\nd", b"t\n" + b"9" * 5_000 + b"\n1\n1\nd"),
    )


def _json(raw: bytes) -> object:
    try:
        return json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except (ValueError, RecursionError, EOFError, OSError) as error:
        raise ValueError(str(error)) from None
