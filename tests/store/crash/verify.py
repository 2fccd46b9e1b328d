"""Compares a store's contents with its writers' reports."""

from __future__ import annotations

from streamfold.errors import FencingTokenMismatchError, PositionUnwrittenError
from streamfold.model.records import Record, SequencedRecord
from streamfold.store.read.requests import ReadRequest, from_seq_num
from streamfold.store.store import StreamStore
from tests.store.crash.ledger import (
    BATCH,
    INDEX,
    Event,
    Ledger,
    Plan,
    Stored,
    StreamLedger,
    Verified,
)

BASIN = "crash-basin"


class DurabilityError(AssertionError):
    """Storage does not hold what it must, or holds what it must not."""


async def verify(store: StreamStore, ledger: Ledger) -> list[Event]:
    """Check every stream of `ledger`, and return the stored batches of unknown outcome.

    - Every acknowledged record is stored once, at its seq_num, with its content and timestamp.
    - There are no holes: seq_nums are dense from the trim point to the tail.
    - Timestamps never decrease.
    - Every batch is stored whole or not at all, and no refused one is.
    - The batches of one writer are in the order in which it made them.
    - Trims and fencing tokens that were acknowledged are in force.
    """
    events: list[Event] = []
    heads: dict[str, int] = {}
    fences: dict[str, tuple[int, str]] = {}
    for name, stream in ledger.streams.items():
        records = await read_all(store, name)
        tail = (await store.check_tail(BASIN, name)).seq_num
        check = _Check(name, stream, records, tail)
        events += check.run()
        heads[name] = check.head
        token = await _fencing_token(store, name)
        if token != check.fencing_token and token not in check.hidden_tokens():
            raise DurabilityError(f"{name}: token is {token!r}, not {check.fencing_token!r}")
        fences[name] = check.fence[0], token
    return [*events, Verified(heads, fences)]


async def read_all(store: StreamStore, stream: str) -> list[SequencedRecord]:
    """Everything that `stream` has, from its first record on."""
    records: list[SequencedRecord] = []
    position = 0
    while True:
        try:
            batch = await store.read(BASIN, stream, ReadRequest(from_seq_num(position)))
        except PositionUnwrittenError:
            return records
        if not batch.count:
            return records
        records += batch.records()
        position = batch.end_seq_num


async def _fencing_token(store: StreamStore, stream: str) -> str:
    """The token in force, from the error of an append with another one."""
    try:
        await store.append(BASIN, stream, [Record(b"never")], fencing_token="nobody has this one")
    except FencingTokenMismatchError as error:
        return error.current
    raise DurabilityError(f"{stream}: an append with a wrong fencing token was acknowledged")


