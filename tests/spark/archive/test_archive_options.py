"""Archive options are all parsed or rejected by name, and secrets appear in no message."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from streamfold.archive import ManifestNotFoundError
from streamfold.errors import FormatUnsupportedError, InvalidError
from streamfold.spark import OptionError
from streamfold.spark.archive import StreamfoldArchiveSource
from streamfold.spark.archive.options import Moment, parse_options
from streamfold.spark.archive.relation import resolve
from tests.archive.tables import START

from .conftest import Written

FEED = {"readChangeFeed": "true", "startingPosition": "9"}


def test_names_may_be_written_in_any_case_and_values_come_as_text() -> None:
    options = parse_options({"PATH": "/t", "positionasof": "12", "Columns": "a, b"})
    assert (options.storage.uri, options.at, options.columns) == ("/t", Moment("12"), ("a", "b"))
    assert options.since is None
    feed = parse_options({"path": "/t", **FEED, "ENDINGTIMESTAMP": "1780488000000"})
    assert feed.since == Moment("9")
    assert feed.at == Moment(time=START)
    at = parse_options({"path": "/t", "timestampAsOf": "2026-01-31T13:00:00+01:00"}).at
    assert at.time == datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"path": ""}, "'path' is missing"),
        ({"path": "memory:x"}, "only one process sees"),
        ({"versionAsOf": "3"}, "'versionasof' is not known; the options are .*positionAsOf"),
        (
            {"positionAsOf": "1", "timestampAsOf": "1"},
            "'timestampAsOf' cannot be combined with positionAsOf",
        ),
        ({"timestampAsOf": "yesterday"}, "milliseconds since 1970 or a time with a zone"),
        ({"timestampAsOf": "2026-01-31T12:00:00"}, "a time with a zone"),
        ({"timestampAsOf": "9" * 30}, "milliseconds since 1970"),
        ({"readChangeFeed": "yes"}, "true or false"),
        ({"readChangeFeed": "true"}, "'startingPosition' is missing"),
        ({"startingPosition": "3"}, "needs readChangeFeed"),
        ({"endingTimestamp": "3"}, "needs readChangeFeed"),
        ({**FEED, "positionAsOf": "3"}, "'positionAsOf' is for tables"),
        ({**FEED, "startingTimestamp": "3"}, "cannot be combined with startingPosition"),
        ({"columns": "a,,b"}, "names, each once"),
        ({"columns": "a,a"}, "names, each once"),
    ],
)
def test_a_bad_value_is_refused_with_its_name_and_the_rule(
    given: dict[str, str], words: str
) -> None:
    with pytest.raises(OptionError, match=words):
        parse_options({"path": "/t", **given})


def test_secrets_show_in_no_repr_and_no_message(written: Written) -> None:
    folder, _ = written(buckets=None, form="parquet")
    secret = "wHiSpEr-42"
    given = {"storage.secret_access_key": secret, "credentials.external_id": secret}
    options = parse_options({"path": "s3://bucket/table", **given})
    assert options.storage.options == {"secret_access_key": secret}
    assert secret not in repr(options)
    for path in (folder.as_uri(), "s3://bucket/table"):
        with pytest.raises(InvalidError) as raised:
            resolve(parse_options({"path": path, **given}))
        assert secret not in str(raised.value)


def test_a_position_outside_the_archive_is_reported_on_load(
    written: Written, tmp_path: Path
) -> None:
    folder, _ = written(buckets=None, form="parquet")

    def load(**options: str) -> None:
        StreamfoldArchiveSource({"path": str(folder), **options}).schema()

    with pytest.raises(InvalidError, match=r"\['nothing'\] are not all there: name some of \['id'"):
        load(columns="nothing")
    with pytest.raises(InvalidError, match=r"formats \['csv'\] are not known"):
        load(formats="csv")
    source = StreamfoldArchiveSource({"path": str(folder), "formats": "jsonl"})
    reader = source.reader(source.schema())
    with pytest.raises(FormatUnsupportedError, match=r"exists as \['parquet'\]"):
        reader.partitions()
    with pytest.raises(ManifestNotFoundError, match="name the folder of a table"):
        load(path=str(tmp_path))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, r"'readChangeFeed' must be true in streaming.* load the rows with spark\.read"),
        ({**FEED, "endingPosition": "31"}, "'endingPosition' is for batches"),
        ({**FEED, "endingTimestamp": "3"}, "'endingTimestamp' is for batches"),
    ],
)
def test_a_streaming_query_reads_changes_and_has_no_end(given: dict[str, str], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        StreamfoldArchiveSource({"path": "/t", **given}).streamReader(StructType())


def test_a_schema_of_the_user_chooses_columns_and_must_fit(written: Written) -> None:
    folder, history = written(buckets=None, form="parquet")
    source = StreamfoldArchiveSource({"path": str(folder)})
    wanted = StructType([StructField("name", StringType()), StructField("id", LongType())])
    reader = source.reader(wanted)
    [part] = reader.partitions()
    names = [n for batch in reader.read(part) for n in batch["name"].to_pylist()]
    assert sorted(names, key=str) == sorted((r["name"] for r in history.state.values()), key=str)
    with pytest.raises(
        InvalidError, match="does not hold what is read, which is struct<id:bigint>"
    ):
        source.reader(StructType([StructField("id", IntegerType())]))
    with pytest.raises(InvalidError, match="does not hold"):
        source.reader(StructType([StructField("name", StringType(), False)]))
