"""Options are all parsed or rejected by name, and secrets appear in no message."""

from __future__ import annotations

import pytest
from pyspark.sql.types import BinaryType, StructField, StructType

from streamfold.errors import InvalidError
from streamfold.spark import OptionError
from streamfold.spark.stream.client import ServerConnection
from streamfold.spark.stream.options import (
    COLUMNS,
    Selection,
    Timestamps,
    parse_sink,
    parse_source,
)
from streamfold.spark.stream.source import StreamfoldSource, StreamReader

NEEDED = {"endpoint": "http://localhost:8080", "basin": "some-basin", "stream": "s"}


def test_what_is_not_said_has_a_default() -> None:
    options = parse_source(NEEDED)
    assert options.columns == COLUMNS
    assert options.fail_on_data_loss
    assert options.starting is None
    assert options.selection == Selection(("s",))
    assert options.endpoint.headers() == {"s2-basin": "some-basin"}


def test_names_may_be_written_in_any_case_and_values_come_as_text() -> None:
    given = {"STARTINGOFFSETS": '{"s": -2}', "failondataloss": "FALSE", "minPartitions": "4"}
    options = parse_source({**NEEDED, **given})
    assert options.starting == {"s": -2}
    assert not options.fail_on_data_loss
    assert options.min_partitions == 4


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("endpoint", "localhost:8080", "origin"),
        ("endpoint", "http://host/path", "no path"),
        ("endpoint", "http://user:pass@host", "origin"),
        ("startingOffset", "earliest", "is not known"),
        ("startingOffsets", "first", "must be earliest"),
        ("startingOffsets", '{"s": "1"}', "must be earliest"),
        ("startingOffsets", '{"s": true}', "must be earliest"),
        ("endingOffsets", "earliest", "nothing would be read"),
        ("startingTimestamp", "yesterday", "milliseconds"),
        ("startingTimestamp", "2026-01-31T12:00:00", "zone"),
        ("startingOffsetsByTimestamp", "1000", 'JSON such as {"stream": 1767225600000}'),
        ("startingOffsetsByTimestamp", '{"s": {"0": 1000}}', "milliseconds since 1970"),
        ("startingOffsetsByTimestamp", '{"s": -1}', "'-1', it must be milliseconds"),
        ("startingOffsetsByTimestampStrategy", "earliest", "must be error or latest"),
        ("endingTimestamp", "tomorrow", "'endingTimestamp' is 'tomorrow'"),
        ("endingOffsetsByTimestamp", '{"s": true}', "'True', it must be milliseconds"),
        ("minOffsetsPerTrigger", "many", "'minOffsetsPerTrigger' is 'many'"),
        ("maxTriggerDelay", "5m", "give that, too"),
        ("topic", "t", "is not known"),
        ("failOnDataLoss", "no", "true or false"),
        ("maxRecordsPerTrigger", "0", "at least 1"),
        ("minPartitions", "-1", "at least 1"),
        ("retryTimeout", "a while", "seconds"),
        ("columns", "body,nothing", "some of"),
        ("caFile", "/no/such/file", "No such file"),
        ("caFile", __file__, "certificates"),
        ("streams", "a,b", "give one"),
        ("streamsPattern", "(", "give one"),
    ],
)
def test_a_bad_value_is_refused_with_its_name_and_the_rule(
    name: str, value: str, words: str
) -> None:
    with pytest.raises(OptionError, match=words):
        parse_source({**NEEDED, name: value})


@pytest.mark.parametrize(
    ("records", "given", "tasks"),
    [
        (100, {}, 1),
        (600_000, {}, 3),
        (5_000_000, {}, 8),
        (20_000_000, {}, 20),
        (5_000_000, {"minPartitions": "1"}, 5),
        (5_000_000, {"maxRecordsPerPartition": "50000"}, 100),
    ],
)
def test_a_range_is_cut_into_as_many_tasks_as_it_is_worth(
    records: int, given: dict[str, str], tasks: int
) -> None:
    reader = StreamReader(parse_source({**NEEDED, **given}))
    assert len(reader.partitions({"s": 7}, {"s": 7 + records})) == tasks


def test_a_pattern_must_be_a_regular_expression() -> None:
    given = {"endpoint": "http://host", "basin": "some-basin", "streamsPattern": "("}
    with pytest.raises(OptionError, match="regular expression"):
        parse_source(given)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("endingOffsets", "latest"),
        ("endingOffsets", '{"s": 5}'),
        ("endingTimestamp", "5"),
        ("endingOffsetsByTimestamp", '{"s": 5}'),
    ],
)
def test_a_streaming_query_has_no_end(name: str, value: str) -> None:
    source = StreamfoldSource({**NEEDED, name.lower(): value})
    source.reader(source.schema())
    with pytest.raises(OptionError, match=rf"{name}.* is for batches.* leave it out"):
        source.streamReader(source.schema())


