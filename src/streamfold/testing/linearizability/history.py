"""Histories: the requests of one stream's clients and the answers they got, in event order.

On disk, a history uses the JSON lines of S2's public `s2-verification`: one line when an operation
begins and one when it ends. S2's checker ignores our additional fields: the producer of an append, the
contents of a read, other facts that an answer revealed about the stream (`observed`), and what happened
to the server before the event (`faults`).
"""

from __future__ import annotations

import enum
import gzip
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from streamfold.errors import InvalidError


class OperationKind(enum.StrEnum):
    APPEND = "append"
    READ = "read"
    CHECK_TAIL = "check-tail"


class OperationResult(enum.StrEnum):
    #: No answer. An append may have taken effect or may still do so.
    UNKNOWN = "unknown"
    OK = "ok"
    #: Certainly had no effect: rejected, a producer's duplicate, or a failed read.
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class ProducerNumber:
    """The producer ID, epoch and sequence number that make a Durable Streams append idempotent."""

    id: str
    epoch: int
    seq: int


@dataclass(slots=True, eq=False)
class StreamOperation:
    """One request and its answer. `began` and `ended` are positions in the event order."""

    id: int
    client: int
    kind: OperationKind
    began: int = -1
    ended: int | None = None
    #: For appends: the xxh3 of each record body, and the append's conditions.
    record_hashes: tuple[int, ...] = ()
    set_fencing_token: str | None = None
    fencing_token: str | None = None
    match_seq_num: int | None = None
    producer: ProducerNumber | None = None
    result: OperationResult = OperationResult.UNKNOWN
    #: The tail after an acknowledged append, or the tail that a read or tail check saw.
    tail: int | None = None
    #: For reads from the head: `chain_hash` over all records. Closing reads add the records' hashes.
    stream_hash: int | None = None
    contents: tuple[int, ...] | None = None
    #: Other facts from the answer: `tail`, `fencing_token`, `producer_epoch`, `producer_seq`
    #: (the highest accepted, -1 before the first).
    observed: dict[str, Any] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return len(self.record_hashes)

    @property
    def acknowledged(self) -> bool:
        return self.kind is OperationKind.APPEND and self.result is OperationResult.OK

    @property
    def unknown(self) -> bool:
        """Whether this is an append of unknown outcome."""
        return self.kind is OperationKind.APPEND and self.result is OperationResult.UNKNOWN


@dataclass(slots=True)
class OperationHistory:
    """All operations on one initially empty stream. Grows while its clients run."""

    name: str = "history"
    operations: list[StreamOperation] = field(default_factory=list)
    #: The operation that begins or ends at each position.
    events: list[StreamOperation] = field(default_factory=list)
    #: What happened to the server, each with the position of the next event.
    faults: list[tuple[int, str]] = field(default_factory=list)

    def begin(self, client: int, kind: OperationKind) -> StreamOperation:
        operation = StreamOperation(len(self.operations), client, kind, len(self.events))
        self.operations.append(operation)
        self.events.append(operation)
        return operation

    def end(self, operation: StreamOperation, result: OperationResult) -> None:
        """Record an answer. An unanswered append never ends, since it may take effect at any time."""
        operation.result = result
        if not operation.unknown:
            operation.ended = len(self.events)
            self.events.append(operation)

    def fault(self, text: str) -> None:
        self.faults.append((len(self.events), text))


def chain_hash(stream_hash: int, record_hashes: Iterable[int]) -> int:
    """Return the hash of a stream after appending records. An empty stream hashes to 0."""
    for record_hash in record_hashes:
        stream_hash = xxhash.xxh3_64_intdigest(record_hash.to_bytes(8, "little"), stream_hash)
    return stream_hash


def record_hash(body: bytes) -> int:
    return xxhash.xxh3_64_intdigest(body)


def lines(history: OperationHistory) -> Iterator[bytes]:
    """Yield the JSON lines of a history. Unanswered appends end after all events, as unknown."""
    faults = list(history.faults)
    for position, operation in enumerate(history.events):
        beginning = operation.began == position
        line: dict[str, Any] = {
            "event": {"Start": _start(operation)} if beginning else {"Finish": _finish(operation)},
            "client_id": operation.client,
            "op_id": operation.id,
        }
        if not beginning and operation.observed:
            line["observed"] = operation.observed
        if faults and faults[0][0] <= position:
            line["faults"] = [text for at, text in faults if at <= position]
            faults = [fault for fault in faults if fault[0] > position]
        yield msgspec.json.encode(line)
    for operation in history.operations:
        if operation.ended is None:
            line = {"event": {"Finish": _finish(operation)}, "client_id": operation.client}
            yield msgspec.json.encode(line | {"op_id": operation.id})


