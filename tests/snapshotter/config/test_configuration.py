"""Configurations: parsing, rejections and display."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from streamfold.archive.write.thresholds import Thresholds
from streamfold.snapshotter.config.files import load_configuration
from streamfold.snapshotter.config.model import SnapshotterConfiguration, describe
from streamfold.snapshotter.config.tables import read_configuration
from streamfold.snapshotter.decoding import DebeziumDecoder, EnvelopeDecoder, UpsertDecoder
from streamfold.snapshotter.errors import ConfigurationError
from streamfold.snapshotter.transactions import TransactionLimits

EXAMPLES = Path(__file__).parents[3] / "examples"


OTHER = {"server": "localhost:8080", "table": "others"}


def table(**more: Any) -> dict[str, Any]:
    source = {"server": "localhost:8080", "table": "people"}
    return {"source": source, "destinations": [{"type": "local", "path": "/archive"}]} | more


def problems(raw: Any) -> list[str]:
    with pytest.raises(ConfigurationError) as failure:
        read_configuration(raw)
    assert failure.value.message == "\n".join(failure.value.problems)
    return list(failure.value.problems)


def test_one_table_may_stand_at_the_top_and_says_little() -> None:
    found = read_configuration(table())
    (only,) = found.tables
    assert (only.source.server, only.source.stream) == ("http://localhost:8080", "people")
    assert only.key_fields == ("id",)
    assert only.interval == timedelta(seconds=30)
    assert only.thresholds.max_interval == timedelta(hours=6)
    assert only.schema is None
    assert only.destinations[0].folder(only.key_prefix) == "file:///archive/people"
    assert found.http.port == 8081  # that of `serve` is 8080


def test_an_empty_key_prefix_puts_the_manifest_directly_below_the_destination() -> None:
    (only,) = read_configuration(table(key_prefix="")).tables
    assert only.destinations[0].folder(only.key_prefix) == "file:///archive"
    both = {"tables": [table(key_prefix=""), table(key_prefix="") | {"source": OTHER}]}
    (problem,) = problems(both)
    assert "file:///archive" in problem


def test_transactions_are_waited_for_as_long_as_is_said() -> None:
    (usual,) = read_configuration(table()).tables
    assert usual.transactions == TransactionLimits()
    said = {"max_wait": "90s", "quiet": "500ms", "max_records": 5000}
    (found,) = read_configuration(table(transactions=said)).tables
    expected = TransactionLimits(5000, timedelta(seconds=90), timedelta(milliseconds=500))
    assert found.transactions == expected
    assert "transactions.max_wait = 90s" in describe(read_configuration(table(transactions=said)))


def test_the_published_full_form_is_read(tmp_path: Path) -> None:
    file = tmp_path / "full.conf"
    file.write_text(
        """
        snapshotter {
          source {
            server = "feeds.internal:4001"
            schema = public
            table = settings
            client_id = archive-1
            local_snapshot_path = "/var/cache/settings.json"   # nothing is kept there
          }
          diff { interval = 30s }
          snapshot {
            min_interval = 5m
            max_interval = 6h
            max_diff_bytes = 33554432
            max_diff_fraction = 0.25
            max_churn_records = 100000
            max_churn_fraction = 0.5
          }
          destinations = [
            { type = s3, bucket = company-archive, prefix = "settings/", region = us-east-1
              credentials = writer },
            { type = local, path = "/var/lib/archive" }
          ]
          formats { snapshot = [ jsonl, protobuf ], diff = [ protobuf ] }
          events = [
            { type = sns, topic_arn = "arn:aws:sns:us-east-1:111122223333:s", credentials = teller }
            { type = kinesis, stream = settings, region = us-east-1, credentials = teller }
            # { type = sqs, queue_url = "https://sqs.us-east-1.amazonaws.com/1/q" }
          ]
          credentials {
            writer { type = ambient }
            teller {
              type = assume_role
              role_arn = "arn:aws:iam::444455556666:role/teller"
              external_id = "agreed-upon"
              session_name = settings-writer
            }
          }
          http { port = 8080 }
          retention { keep_epochs = 2 }
        }
        """
    )
    found = load_configuration(file, environment={})
    (only,) = found.tables
    assert (only.name, only.source.stream) == ("public.settings", "public.settings")
    assert only.thresholds == Thresholds(
        timedelta(minutes=5), timedelta(hours=6), 32 << 20, 0.25, 100_000, 0.5
    )
    assert [d.folder(only.key_prefix) for d in only.destinations] == [
        "s3://company-archive/settings/settings",
        "file:///var/lib/archive/settings",
    ]
    assert only.formats.snapshot == (("jsonl", "none"), ("protobuf", "none"))
    assert [event.raw["type"] for event in only.events] == ["sns", "kinesis"]
    assert found.credentials["teller"].role_arn == "arn:aws:iam::444455556666:role/teller"
    assert only.retention.keep_epochs == 2
    assert "agreed-upon" not in describe(found)


@pytest.mark.parametrize("name", ["snapshotter.toml", "snapshotter.conf"])
def test_the_examples_are_read(name: str) -> None:
    found = load_configuration(EXAMPLES / name, environment={})
    assert [t.name for t in found.tables] in (["users", "orders"], ["public.people"])


def test_a_limit_that_is_left_out_is_off_and_without_the_section_the_usual_ones_hold() -> None:
    (only,) = read_configuration(
        table(snapshot={"max_interval": "10m", "max_diff_bytes": 0})
    ).tables
    assert only.thresholds == Thresholds(max_interval=timedelta(minutes=10), max_diff_bytes=0)


def test_every_limit_of_the_engine_can_be_set() -> None:
    limits = {
        "min_interval": "1s", "max_interval": "1m", "max_diff_bytes": "1KiB", "max_diff_fraction": 0.5,
        "max_churn_records": 5, "max_churn_fraction": "0.25", "max_chain_bytes": "1MB",
        "max_chain_diffs": "100", "max_replay_seconds": "30s", "jitter": 0.1,
    }  # fmt: skip
    (only,) = read_configuration(table(snapshot=limits)).tables
    assert set(limits) == set(Thresholds.__dataclass_fields__)
    assert only.thresholds == Thresholds(
        timedelta(seconds=1), timedelta(minutes=1), 1024, 0.5, 5, 0.25, 10**6, 100, 30.0, 0.1
    )


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, EnvelopeDecoder(("id",))),
        ({"kind": "envelope", "mismatch": "dead_letter"}, EnvelopeDecoder(("id",), "dead_letter")),
        ({"table": "shop.orders"}, EnvelopeDecoder(("id",), table="shop.orders")),
        ({"kind": "debezium", "time_unit": "ms"}, DebeziumDecoder(("id",), time_unit="ms")),
        (
            {"kind": "upserts", "key_header": "k", "deleted_field": "__deleted"},
            UpsertDecoder(("id",), "stop", "k", "__deleted"),
        ),
    ],
)
def test_decoders_are_chosen_by_kind(settings: dict[str, str], kind: object) -> None:
    (only,) = read_configuration(table(decoder=settings)).tables
    assert only.decoder.decoder(only.key_fields) == kind


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (
            {"snapshot": {"max_diff_fraction": 1.5}},
            "snapshot.max_diff_fraction: 1.5 must be between 0 and 1",
        ),
        (
            {"snapshot": {"max_diff_bytes": "lots"}},
            "snapshot.max_diff_bytes: lots must be a number of bytes",
        ),
        (
            {"snapshot": {"max_churn_records": -1}},
            "snapshot.max_churn_records: -1 must be a whole number",
        ),
        (
            {"snapshot": {"max_churn_records": True}},
            "snapshot.max_churn_records: True must be a single",
        ),
        (
            {"snapshot": {"min_interval": "2h", "max_interval": "1h"}},
            "snapshot.min_interval: 2h must not be",
        ),
        ({"snapshot": {"min_interval": "2h"}}, "snapshot: sets no limit"),
        ({"snapshot": {"max_interval": 0}}, "snapshot: sets no limit"),
        (
            {"snapshot": {"jitter": 1, "max_interval": "1h"}},
            "snapshot: jitter is 1.0: it must be at least 0 and below 1",
        ),
        ({"snapshot": 5}, "snapshot: 5 must be an object"),
        ({"diff": {"interval": "30"}}, "diff.interval: 30 must be a time with a unit"),
        ({"diff": {"interval": "1ms"}}, "diff.interval: 1ms must be at least 100ms"),
        ({"difff": {}}, "difff: is not known; did you mean diff?"),
        ({"destinations": []}, "destinations: must name at least one"),
        ({"destinations": {}}, "destinations: {} must be a list"),
        ({"destinations": [{"type": "ftp"}]}, "destinations[0].type: ftp must be one of local, s3"),
        ({"destinations": [{}]}, "destinations[0].type: is missing"),
        ({"destinations": [{"type": "s3"}]}, "destinations[0].bucket: is missing"),
        (
            {"destinations": [{"type": "s3", "bucket": "a/b"}]},
            "destinations[0].bucket: a/b must be a name",
        ),
        ({"destinations": [{"type": "local"}]}, "destinations[0].path: is missing"),
        (
            {"destinations": [{"type": "local", "path": "/a"}] * 2},
            "destinations: file:///a/people is used 2 times",
        ),
        (
            {"destinations": [{"type": "s3", "bucket": "bucket", "credentials": "me"}]},
            "destinations[0].credentials: me is not under credentials, which has none",
        ),
        ({"formats": {"diff": ["xml"]}}, "formats.diff: xml must be one of jsonl, parquet"),
        ({"formats": {"diff": []}}, "formats.diff: [] must be a list of names"),
        ({"formats": {"diff": ["jsonl", "jsonl.gz"]}}, "formats.diff: jsonl must be named once"),
        ({"events": [{"type": "sns"}]}, "events[0].topic_arn: is missing"),
        ({"events": [{"type": "mail"}]}, "events[0].type: mail must be one of sns"),
        ({"key_fields": ["id", "id"]}, "key_fields: ['id', 'id'] must not repeat a name"),
        ({"key_fields": []}, "key_fields: [] must be a list of names"),
        ({"schema": "id BIGINT, name"}, "schema: schema, after 'id BIGINT, name'"),
        ({"schema": "name STRING"}, "schema: key field 'id' is not a column"),
        (
            {"retention": {"keep_epochs": "two"}},
            "retention.keep_epochs: two must be a whole number",
        ),
        (
            {"decoder": {"kind": "avro"}},
            "decoder.kind: avro must be one of envelope, debezium, upserts",
        ),
        ({"decoder": {"time_unit": "ms"}}, "decoder.time_unit: is not known"),
        ({"delta": "maybe"}, "delta: maybe must be true or false"),
        ({"delta": True}, "delta: needs parquet in formats.snapshot: the log names those files"),
        ({"buckets": 0}, "buckets: 0 must be a whole number, between 1 and 65536"),
        ({"buckets": 6}, "buckets: 6 must be a power of two, such as 8, or auto"),
        (
            {"dead_letters": {"stream": "a", "folder": "b"}},
            "dead_letters: names both a stream and a folder",
        ),
        ({"dead_letters": {"records": ["a"]}}, "dead_letters.records: must be a list of seq_nums"),
        ({"dead_letters": {"records": -1}}, "dead_letters.records: must be a list of seq_nums"),
        ({"transactions": {"quiet": "10m"}}, "transactions.quiet: 10m must not be longer"),
        ({"transactions": {"max_records": 0}}, "transactions.max_records: 0 must be"),
        ({"transactions": {"wait": "1s"}}, "transactions.wait: is not known"),
        ({"http": {"port": 70000}}, "http.port: 70000 must be a whole number, between 0 and 65535"),
        ({"credentials": {"x": {"type": "magic"}}}, "credentials.x.type is 'magic'"),
        ({"credentials": {"x": 5}}, "credentials.x"),
        ({"tables": []}, "tables: must name at least one table"),
        ({"tables": [table()]}, "source: is beside tables"),
    ],
)
def test_bad_values_are_refused_with_their_path(more: dict[str, Any], problem: str) -> None:
    found = problems(table() | more)
    assert any(item.startswith(problem) for item in found), found


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ({"server": "ftp://x"}, "source.server: ftp://x must be host:port"),
        ({"server": "http://host/path"}, "source.server: http://host/path must be host:port"),
        ({"table": ""}, "source.table:  must be text"),
        ({"table": None}, "source.table: is missing"),
        ({"server": None}, "source.server: is missing"),
        ({"basin": "No"}, "source.basin: bucket name 'No'"),
        ({"stream": "x" * 600}, "source.stream: "),
        ({"start": "yesterday"}, "source.start: yesterday must be earliest, latest"),
        ({"sever": "x"}, "source.sever: is not known; did you mean server?"),
    ],
)
def test_bad_sources_are_refused_with_their_path(source: dict[str, Any], problem: str) -> None:
    raw = table()
    raw["source"] |= source
    assert [item for item in problems(raw) if item.startswith(problem)]


def test_all_problems_are_reported_at_once_each_with_its_table() -> None:
    bad = table(snapshot={"max_diff_fraction": 1.5}, diff={"interval": "x"})
    bad["source"] = {"table": "other", "server": "h"}
    found = problems({"tables": [table(colour="red"), bad], "http": {"prt": 1}})
    assert found == [
        "http.prt: is not known; did you mean port?",
        "tables[0].colour: is not known; " + found[1].partition("; ")[2],
        "tables[1].diff.interval: x must be a time with a unit, such as 250ms, 30s, 5m, 6h or 1d",
        "tables[1].snapshot.max_diff_fraction: 1.5 must be between 0 and 1",
    ]


def test_two_tables_of_one_name_are_refused() -> None:
    found = problems({"tables": [table(), table(key_prefix="elsewhere")]})
    assert found == ["tables: 2 are named people: choose other names, which status and events need"]


@pytest.mark.parametrize(
    "source",
    [
        {"server": "https://me:hush-hush@host"},
        {"server": "https://host?token=hush-hush"},
        {"token": "hush-hush"},
        {"access_token": "hush-hush"},
    ],
)
def test_secrets_in_the_open_are_refused_and_not_repeated(source: dict[str, str]) -> None:
    raw = table()
    raw["source"] |= source
    found = problems(raw)
    assert "hush" not in "".join(found)
    assert "token_env" in "".join(found) or "variable or a file" in "".join(found)


def test_what_is_shown_has_the_names_of_the_file_and_no_secret() -> None:
    raw = table(
        source={"server": "localhost:8080", "table": "people", "schema": "public"},
        snapshot={"max_diff_bytes": 32 << 20},
        events=[
            {"type": "webhook", "url": "https://u:hush@hook.example/x?key=hush", "secret_env": "S"}
        ],
        formats={"snapshot": ["jsonl.gz", "parquet"]},
        schema="id INT, name STRING",
    )
    configuration = read_configuration(raw)
    lines = describe(configuration).splitlines()
    assert "hush" not in "".join(lines) + repr(configuration)
    for line in (
        "tables[0].diff.interval = 30s",
        "tables[0].snapshot.max_diff_bytes = 32MiB",
        "tables[0].events[0].url = https://hook.example/x?…",
        "tables[0].events[0].secret_env = S",
        "tables[0].formats.snapshot = jsonl (gzip), parquet",
        "tables[0].schema.id = int32 not null",
        "tables[0].source.schema = public",
        "http.port = 8081",
    ):
        assert line in lines


def loaded(tmp_path: Path, environment: dict[str, str], *settings: str) -> SnapshotterConfiguration:
    file = tmp_path / "one.json"
    file.write_text(json.dumps({"tables": [table(diff={"interval": "9s"})], "http": {"port": 1}}))
    return load_configuration(file, environment=environment, settings=settings)


def test_the_environment_wins_over_the_file_and_flags_win_over_both(tmp_path: Path) -> None:
    prefix = "STREAMFOLD_SNAPSHOTTER__"
    environment = {
        f"{prefix}tables__0__diff__interval": "5s",
        f"{prefix}HTTP__PORT": "2",
        "OTHER": "x",
    }
    found = loaded(tmp_path, environment)
    assert (found.tables[0].interval, found.http.port) == (timedelta(seconds=5), 2)
    found = loaded(tmp_path, environment, "tables[0].diff.interval=1s", "http.port = 3")
    assert (found.tables[0].interval, found.http.port) == (timedelta(seconds=1), 3)


def test_lists_and_objects_can_be_set_too(tmp_path: Path) -> None:
    found = loaded(
        tmp_path,
        {},
        'tables[0].formats.diff=["parquet"]',
        "tables[0].formats.snapshot=parquet, jsonl",
        'tables[0].destinations[1]={type = "local", path = "/second"}',
        "tables[0].schema=id BIGINT NOT NULL, name STRING",
    )
    (only,) = found.tables
    assert only.formats.diff == (("parquet", "none"),)
    assert only.formats.snapshot == (("parquet", "none"), ("jsonl", "none"))
    assert only.destinations[1].url == "file:///second"
    assert only.schema is not None


def test_a_configuration_may_come_from_the_environment_alone() -> None:
    prefix = "STREAMFOLD_SNAPSHOTTER__"
    environment = {
        f"{prefix}source__server": "h:1",
        f"{prefix}source__table": "t",
        f"{prefix}destinations__0__type": "local",
        f"{prefix}destinations__0__path": "/a",
    }
    assert load_configuration(None, environment=environment).tables[0].name == "t"


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("diff.interval", "--set, number 1: must be path=value"),
        ("=5s", "--set, number 1: must be path=value"),
        ("tables[7].buckets=3", "tables[7].buckets: names an entry that the list lacks"),
        ("tables.x.buckets=3", "tables.x.buckets: names an entry that the list lacks"),
        ("tables[0].formats.diff=[parquet", "tables[0].formats.diff: a value in brackets"),
        ("tables[0].nothing=5", "tables[0].nothing: is not known"),
    ],
)
def test_overrides_that_cannot_be_are_refused(tmp_path: Path, setting: str, problem: str) -> None:
    with pytest.raises(ConfigurationError) as failure:
        loaded(tmp_path, {}, setting)
    assert [item for item in failure.value.problems if item.startswith(problem)]


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.toml", "x = ", "a.toml: "),
        ("a.conf", "x = ${Y}", "a.conf: line 1"),
        ("a.yaml", "", "a.yaml: must end in .toml"),
        ("missing.toml", None, "missing.toml: cannot be read"),
    ],
)
def test_files_that_cannot_be_read_say_why(
    tmp_path: Path, name: str, text: str | None, problem: str
) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigurationError) as failure:
        load_configuration(file, environment={})
    assert problem in failure.value.message


def test_the_reference_names_every_setting() -> None:
    page = (EXAMPLES.parent / "docs" / "reference" / "snapshotter-config.md").read_text()
    with pytest.raises(ConfigurationError) as failure:
        read_configuration(
            table(
                source={"x": 1},
                snapshot={"x": 1},
                retention={"x": 1},
                dead_letters={"x": 1},
                http={"x": 1},
                x=1,
            )
        )
    reported = [problem.partition("the settings are ")[2] for problem in failure.value.problems]
    names = {name for known in reported for name in known.split(", ") if name}
    assert len(names) > 30
    assert [name for name in sorted(names) if name not in page] == []


@pytest.mark.parametrize(
    ("source", "name", "stream"),
    [
        ({"table": "orders"}, "orders", "orders"),
        ({"table": "orders", "schema": "public"}, "public.orders", "public.orders"),
        ({"table": "public.orders", "schema": "public"}, "public.orders", "public.orders"),
        ({"table": "public.orders"}, "public.orders", "public.orders"),
        ({"table": "orders", "schema": "shop", "stream": "cdc"}, "shop.orders", "cdc"),
    ],
)
def test_a_table_is_called_what_the_configuration_says_with_its_schema(
    source: dict[str, str], name: str, stream: str
) -> None:
    [only] = read_configuration(table(source={"server": "h:1", **source})).tables
    assert (only.name, only.source.stream) == (name, stream)


def published(**more: Any) -> dict[str, Any]:
    given = table(layout="laredo", **more)
    return given | {"source": given["source"] | {"schema": "public"}}


def test_a_table_has_our_own_layout_unless_another_is_named() -> None:
    assert [t.layout for t in read_configuration(table()).tables] == ["streamfold"]
    formats = {"snapshot": ["jsonl", "parquet"], "diff": ["protobuf", "jsonl"]}
    (found,) = read_configuration(published(buckets=1, formats=formats)).tables
    assert (found.layout, found.name) == ("laredo", "public.people")


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (table(layout="laredo"), "source.schema: is missing: layout laredo names tables"),
        (table(layout="lardo"), "layout: lardo must be one of streamfold, laredo; did you mean"),
        (published(buckets=4), "buckets: 4 must be 1 in layout laredo"),
        (
            published(formats={"snapshot": ["jsonl.gz"]}),
            "formats: format jsonl with compression gzip has no name in layout laredo",
        ),
        (published(formats={"diff": ["parquet"]}), "formats: layout laredo needs one of jsonl,"),
    ],
)
def test_what_laredos_reader_could_not_rebuild_is_refused(raw: Any, problem: str) -> None:
    [found] = problems(raw)
    assert found.startswith(problem)