def test_some_column_must_be_left() -> None:
    with pytest.raises(OptionError, match="columns has headers alone"):
        parse_source({**NEEDED, "columns": "headers", "includeHeaders": "false"})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"startingTimestamp": "1", "startingOffsets": "latest"},
            "'startingTimestamp' cannot be combined with startingOffsets: give one",
        ),
        (
            {"startingTimestamp": "1", "startingOffsetsByTimestamp": '{"s": 1}'},
            "'startingTimestamp' cannot be combined with startingOffsetsByTimestamp",
        ),
        (
            {"endingOffsetsByTimestamp": '{"s": 1}', "endingOffsets": "latest"},
            "'endingOffsetsByTimestamp' cannot be combined with endingOffsets",
        ),
        ({"startingTimestamp": "1", "bootstrap": "true"}, "'bootstrap' cannot be combined"),
        ({"subscribePattern": "s.*"}, "'stream' cannot be combined with subscribePattern"),
        (
            {"maxOffsetsPerTrigger": "5", "maxRecordsPerTrigger": "5"},
            "'maxOffsetsPerTrigger' is Kafka's name of maxRecordsPerTrigger: give one",
        ),
        (
            {"minOffsetsPerTrigger": "5", "maxOffsetsPerTrigger": "4"},
            "'minOffsetsPerTrigger' is 5, which is more than the 4 of a batch at most",
        ),
        (
            {"minOffsetsPerTrigger": "5", "maxTriggerDelay": "soon"},
            "'maxTriggerDelay' is 'soon', it must be a time with a unit",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(given: dict[str, str], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        parse_source({**NEEDED, **given})


def test_kafka_s_names_mean_the_same() -> None:
    where = {"endpoint": "http://localhost:8080", "basin": "some-basin"}
    own = {
        "streams": "a,b",
        "maxRecordsPerTrigger": "9",
        "minRecordsPerTrigger": "3",
        "maxTriggerDelay": "2m",
    }
    kafka = {
        "subscribe": "a,b",
        "MAXOFFSETSPERTRIGGER": "9",
        "minOffsetsPerTrigger": "3",
        "maxTriggerDelay": "2m",
    }
    assert parse_source({**where, **kafka}) == parse_source({**where, **own})
    assert parse_source({**where, "subscribePattern": "a.*"}).selection == Selection(pattern="a.*")
    assert parse_sink({**where, "topic": "a"}) == parse_sink({**where, "stream": "a"})


def test_a_time_is_its_first_whole_millisecond() -> None:
    given = {**NEEDED, "startingTimestamp": "2026-01-01T01:00:00.0005+01:00"}
    assert parse_source(given).starting == Timestamps("startingTimestamp", 1_767_225_600_001)
    by_stream = {**NEEDED, "endingOffsetsByTimestamp": '{"s": 7, "t": "1970-01-01T00:00:01Z"}'}
    times = {"s": 7, "t": 1000}
    assert parse_source(by_stream).ending == Timestamps("endingOffsetsByTimestamp", times)


def test_a_schema_that_the_rows_do_not_have_is_refused() -> None:
    source = StreamfoldSource({**NEEDED, "columns": "seq_num,body"})
    source.reader(source.schema())
    with pytest.raises(InvalidError, match=r"struct<body:binary> is not .* the option columns"):
        source.reader(StructType([StructField("body", BinaryType())]))


def test_secrets_come_from_options_or_the_environment_and_show_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("S2_ACCESS_TOKEN", "from-environment")
    monkeypatch.setenv("S2_BASIN_ENDPOINT", "https://{basin}.b.example.com")
    options = parse_sink({"basin": "some-basin", "stream": "s", "encryptionKey": "k-e-y"})
    headers = options.endpoint.headers()
    assert headers == {"authorization": "Bearer from-environment", "s2-encryption-key": "k-e-y"}
    assert options.endpoint.url.host == "some-basin.b.example.com"
    assert ServerConnection(options.endpoint).endpoint.origin == "https://some-basin.b.example.com"
    assert not any(secret in repr(options) for secret in ("from-environment", "k-e-y"))
    assert "given" in repr(parse_sink({**NEEDED, "accessToken": "given"}).endpoint.headers())
