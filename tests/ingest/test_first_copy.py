"""First copies: native code and the encoder write the same records, up to the limits of an append."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import psycopg2
import pytest
from psycopg2 import sql
from psycopg2.extras import execute_values

from streamfold.follow.clients.client import EncodedBatch
from streamfold.ingest import RowTooLargeError
from streamfold.ingest.errors import CopyStaleError, SourceUnavailableError, SourceUnusableError
from streamfold.ingest.postgres import first_copy, values
from streamfold.ingest.postgres.catalog import find_tables
from streamfold.ingest.postgres.connection import Database
from streamfold.ingest.postgres.copy_source import copied_blocks, exported_snapshot
from streamfold.ingest.postgres.first_copy import EncodedLines, copy_table
from streamfold.ingest.postgres.rows import RowEncoder
from streamfold.ingest.table_stream import CopyPosition, TableStream
from streamfold.model.records import (
    BATCH_BYTES_MAX,
    BATCH_RECORDS_MAX,
    Record,
    metered_size,
)
from streamfold.records.protobuf import fields
from tests.ingest.ingesting import decode_batch
from tests.ingest.postgres import PATIENCE, execute
from tests.records.reference import parse_record

ROWS = 2500
COLUMNS = {
    "a": "text", "b": "bytea", "c": "double precision", "d": "real", "e": "timestamp",
    "f": "timestamptz", "g": "date", "h": "numeric", "i": "text[]", "j": "jsonb", "k": "char(7)",
    "l": "boolean", "m": "bigint", "n": "inet", "o": "interval", "p": "money", "q": "word",
    "r": '"char"', 'odd " \\ name': "varchar", "t": "moment",
}  # fmt: skip
TEXTS = "\\\"'\t\n\r\b\f\v\x01\x1f\x7f\x80éß\u2028\ud7ff\ue000😀N{},/ aZ0%"


class Values:
    """Random values that are hard to write."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._odd = False

    def row(self, number: int) -> tuple[Any, ...]:
        self._odd = self._random.random() < 0.2  # the kernel does not write all dates
        made = (
            self.text(), self._random.randbytes(self._random.choice((0, 1, 2, 60, 300))),
            self.double(), self.double(single=True), self.moment(), self.moment() , self.moment(),
            self.number(), [self.text(), None], f'{{"k": "{number}", "x": [1.0, null]}}',
            self.text()[:7], self._random.random() < 0.5, self._random.randint(-(2**63), 2**63 - 1),
            f"10.0.{number % 256}.1/{self._random.choice((32, 8))}",
            f"{self._random.randint(-99, 99)} mon {self._random.randint(-9, 9)} day -00:00:01.5",
            str(self._random.randint(-(10**6), 10**6) / 100), self.text() or "x",
            self._random.choice("a\\ 0"), self.text(), self.moment(),
        )  # fmt: skip
        nullable = (None if self._random.random() < 0.1 else value for value in made)
        return f"{self.text()}{number}", number, *nullable

    def text(self) -> str:
        return "".join(self._random.choices(TEXTS, k=self._random.choice((0, 1, 3, 40))))

    def double(self, *, single: bool = False) -> float:
        kind = "f" if single else "d"
        plain = self._random.choice((0.0, -0.0, 3.0, 1e15, 1e16, 1e-5, float("nan"), float("inf")))
        raw = self._random.randbytes(struct.calcsize(kind))
        return float(plain if self._random.random() < 0.5 else struct.unpack(kind, raw)[0])

    def moment(self) -> str:
        years = (1, 44, 1969, 2026, 9999, *((10_000, 200_000) if self._odd else ()))
        year = self._random.choice(years)
        era = " BC" if self._odd and year < 100 and self._random.random() < 0.5 else ""
        fraction = self._random.choice(("", ".5", ".000001"))
        texts = f"{year:04}-02-28 23:59:59{fraction}{era}", "infinity", "-infinity"
        return self._random.choices(texts, (8, 1, 1) if self._odd else (1, 0, 0))[0]

    def number(self) -> str:
        return self._random.choice(("NaN", "1e-20", "-123456789012345678901234567890.5", "0"))


