"""Changes that native code encodes, and changes that are encoded one by one, are the same records."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from streamfold._native import Run
from streamfold.errors import StreamfoldError
from streamfold.follow.clients.client import encoded_record
from streamfold.ingest.errors import RowTooLargeError, SourceUnusableError
from streamfold.ingest.postgres import values
from streamfold.ingest.postgres.change_writer import ChangeWriter, joined
from streamfold.ingest.postgres.changes import ChangeRecords
from streamfold.ingest.postgres.pgoutput import Relation, decode_message
from streamfold.model.records import BATCH_BYTES_MAX, BATCH_RECORDS_MAX, Record, metered_size
from streamfold.records.protobuf import fields
from tests.proving import seeds
from tests.records.reference import parse_record

#: Number, name, key, and columns with their types.
TABLES = (
    (
        7,
        "a",
        ("id",),
        {"id": values.INT4, 'odd " name': 25, "c": values.FLOAT8, "d": 1184, "e": 17},
    ),
    (9, "b", ("k2", "k1"), {"k1": 25, "k2": values.INT8, "on": values.BOOL, "day": values.DATE}),
    (300, "not.followed", ("id",), {"id": values.INT4}),
)
GOOD: dict[int, tuple[bytes, ...]] = {
    values.INT4: (b"0", b"-7", b"2147483647"),
    values.INT8: (b"9", b"-9223372036854775808"),
    values.FLOAT8: (b"1", b"-0", b"1e+300", b"2.50", b"NaN", b"-Infinity"),
    values.TIMESTAMPTZ: (b"2026-11-16 19:00:00.5+00", b"0001-01-01 00:00:00+00"),
    values.BYTEA: (b"\\x", b"\\x00ff10", b"\\xabcd"),
    values.BOOL: (b"t", b"f"),
    values.DATE: (b"2026-11-16",),
    25: (b"", b"plain", '"\\\x01\t\n/é😀\u2028\x7f'.encode(), b"x" * 300),
}
#: Values that only the encoder writes.
RARE = {
    1184: (b"infinity", b"10000-01-01 00:00:00+00"),
    values.DATE: (b"0044-03-15 BC", b"-infinity"),
}
#: Values that neither writes.
BAD = (b"\xff", b"", b"1.", b"007", b"\\x0", b"2026-11-16x", b"true")


class Messages:
    """What a server might send."""

    def __init__(self, seed: int, *, rare: float = 0.03, bad: float = 0.0) -> None:
        self._random = random.Random(seed)
        self._rare, self._bad = rare, bad
        self._lsn = self._random.choice((0x16B3748, 0xFFFFFFFF0))

    def transactions(self, count: int) -> Iterator[bytes]:
        for relation in TABLES:
            yield self.relation(*relation)
        for number in range(count):
            self._lsn += self._random.randint(8, 5000)
            moment = 800_000_000_000_000 + number * 1_000_003
            yield b"B" + struct.pack(">QqI", self._lsn, moment, number)
            for _ in range(self._random.choice((0, 1, 3, 20))):
                yield self.message()
            yield b"C" + struct.pack(">BQQq", 0, self._lsn, self._lsn + 40, moment)

    def message(self) -> bytes:
        kind = self._random.random()
        if kind < 0.01:
            return self.relation(*self._random.choice(TABLES))
        if kind < 0.02:
            return b"T" + struct.pack(">IBI", 1, 0, self._random.choice(TABLES)[0])
        if kind < 0.03:
            return self._random.choice((b"Y", b"O", b"M")) + b"anything"
        return self.change()

    def change(self) -> bytes:
        number, _, _, columns = self._random.choices(TABLES, (5, 3, 1))[0]
        head, new = struct.pack(">I", number), b"N" + self.row(columns)
        old = self._random.choice((b"", b"K", b"O"))
        match self._random.choice("IUUD"):
            case "I":
                return b"I" + head + new
            case "D":
                return b"D" + head + (old or b"K") + self.row(columns)
        return b"U" + head + (old + self.row(columns) if old else b"") + new

    def row(self, columns: dict[str, int]) -> bytes:
        return struct.pack(">H", len(columns)) + b"".join(map(self.value, columns.values()))

    def value(self, oid: int) -> bytes:
        chance = self._random.random()
        if chance < 0.05:
            return self._random.choice((b"n", b"u"))
        options = RARE.get(oid, GOOD[oid]) if self._random.random() < self._rare else GOOD[oid]
        text = self._random.choice(BAD if self._random.random() < self._bad else options)
        return b"t" + struct.pack(">I", len(text)) + text

    def relation(
        self, number: int, name: str, key: Sequence[str], columns: dict[str, int]
    ) -> bytes:
        parts = [b"R", struct.pack(">I", number), b"public\0", name.encode(), b"\0d"]
        parts.append(struct.pack(">H", len(columns)))
        for column, oid in columns.items():
            parts += [bytes([column in key]), column.encode(), b"\0", struct.pack(">Ii", oid, -1)]
        return b"".join(parts)

    def damaged(self, messages: Sequence[bytes]) -> Iterator[bytes]:
        """The messages, one in fifty of them with a byte more, less or changed.

        Not those of tables that are not followed, into which the kernel does not look, nor the LSNs of
        commits, which increase, nor descriptions, which are compared with the catalog elsewhere.
        """
        for message in messages:
            spared = message[:1] in b"BR" or message[1:5] == struct.pack(">I", 300)
            if self._random.random() < 0.02 and not spared:
                at = self._random.randrange(len(message))
                byte = self._random.choice((b"", self._random.randbytes(1), b"\xff\xff"))
                yield message[:at] + byte + message[at + 1 :]
            else:
                yield message


@dataclass
class Outcome:
    """What was yielded, by stream, and how it ended."""

    records: dict[str, list[Record]] = field(default_factory=dict)
    changes: dict[str, int] = field(default_factory=dict)
    failure: str = ""
    committed: tuple[int, int] = (0, 0)
    #: Messages that native code left to the encoder.
    left: int = 0
    quiet: int = 0

    def add(self, table: str, record: Record, *, shared: bool) -> None:
        self.records.setdefault("all" if shared else table, []).append(record)

    def count(self, table: str, count: int) -> None:
        self.changes[table] = self.changes.get(table, 0) + count


def made(*, one_stream: bool, position: tuple[int, int] = (0, -1)) -> ChangeRecords:
    def declare(table: str, relation: Relation) -> bytes:
        return b'{"op":"s","table":"%s"}' % table.encode()

    def look_up(table: str, columns: Sequence[str], key: Sequence[str]) -> list[bytes | None]:
        return [None for _ in columns]

    changes = ChangeRecords(lambda oid: oid, look_up, declare, one_stream)
    for _, name, key, _ in TABLES:
        if name != "not.followed":
            changes.follow(f"public.{name}", key, *position)
    return changes


def fed(changes: ChangeRecords, outcome: Outcome, message: bytes) -> None:
    for table, record in list(changes.feed(decode_message(message))):
        outcome.add(table, record, shared=changes.one_stream)
        outcome.count(table, 1)


def one_by_one(messages: Sequence[bytes], changes: ChangeRecords) -> Outcome:
    outcome = Outcome()
    try:
        for message in messages:
            fed(changes, outcome, message)
    except StreamfoldError as error:
        outcome.failure = str(error)
    outcome.committed = changes.committed, changes.committed_at
    return outcome


def by_native_code(
    messages: Sequence[bytes],
    changes: ChangeRecords,
    seed: int,
    sizes: Sequence[int] = (1, 2, 7, 100, 1000),
) -> Outcome:
    """In runs of random length."""
    outcome, writer, lengths = Outcome(), ChangeWriter(changes), random.Random(seed)
    start = 0
    try:
        while start < len(messages):
            run = Run.of(messages[start : start + lengths.choice(sizes)])
            start += len(run)
            written_by_native_code(run, writer, changes, outcome)
    except StreamfoldError as error:
        outcome.failure = str(error)
    outcome.committed = changes.committed, changes.committed_at
    return outcome


def written_by_native_code(
    run: Run, writer: ChangeWriter, changes: ChangeRecords, outcome: Outcome
) -> None:
    at = 0
    while at < len(run):
        written = writer.write(run, at)
        for table, batch in written.batches:
            found = list(fields(batch.records, 0, len(batch.records)))
            records = [parse_record(batch.records, start, end) for _, start, end in found]
            assert batch.record_count == len(records) <= BATCH_RECORDS_MAX
            assert batch.metered == sum(map(metered_size, records)) <= BATCH_BYTES_MAX
            assert b"".join(map(encoded_record, records)) == batch.records
            for record in records:
                outcome.add(table, record, shared=changes.one_stream)
        for table, count in written.changes.items():
            outcome.count(table, count)
        if written.next == at and not written.batches:
            fed(changes, outcome, run[at])
            outcome.left += 1
            written.next += 1
        at = written.next


@pytest.mark.parametrize("one_stream", [False, True])
@pytest.mark.parametrize("seed", seeds(3, proving=50))
def test_native_code_yields_the_records_of_the_encoder(seed: int, one_stream: bool) -> None:
    messages = list(Messages(seed).transactions(150))
    plain = one_by_one(messages, made(one_stream=one_stream))
    quick = by_native_code(messages, made(one_stream=one_stream), seed)
    assert not plain.failure
    assert quick.left < len(messages) / 5  # most of them are native code's
    quick.left = 0
    assert quick == plain


@pytest.mark.parametrize("seed", seeds(10, proving=1000))
def test_native_code_fails_on_hostile_bytes_as_the_encoder_does(seed: int) -> None:
    source = Messages(seed, bad=0.01)
    messages = list(source.damaged(list(source.transactions(30))))
    one_stream = seed % 2 == 0
    plain = one_by_one(messages, made(one_stream=one_stream))
    single = by_native_code(messages, made(one_stream=one_stream), seed, sizes=[1])
    single.left = 0
    assert single == plain
    # In a longer run a change is encoded after others have come, of which one may fail before it.
    quick = by_native_code(messages, made(one_stream=one_stream), seed)
    assert bool(quick.failure) == bool(plain.failure)
    for stream, records in plain.records.items():
        got = quick.records.get(stream, [])
        assert records[: len(got)] == got[: len(records)]


@pytest.mark.parametrize("index", [-1, 0, 3])
def test_native_code_leaves_out_what_the_stream_has(index: int) -> None:
    messages = list(Messages(3).transactions(40))
    begins = [decode_message(message) for message in messages if message[:1] == b"B"]
    position = (begins[20].commit_lsn, index)  # type: ignore[union-attr]
    plain = one_by_one(messages, made(one_stream=True, position=position))
    quick = by_native_code(messages, made(one_stream=True, position=position), 1)
    assert quick.records == plain.records
    assert quick.changes == plain.changes


def transaction(*changes: bytes, lsn: int = 99, moment: int = 0) -> list[bytes]:
    begin = b"B" + struct.pack(">QqI", lsn, moment, 1)
    return [begin, *changes, b"C" + struct.pack(">BQQq", 0, lsn, lsn + 1, moment)]


def described(changes: ChangeRecords) -> ChangeWriter:
    """A writer that knows the columns of all tables."""
    outcome, source = Outcome(), Messages(1)
    for relation in TABLES:
        fed(changes, outcome, source.relation(*relation))
    first = b"I" + struct.pack(">I", 9) + b"N\0\4t\0\0\0\1xt\0\0\0\0011nn"
    for message in transaction(first, lsn=9):
        fed(changes, outcome, message)
    return ChangeWriter(changes)


def text_insert(text: bytes) -> bytes:
    size = struct.pack(">I", len(text))
    return b"I" + struct.pack(">I", 9) + b"N\0\4t" + size + text + b"t\0\0\0\0011nn"


def test_a_large_transaction_becomes_batches_that_one_append_takes() -> None:
    changes = made(one_stream=False)
    writer = described(changes)
    run = Run.of([*transaction(*[text_insert(b"%d" % n + b"z" * 2000) for n in range(1500)])])
    outcome = Outcome()
    written_by_native_code(run, writer, changes, outcome)
    assert len(outcome.records["public.b"]) == 1500
    assert outcome.left == 0
    assert outcome.records["public.b"][-1].body.endswith(b'"last":true}}')


def test_a_row_that_no_record_can_hold_is_named() -> None:
    changes = made(one_stream=False)
    writer = described(changes)
    run = Run.of(transaction(text_insert(b"x"), text_insert(b"y" * (1 << 20))))
    with pytest.raises(RowTooLargeError, match="column 'k1'"):
        written_by_native_code(run, writer, changes, Outcome())


def test_an_update_leaves_out_the_row_as_it_was_if_both_exceed_a_record() -> None:
    source = Messages(0)
    briefs = []
    for length in (*range(524_000, 524_288, 24), 600_000):
        text = b"t" + struct.pack(">I", length) + b"z" * length
        row = b"\0\5t\0\0\0\0011" + text + b"nnn"
        update = b"U" + struct.pack(">I", 7) + b"O" + row + b"N" + row
        messages = [
            *(source.relation(*relation) for relation in TABLES),
            *transaction(text_insert(b"x"), update, text_insert(b"y")),
        ]
        plain = one_by_one(messages, made(one_stream=False))
        assert by_native_code(messages, made(one_stream=False), 1, [3]).records == plain.records
        change = plain.records["public.a"][-1]
        assert metered_size(change) <= BATCH_BYTES_MAX
        briefs.append(b'"before"' not in change.body)
    assert briefs == sorted(briefs)
    assert {*briefs} == {False, True}


def test_a_text_that_is_not_utf8_is_named() -> None:
    changes = made(one_stream=False)
    run = Run.of(transaction(text_insert(b"caf\xe9")))
    with pytest.raises(SourceUnusableError, match="column 'k1'"):
        written_by_native_code(run, described(changes), changes, Outcome())


def test_batches_are_joined_up_to_what_one_append_takes() -> None:
    changes = made(one_stream=False)
    writer, batches = described(changes), []
    for number in range(300):
        run = Run.of(transaction(*[text_insert(b"%d" % number)] * 7))
        batches += [batch for _, batch in writer.write(run, 0).batches]
    found = joined(batches)
    assert [batch.record_count for batch in found] == [994, 994, 112]
    assert b"".join(b.records for b in found) == b"".join(b.records for b in batches)


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("one_stream", [False, True])
def test_a_table_that_its_transaction_renames_keeps_its_changes(
    one_stream: bool, size: int
) -> None:
    source, (_, _, key, columns) = Messages(1), TABLES[1]
    renamed = source.relation(9, "renamed", key, columns)
    messages = [
        *(source.relation(*relation) for relation in TABLES),
        *transaction(text_insert(b"described"), lsn=9),
        *transaction(text_insert(b"before"), renamed, text_insert(b"after"), lsn=99),
        *transaction(text_insert(b"later"), lsn=199),
    ]
    plain = one_by_one(messages, made(one_stream=one_stream))
    quick = by_native_code(messages, made(one_stream=one_stream), 1, [size])
    assert quick.records == plain.records
    assert not quick.failure
    (found,) = quick.records.values()
    assert b'"k1":"before"' in found[-1].body
    assert found[-1].body.endswith(b'"last":true}}')


@pytest.mark.parametrize("size", [1, 1000])
def test_a_commit_before_1970_has_the_time_of_1970(size: int) -> None:
    long_ago = -(10**15)  # microseconds before 2000
    inserts = [text_insert(b"%d" % number) for number in range(3)]
    source = Messages(1)
    messages = [
        *(source.relation(*relation) for relation in TABLES),
        *transaction(*inserts, moment=long_ago),
    ]
    plain = one_by_one(messages, made(one_stream=False))
    quick = by_native_code(messages, made(one_stream=False), 1, [size])
    assert quick.records == plain.records
    changes = quick.records["public.b"][1:]  # after the declaration
    assert [change.timestamp for change in changes] == [0, 0, 0]


def test_a_value_that_grows_beyond_a_record_is_named() -> None:
    """The largest: a value of the key that grows sixfold, and that the new row has from the old one."""
    changes = made(one_stream=False)
    writer = described(changes)
    text = b"\x01" * 300_000
    old = b"O\0\4t" + struct.pack(">I", len(text)) + text + b"t\0\0\0\0011nn"
    update = b"U" + struct.pack(">I", 9) + old + b"N\0\4ut\0\0\0\0011nn"
    with pytest.raises(RowTooLargeError):
        written_by_native_code(Run.of(transaction(update)), writer, changes, Outcome())