class _Check:
    """The comparison for one stream."""

    def __init__(
        self, name: str, ledger: StreamLedger, records: list[SequencedRecord], tail: int
    ) -> None:
        self.name = name
        self.ledger = ledger
        self.records = records
        self.tail = tail
        self.head = int(records[0].seq_num) if records else tail
        self.trim_point = ledger.trim_point
        self.fence = ledger.fence
        self.found: dict[str, Stored] = {}

    @property
    def fencing_token(self) -> str:
        return self.fence[1]

    def hidden_tokens(self) -> set[str]:
        """Tokens of batches of unknown outcome that may have taken effect and been trimmed since.

        None if a later fence is still there to be read: it has replaced them.
        """
        if self.fence[0] > self.head:
            return set()
        return {
            plan.fence
            for batch, plan in self.ledger.unknown.items()
            if plan.fence is not None and batch not in self.found
        }

    def run(self) -> list[Event]:
        self._check_sequence()
        self._walk()
        self._check_acknowledged()
        self._check_order_of_writers()
        if self.head != self.trim_point:
            raise self._error(f"begins at {self.head}, but is trimmed up to {self.trim_point}")
        return [stored for batch, stored in self.found.items() if batch in self.ledger.unknown]

    def _check_sequence(self) -> None:
        for at, record in enumerate(self.records):
            if record.seq_num != self.head + at:
                raise self._error(f"has a hole before {record.seq_num}: expected {self.head + at}")
            if at and record.timestamp < self.records[at - 1].timestamp:
                raise self._error(f"goes back in time at {record.seq_num}")
        if self.head + len(self.records) != self.tail:
            raise self._error(
                f"ends at {self.head + len(self.records)}, but its tail is {self.tail}"
            )
        if self.tail < self.ledger.tail:
            raise self._error(f"has tail {self.tail}, but {self.ledger.tail} was acknowledged")

    def _walk(self) -> None:
        """Divide the records into batches, and compare each with what was planned."""
        position = self.head
        while position < self.tail:
            plan, start = self._batch_at(position)
            planned = plan.records()
            if start < position and position != self.head:
                raise self._error(f"has batch {plan.batch} without its beginning at {position}")
            end = start + len(planned)
            if end > self.tail:
                raise self._error(f"ends within batch {plan.batch} at {self.tail}")
            for seq_num in range(position, end):
                record, meant = self.records[seq_num - self.head], planned[seq_num - start]
                if (record.headers, record.body) != (meant.headers, meant.body):
                    raise self._error(
                        f"has another record at {seq_num} than {plan.batch} put there"
                    )
            self._note_stored(plan, start, end)
            position = end

    def _batch_at(self, position: int) -> tuple[Plan, int]:
        """The batch of the record at `position`, and where it starts; a command does not say."""
        for record in self.records[position - self.head :]:
            headers = dict(record.headers)
            if BATCH in headers:
                batch = headers[BATCH].decode()
                start = int(record.seq_num) - int(headers[INDEX])
                return self._plan(batch, position), start
        raise self._error(f"ends with commands from {position} on")

    def _plan(self, batch: str, position: int) -> Plan:
        if batch in self.ledger.refused:
            raise self._error(f"has batch {batch} at {position}, which was refused")
        if batch in self.ledger.unknown:
            return self.ledger.unknown[batch]
        if batch in self.ledger.stored:
            return self.ledger.stored[batch][0]
        raise self._error(f"has batch {batch} at {position}, which no writer appended")

    def _note_stored(self, plan: Plan, start: int, end: int) -> None:
        if plan.batch in self.found:
            raise self._error(
                f"has batch {plan.batch} twice: at {self.found[plan.batch].start}, {start}"
            )
        first = self.records[max(start, self.head) - self.head]
        last = self.records[end - 1 - self.head]
        self.found[plan.batch] = Stored(
            self.name,
            plan.batch,
            start,
            end,
            int(first.timestamp),
            int(last.timestamp),
            acknowledged=False,
        )
        self.trim_point = max(self.trim_point, plan.trim_point(start))
        if plan.fence is not None:
            self.fence = max(self.fence, (start + 1, plan.fence))

    def _check_acknowledged(self) -> None:
        for batch, (_, reported) in self.ledger.stored.items():
            if reported.end <= self.head:
                continue
            found = self.found.get(batch)
            if found is None:
                raise self._error(
                    f"lost batch {batch}, acknowledged from {reported.start} to {reported.end}"
                )
            if (found.start, found.end, found.last_timestamp) != (
                reported.start,
                reported.end,
                reported.last_timestamp,
            ):
                raise self._error(
                    f"has batch {batch} as {found}, but it was acknowledged as {reported}"
                )
            if reported.start >= self.head and found.first_timestamp != reported.first_timestamp:
                raise self._error(f"changed the time of batch {batch} from {reported} to {found}")

    def _check_order_of_writers(self) -> None:
        latest: dict[str, int] = {}
        for batch in self.found:
            plan = self._plan(batch, self.found[batch].start)
            writer, number = plan.writer
            if number < latest.get(writer, -1):
                raise self._error(f"has {batch} after number {latest[writer]} of the same writer")
            latest[writer] = number

    def _error(self, what: str) -> DurabilityError:
        return DurabilityError(f"stream {self.name!r} {what}")