@dataclass
class Collected:
    """A client that keeps what is appended."""

    name: str = "t"
    records: list[Record] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)

    async def append_encoded(self, batches: Sequence[EncodedBatch], **_: object) -> int:
        for batch in batches:
            records = decode_batch(batch)
            assert len(records) == batch.record_count
            assert sum(map(metered_size, records)) == batch.metered <= BATCH_BYTES_MAX
            self.records += records
            self.batches.append(len(records))
        return len(self.records)


async def copied(uri: str, client: Collected, key: tuple[str, ...] | None = None) -> Collected:
    database = Database(uri)
    target: Any = client  # it has what a copy needs of a client
    with database.query() as cursor:
        (table,) = find_tables(cursor, ["t"])
    async with exported_snapshot(database) as snapshot:
        await copy_table(
            database, table, TableStream(target, "x"), snapshot,
            CopyPosition("0/1", 0 if key is None else 900, key), lambda *_: None,
        )  # fmt: skip
    return client


@pytest.fixture
def hostile(database: str) -> str:
    """A database with a table of values that are hard to write."""
    quoted = {f'"{name.replace(chr(34), chr(34) * 2)}"': kind for name, kind in COLUMNS.items()}
    execute(
        database,
        "CREATE DOMAIN word AS text CHECK (VALUE <> '')",
        "CREATE DOMAIN moment AS timestamptz",
        "CREATE TABLE t (k1 text, k2 int, "
        + ", ".join(f"{name} {kind}" for name, kind in quoted.items())
        + ", PRIMARY KEY (k1, k2))",
    )
    made = Values(seed=5)
    casts = ", ".join(["%s::text", "%s::int", *(f"%s::{kind}" for kind in quoted.values())])
    with psycopg2.connect(database) as connection, connection.cursor() as cursor:
        cursor.execute("SET timezone = 'UTC'")
        rows = [made.row(number) for number in range(ROWS)]
        execute_values(cursor, "INSERT INTO t VALUES %s", rows, f"({casts})", page_size=500)
    connection.close()
    return database


