"""Decodes what readers receive, and identifies the append of each record."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from streamfold.records.protobuf import fields
from streamfold.testing.adversary.client import Answer, Client, LostError
from streamfold.testing.adversary.ledger import (
    Append,
    BrokenPromiseError,
    Ledger,
    Life,
    OperationOutcome,
    StreamHistory,
)

JSON = {"content-type": "application/json"}
#: Error codes that guarantee that the request had no effect.
_CLEAN = frozenset(
    {
        "basin_deletion_pending",
        "basin_not_found",
        "content_type_mismatch",
        "invalid",
        "not_found",
        "position_trimmed",
        "producer_gap",
        "producer_stale",
        "resource_already_exists",
        "server_busy",
        "server_draining",
        "snapshot_conflict",
        "snapshot_not_found",
        "storage_full",
        "store_recovering",
        "stream_closed",
        "stream_deletion_pending",
        "stream_forked",
        "stream_not_found",
        "transaction_conflict",
        "uploads_busy",
    }
)
#: Statuses that reveal nothing about the store: try again later.
_LATER = (500, 502, 503, 504)


def outcome_of(answer: Answer) -> OperationOutcome:
    """Return what an answer reveals about the request: done, certainly not done, or unknown."""
    if answer.status < 300:
        return OperationOutcome.KEPT
    if answer.status == 412 or answer.code in _CLEAN:
        return OperationOutcome.REFUSED
    return OperationOutcome.UNKNOWN


def ack_start(message: bytes) -> int:
    """Return the first seq_num of an AppendAck."""
    for tag, start, end in fields(message, 0, len(message)):
        if tag == 0x0A:
            return next((value for tag, value, _ in fields(message, start, end) if tag == 8), 0)
    raise ValueError("an ack without a start")


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A record as a read returns it."""

    seq_num: int
    timestamp: int
    command: str
    body: bytes


def decode_records(batch: dict[str, Any]) -> list[StoredRecord]:
    """Return the records of a batch in base64 format."""
    return [
        StoredRecord(
            item["seq_num"],
            item["timestamp"],
            _command(item.get("headers", ())),
            b64decode(item.get("body", "")),
        )
        for item in batch.get("records", ())
    ]


def _command(headers: Iterable[tuple[str, str]]) -> str:
    for name, value in headers:
        if not name:
            return b64decode(value).decode()
    return ""


@dataclass(slots=True)
class Recognizer:
    """Identifies the append of each record of one stream, in order, and compares the bytes."""

    ledger: Ledger
    history: StreamHistory
    _last: tuple[int, Append, int] | None = field(default=None, init=False)

    def recognize(self, record: StoredRecord) -> tuple[Append, int] | None:
        """Return the append and the record's index in it.

        Returns None for a command if the record before it is not there.
        """
        last, self._last = self._last, None
        if record.command:
            if last is None or last[0] != record.seq_num - 1:
                return None
            append, index = last[1], last[2] + 1
        else:
            append, index = self.name(record.body)
        try:
            planned = append.record(index)
        except IndexError:
            raise self._foreign(record.body) from None
        if (record.command, record.body) != planned:
            raise BrokenPromiseError(
                self.history,
                f"seq_num {record.seq_num} of {self.history} is record {index} of append "
                f"{append.id}, with other bytes: {record.body[:80]!r} instead of "
                f"{planned.body[:80]!r}",
            )
        self._last = record.seq_num, append, index
        return append, index

    def name(self, body: bytes) -> tuple[Append, int]:
        """Return the append that a data record names, and the record's index in it."""
        try:
            number, index, _ = body.strip(b'"').split(b".", 2)
            return self.ledger.appends[int(number)], int(index)
        except (ValueError, KeyError):
            raise self._foreign(body) from None

    def _foreign(self, body: bytes) -> BrokenPromiseError:
        return BrokenPromiseError(
            self.history, f"{self.history} has a record that nobody appended: {body[:80]!r}"
        )


def observe(ledger: Ledger, append: Append, index: int, seq_num: int) -> None:
    """Record that a reader got a record, which proves that its append took effect."""
    history = append.history
    if append.outcome is OperationOutcome.REFUSED:
        raise BrokenPromiseError(
            history, f"append {append.id} was refused, and its record is at seq_num {seq_num}"
        )
    if append.outcome is OperationOutcome.ABSENT:
        raise BrokenPromiseError(
            history,
            f"append {append.id} was found missing after a restart, and is at seq_num {seq_num} now",
        )
    ledger.put(append, seq_num - index)
    if append.outcome is OperationOutcome.UNKNOWN:
        append.outcome = OperationOutcome.SEEN
        ledger.totals.seen_later += 1
        history.lines.append(
            (ledger.clock.advance(), f"append {append.id} is seen at {append.place}")
        )


def note_seen(life: Life, seq_num: int, append: Append, index: int) -> None:
    """Compare a record with what readers of the same life, or of its source, got earlier."""
    owner = life.owner(seq_num)
    before = owner.seen.setdefault(seq_num, (append.id, index))
    if before != (append.id, index):
        raise BrokenPromiseError(
            life.history,
            f"seq_num {seq_num} of {life.history} was record {before[1]} of append {before[0]}, and "
            f"is record {index} of append {append.id} now",
        )


def stream_headers(basin: str) -> dict[str, str]:
    return {"s2-basin": basin, "content-type": "application/json", "s2-format": "base64"}


async def ask(client: Client, method: str, path: str, headers: dict[str, str]) -> Answer:
    """Return an informative answer. Raises LostError if there is none."""
    answer = await client.exchange(method, path, headers)
    if answer.status in _LATER:
        raise LostError(str(answer), sent=True)
    return answer


@dataclass(frozen=True, slots=True)
class StreamContents:
    """A whole stream as a reader got it, from the first retained record to the tail."""

    records: list[StoredRecord]
    first: int
    tail: int


async def read_stream(client: Client, basin: str, name: str) -> StreamContents | Answer:
    """Read the whole stream. Returns an error answer if the stream cannot be read."""
    records: list[StoredRecord] = []
    position, headers = 0, stream_headers(basin)
    while True:
        path = f"/v1/streams/{name}/records?seq_num={position}&count=1000"
        answer = await ask(client, "GET", path, headers)
        if answer.status == 416:
            tail = answer.json()["tail"]["seq_num"]
            return StreamContents(records, records[0].seq_num if records else tail, tail)
        if answer.status != 200:
            return answer
        page = decode_records(json.loads(answer.body))
        if not page:  # everything up to the tail has expired
            answer = await ask(client, "GET", f"/v1/streams/{name}/records/tail", headers)
            tail = answer.json()["tail"]["seq_num"]
            return StreamContents([], tail, tail)
        if page[0].seq_num != position:
            records.clear()  # expired or trimmed during this read
        records += page
        position = page[-1].seq_num + 1