def _start(operation: StreamOperation) -> object:
    if operation.kind is OperationKind.READ:
        return "Read"
    if operation.kind is OperationKind.CHECK_TAIL:
        return "CheckTail"
    fields: dict[str, Any] = {
        "num_records": operation.count,
        "record_hashes": operation.record_hashes,
        "set_fencing_token": operation.set_fencing_token,
        "fencing_token": operation.fencing_token,
        "match_seq_num": operation.match_seq_num,
    }
    if operation.producer is not None:
        fields["producer"] = operation.producer
    return {"Append": fields}


def _finish(operation: StreamOperation) -> object:
    ok = operation.result is OperationResult.OK
    if operation.kind is OperationKind.CHECK_TAIL:
        return {"CheckTailSuccess": {"tail": operation.tail}} if ok else "CheckTailFailure"
    if operation.kind is OperationKind.READ:
        if not ok:
            return "ReadFailure"
        fields: dict[str, Any] = {"tail": operation.tail, "stream_hash": operation.stream_hash}
        if operation.contents is not None:
            fields["record_hashes"] = operation.contents
        return {"ReadSuccess": fields}
    if ok:
        return {"AppendSuccess": {"tail": operation.tail}}
    unknown = operation.result is OperationResult.UNKNOWN
    return "AppendIndefiniteFailure" if unknown else "AppendDefiniteFailure"


def write_history(history: OperationHistory, path: Path) -> None:
    """Write a history as JSON lines, gzip-compressed if the name ends in .gz."""
    content = b"".join(line + b"\n" for line in lines(history))
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)


def read_history(path: Path) -> OperationHistory:
    """Read a history from a file. Raises InvalidError, which names the first malformed line."""
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError) as error:
        raise InvalidError(f"{path} cannot be read: {error}") from None
    return parse_history(path.name, content.splitlines())


def parse_history(name: str, content: Sequence[bytes]) -> OperationHistory:
    """Parse a history from JSON lines. Raises InvalidError for a malformed line."""
    history = OperationHistory(name)
    by_id: dict[int, StreamOperation] = {}
    for line_number, text in enumerate(content, 1):
        try:
            line = msgspec.json.decode(text)
            for fault in line.get("faults", ()):
                history.fault(fault)
            event, number = line["event"], line["op_id"]
            if "Start" in event:
                if number in by_id:
                    raise ValueError(f"operation {number} begins twice")
                by_id[number] = _parse_start(history, line["client_id"], event["Start"])
                by_id[number].id = number
            else:
                _parse_finish(history, by_id[number], event["Finish"], line.get("observed", {}))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidError(
                f"line {line_number} of {name} is not an event of a history: {error!r}; lines must "
                "have the form of s2-verification"
            ) from None
    return history


def _parse_start(history: OperationHistory, client: int, start: Any) -> StreamOperation:
    kinds = {"Read": OperationKind.READ, "CheckTail": OperationKind.CHECK_TAIL}
    if isinstance(start, str):
        return history.begin(client, kinds[start])
    fields = start["Append"]
    operation = history.begin(client, OperationKind.APPEND)
    operation.record_hashes = tuple(fields["record_hashes"])
    if not operation.count or operation.count != fields["num_records"]:
        raise ValueError("an append needs records, and one hash for each of them")
    operation.set_fencing_token = fields["set_fencing_token"]
    operation.fencing_token = fields["fencing_token"]
    operation.match_seq_num = fields["match_seq_num"]
    if fields.get("producer") is not None:
        operation.producer = ProducerNumber(**fields["producer"])
    return operation


def _parse_finish(
    history: OperationHistory, operation: StreamOperation, finish: Any, observed: dict[str, Any]
) -> None:
    if operation.ended is not None:
        raise ValueError(f"operation {operation.id} ends twice")
    name, fields = (finish, {}) if isinstance(finish, str) else next(iter(finish.items()))
    names = {
        OperationKind.APPEND: "Append",
        OperationKind.READ: "Read",
        OperationKind.CHECK_TAIL: "CheckTail",
    }
    outcome = name.removeprefix(names[operation.kind])
    result = {
        "Success": OperationResult.OK,
        "Failure": OperationResult.REFUSED,
        "DefiniteFailure": OperationResult.REFUSED,
        "IndefiniteFailure": OperationResult.UNKNOWN,
    }[outcome]
    operation.observed = observed
    if result is OperationResult.OK:
        operation.tail = fields["tail"]
        if operation.kind is OperationKind.READ:
            operation.stream_hash = fields["stream_hash"]
            contents = fields.get("record_hashes")
            operation.contents = None if contents is None else tuple(contents)
    history.end(operation, result)