@pytest.fixture(params=[True, False], ids=["native", "python"])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With native code, and as if it left every line to the encoder."""
    if not request.param:
        monkeypatch.setattr(first_copy, "_BLOCK_MAX", -1)


async def copied_both_ways(
    uri: str, monkeypatch: pytest.MonkeyPatch, key: tuple[str, ...] | None = None
) -> tuple[Collected, Collected]:
    """Copy by native code, and by the encoder alone."""
    quick = await copied(uri, Collected(), key)
    with monkeypatch.context() as without:
        without.setattr(first_copy, "_BLOCK_MAX", -1)
        return quick, await copied(uri, Collected(), key)


async def test_native_code_and_the_encoder_make_the_same_records(
    hostile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick, plain = await copied_both_ways(hostile, monkeypatch)
    assert len(plain.records) == ROWS + 2
    for one, other in zip(plain.records, quick.records, strict=True):
        assert one.body == other.body
    assert plain.batches == quick.batches == [1, BATCH_RECORDS_MAX, BATCH_RECORDS_MAX, 500, 1]
    # The ends of the copies name their snapshots, which differ.
    assert plain.records[:-1] == quick.records[:-1]


async def test_native_code_and_the_encoder_resume_after_the_same_key(
    hostile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = await copied(hostile, Collected())
    headers = dict(whole.records[BATCH_RECORDS_MAX].headers)
    (key,) = execute(hostile, "SELECT k1, k2::text FROM t ORDER BY k1, k2 LIMIT 1 OFFSET 999")
    assert b"key" in headers
    quick, plain = await copied_both_ways(hostile, monkeypatch, key)
    assert len(plain.records) == ROWS - 1000 + 1
    assert plain.records[:-1] == quick.records[:-1]


@pytest.mark.usefixtures("native")
async def test_large_rows_fill_appends_up_to_their_limit_and_not_beyond(
    database: str,
) -> None:
    execute(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, a text)",
        """INSERT INTO t SELECT n, repeat('"', 50000 * (n % 5 + 1)) FROM generate_series(1, 20) n""",
    )
    found = await copied(database, Collected())
    assert found.batches == [1, 3, 3, 2, 3, 2, 3, 2, 2, 1]
    execute(database, "UPDATE t SET a = repeat('x', 1 << 20) WHERE id = 7")
    with pytest.raises(RowTooLargeError, match=r'row \{"id":7\} of table public.t .* column \'a\''):
        await copied(database, Collected())


@pytest.mark.usefixtures("native")
async def test_a_copy_of_keys_that_exceed_the_reserve_fills_appends_and_not_beyond(
    database: str,
) -> None:
    execute(
        database,
        "CREATE TABLE t (k text PRIMARY KEY, a text)",
        # An index compresses its keys, so that such long ones are possible.
        """INSERT INTO t SELECT repeat(chr(64 + n), 100000), repeat('x', 150000)
        FROM generate_series(1, 9) n""",
    )
    found = await copied(database, Collected())
    assert found.batches == [1, 3, 3, 3, 1]
    resumed = await copied(database, Collected(), ("C" * 100_000,))
    assert resumed.batches == [3, 3, 1]
    execute(database, "UPDATE t SET k = repeat('z', 200000), a = repeat('x', 800000) WHERE k < 'B'")
    with pytest.raises(RowTooLargeError, match=r"of table public.t takes"):
        await copied(database, Collected())


def test_native_code_and_encoder_end_appends_alike_whatever_the_size_of_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random(12)
    sizes = (1, 1020, 1024, 1025, 1400, 8200, 20_000, 60_000)
    blocks = []
    for _ in range(20):
        lines = [
            b"%s%06d\t%s\n" % (
                rng.choice((b"k", b"\x01", b'"', b"\\\\")) * rng.choice(sizes), at,
                b"v" * rng.choice((0, 30_000, 100_000)),
            )
            for at in range(30)
        ]  # fmt: skip
        blocks.append(b"".join(lines))
    quick, plain = both_ways(monkeypatch, [25, 25], blocks)
    assert quick == plain
    for batches in quick:
        assert sum(batch.record_count for batch in batches) == 30
        assert all(batch.metered <= BATCH_BYTES_MAX for batch in batches)


#: By type: values that PostgreSQL sends, and some that it would only send for another type.
TYPED = {
    values.INT4: [b"0", b"-17", b"2147483647", b"007", b"-", b"", b"1.5", b"+1", b"1e5", b"12a"],
    values.FLOAT8: [
        b"1", b"-0", b"1.5", b"1e-05", b"-1.5e+300", b"NaN", b"Infinity", b"-Infinity",
        b".5", b"1.", b"1e", b"1e5", b"01", b"nan", b"Infinite", b"1.5x", b"", b"-",
    ],
    values.BOOL: [b"t", b"f", b"true", b"false", b"1", b""],
    values.BYTEA: [
        b"\\\\x", b"\\\\x00ff10", b"\\\\x0", b"\\\\x0G", b"\\\\xAB", b"hello world!", b"\xff" * 9,
        b"\\\\x 61", b"", b"x",
    ],
    values.DATE: [
        b"2026-01-31", b"0044-03-15 BC", b"10000-01-01", b"infinity", b"-infinity", b'a"b\\\\c d\x01x',
        b"2026/01/31", b"2026-01-3x", b"2026-01-31 00:00:00", b"",
    ],
    values.TIMESTAMP: [
        b"2026-01-31 12:00:00", b"2026-01-31 12:00:00.000001", b"infinity", b"0044-03-15 01:02:03 BC",
        b"2026-01-31 12:00:00+00", b"2026-01-31 12:00:00.", b"2026-01-31T12:00:00", b"2026-01-31",
        b'2026-"1-31 12:00:00', b"abcd-" + b" " * 20, b"",
    ],
    values.TIMESTAMPTZ: [
        b"2026-01-31 12:00:00+00", b"2026-01-31 12:00:00.5+00", b"-infinity", b"+00", b"00",
        b"10000-01-01 00:00:00+00", b"2026-01-31 12:00:00+01", b"2026-01-31 12:00:00", b"",
    ],
    25: [
        b"", b"plain", b'"', b"\\\\", b"\\t\\n\\v", b"\\N", b"\\Nx", b"\\q", b"x\\", b"\r", b"\x01",
        b"\x0b", "é😀".encode(), b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"\x00",
    ],
}  # fmt: skip
HOSTILE_LINES = 6000


def hostile_line(rng: random.Random, types: Sequence[int]) -> bytes:
    """A line that may have values of wrong types, bytes that are not UTF-8, or too many values."""
    kinds = [kind if rng.random() < 0.9 else rng.choice(types) for kind in types]
    valid = 2 if rng.random() < 0.5 else None  # the first two of each type
    line = bytearray(b"\t".join(rng.choice(TYPED[kind][:valid]) for kind in kinds))
    if line and rng.random() < 0.3:
        line[rng.randrange(len(line))] = rng.choice(b'\\"\tN09-+.:xe \x00\x08\x0c\r\x7f\x80\xff')
    return bytes(line) + b"\n"


def gathered(types: Sequence[int], lines: bytes) -> list[EncodedBatch] | str:
    """Return the appends of lines, or the error, by what encodes lines now."""
    columns = [(f"c{at}", oid) for at, oid in enumerate(types)]
    found = EncodedLines(RowEncoder("public.t", columns, ["c0"], copying=True), "0/1", 0)
    try:
        return [*found.add(lines), found.flush()]
    except (SourceUnusableError, RowTooLargeError) as error:
        return error.message


def both_ways(
    monkeypatch: pytest.MonkeyPatch, types: Sequence[int], blocks: Sequence[bytes]
) -> tuple[list[Any], list[Any]]:
    """Return the appends, or the error, of each block: by native code, and by the encoder."""
    quick = [gathered(types, block) for block in blocks]
    with monkeypatch.context() as without:
        without.setattr(first_copy, "_BLOCK_MAX", -1)
        return quick, [gathered(types, block) for block in blocks]


def test_native_code_and_encoder_agree_on_values_of_wrong_types_and_invalid_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random(11)
    for types in (*([kind] for kind in TYPED), [25, *TYPED], [25, 25]):
        count = HOSTILE_LINES // 10
        blocks = [hostile_line(rng, types) for _ in range(count)]
        blocks += [b"".join(rng.choices(blocks, k=3)) for _ in range(count // 10)]
        blocks += [value + b"\n" for value in TYPED[types[0]]]
        quick, plain = both_ways(monkeypatch, types, blocks)
        for block, one, other in zip(blocks, quick, plain, strict=True):
            assert one == other, block
        records = [batch for found in quick if isinstance(found, list) for batch in found]
        assert records
        for batch in records:
            for _, start, end in fields(batch.records, 0, len(batch.records)):
                msgspec.json.decode(parse_record(batch.records, start, end).body)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("changed", ["bytea", "date", "boolean", "bigint"])
async def test_a_copy_of_columns_that_changed_before_it_is_stale_and_not_complete(
    database: str, changed: str
) -> None:
    execute(database, f"CREATE TABLE t (id int PRIMARY KEY, a {changed})")
    source, found = Database(database), Collected()
    target: Any = found
    with source.query() as cursor:
        (table,) = find_tables(cursor, ["t"])
    execute(
        database,
        "ALTER TABLE t ALTER a TYPE text USING a::text",
        "INSERT INTO t VALUES (1, 'hello \"world!')",
    )
    async with exported_snapshot(source) as snapshot:
        with pytest.raises(CopyStaleError, match=r"table public\.t is copied again: its columns"):
            await copy_table(
                source, table, TableStream(target, "x"), snapshot,
                CopyPosition("0/1", 0, None), lambda *_: None,
            )  # fmt: skip
    assert len(found.records) == 1  # the declaration, and no mark of a complete copy


@pytest.mark.usefixtures("native")
async def test_a_copy_of_a_column_whose_type_only_widened_is_stale_too(database: str) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY, a int)")
    source, found = Database(database), Collected()
    target: Any = found
    with source.query() as cursor:
        (table,) = find_tables(cursor, ["t"])
    execute(database, "ALTER TABLE t ALTER a TYPE bigint", "INSERT INTO t VALUES (1, 1 << 40)")
    async with exported_snapshot(source) as snapshot:
        with pytest.raises(CopyStaleError):
            await copy_table(
                source, table, TableStream(target, "x"), snapshot,
                CopyPosition("0/1", 0, None), lambda *_: None,
            )  # fmt: skip
    assert not any(b'"e"' in record.body for record in found.records)


@pytest.mark.usefixtures("native")
def test_a_row_that_is_not_utf8_is_an_error_that_names_table_key_and_column() -> None:
    message = gathered([values.INT4, 25], b"6\tgood\n7\t\xff\xfe\n")
    assert isinstance(message, str)
    assert "the row with key (7) of table public.t has a value in column 'c1'" in message
    assert "correct the value" in message


async def test_a_snapshot_that_postgres_lost_between_two_tables_is_tried_again(
    database: str,
) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    source, client = Database(database), Collected()
    target: Any = client
    with source.query() as cursor:
        (table,) = find_tables(cursor, ["t"])
    exists = "EXISTS (SELECT FROM pg_ls_dir('pg_snapshots') AS name WHERE name = '{}')"
    async with exported_snapshot(source) as snapshot:
        assert execute(database, f"SELECT {exists.format(snapshot.name)}") == [(True,)]
    # Its process ends after the connection: until then, others can still use the snapshot.
    loop = f"WHILE {exists.format(snapshot.name)} LOOP PERFORM pg_sleep(0.01); END LOOP"
    execute(database, f"DO $$ BEGIN {loop}; END $$")
    with pytest.raises(SourceUnavailableError, match="has lost the snapshot"):
        await copy_table(
            source, table, TableStream(target, "x"), snapshot,
            CopyPosition("0/1", 0, None), lambda *_: None,
        )  # fmt: skip
    assert len(client.records) == 1  # the declaration, and no mark of a complete copy


async def test_a_copy_that_has_no_row_yet_can_be_stopped(database: str) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    source = Database(database)
    with source.query() as cursor:
        (table,) = find_tables(cursor, ["t"])
    sleeping = "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'PgSleep'"
    async with asyncio.timeout(PATIENCE), exported_snapshot(source) as snapshot:
        async with copied_blocks(
            source, table, snapshot.name, None, sql.SQL("pg_sleep(600)")
        ) as found:
            reading = asyncio.ensure_future(anext(found))
            while not await asyncio.to_thread(execute, database, sleeping):
                assert not reading.done()
            reading.cancel()
        assert not execute(database, sleeping)
    # A thread that waited for a row would keep the loop from closing.
    await asyncio.wait_for(asyncio.get_running_loop().shutdown_default_executor(), PATIENCE)


async def lines_of(database: str, values: str) -> list[bytes]:
    """The blocks of a COPY of values of table t."""
    source = Database(database)
    with source.query() as cursor:
        (table,) = find_tables(cursor, ["t"])
    async with (
        exported_snapshot(source) as snapshot,
        copied_blocks(source, table, snapshot.name, None, sql.SQL(values)) as found,
    ):
        return [block async for block in found]


async def test_native_code_writes_a_large_table_from_its_first_row_on(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_python: list[bytes] = []
    monkeypatch.setattr(EncodedLines, "_add_line", lambda _, line: by_python.append(line))
    execute(database, "CREATE TABLE t (id int PRIMARY KEY, a text)",
            "INSERT INTO t SELECT n, repeat('x', 84) FROM generate_series(1, 40000) n")  # fmt: skip
    found = await copied(database, Collected())
    assert len(found.records) == 40_002
    assert not by_python


async def test_lines_arrive_in_order_however_long_and_many(database: str) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY, a text)",
            "INSERT INTO t SELECT n, repeat('x', n % 50) FROM generate_series(1, 50000) n",
            "INSERT INTO t SELECT -n, repeat(chr(9), n * 500000) FROM generate_series(1, 6) n",
            "INSERT INTO t VALUES (0, NULL)")  # fmt: skip
    blocks = await lines_of(database, "id, a")
    assert b"".join(blocks) == b"".join(
        [
            *(b"-%d\t%s\n" % (n, b"\\t" * 500_000 * n) for n in range(6, 0, -1)),
            b"0\t\\N\n",
            *(b"%d\t%s\n" % (n, b"x" * (n % 50)) for n in range(1, 50_001)),
        ]
    )
    assert all(block.endswith(b"\n") for block in blocks)
    execute(database, "TRUNCATE t")
    assert await lines_of(database, "id") == []


async def test_a_copy_that_fails_between_its_rows_raises_the_error_of_postgres(
    database: str,
) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY)",
            "INSERT INTO t SELECT generate_series(1, 20000)")  # fmt: skip
    with pytest.raises(SourceUnusableError, match="division by zero"):
        await lines_of(database, "1 / (id - 15000)")
    with pytest.raises(SourceUnusableError, match="no_such_column"):
        await lines_of(database, "no_such_column")
