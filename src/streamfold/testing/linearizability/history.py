"""Histories: what clients of one stream asked for and were answered, in the order of these events.

On disk a history has the JSON lines of S2's public `s2-verification`: a line when an operation begins,
a line when it ends. Its checker ignores what we add: the producer of an append, contents of a read, and
beside an event what else an answer said about the stream (`observed`) and what happened to the server
before it (`faults`).
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
    #: No answer; an append may have taken effect, or do so later.
    UNKNOWN = "unknown"
    OK = "ok"
    #: Certainly without effect: refused, a producer's duplicate, or a read that failed.
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class ProducerNumber:
    """What makes an append of a Durable Streams producer idempotent."""

    id: str
    epoch: int
    seq: int


@dataclass(slots=True, eq=False)
class StreamOperation:
    """One request and its answer. `began` and `ended` are positions in the order of all events."""

    id: int
    client: int
    kind: OperationKind
    began: int = -1
    ended: int | None = None
    #: Of an append: the xxh3 of each record's body, and its conditions.
    record_hashes: tuple[int, ...] = ()
    set_fencing_token: str | None = None
    fencing_token: str | None = None
    match_seq_num: int | None = None
    producer: ProducerNumber | None = None
    result: OperationResult = OperationResult.UNKNOWN
    #: The tail behind an acknowledged append, or the one that a read or a check saw.
    tail: int | None = None
    #: Of a read from the head: `chain_hash` over all records; and the records, in closing reads.
    stream_hash: int | None = None
    contents: tuple[int, ...] | None = None
    #: What else the answer said: `tail`, `fencing_token`, `producer_epoch`, `producer_seq`
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
        """Whether this is an append that may or may not have taken effect."""
        return self.kind is OperationKind.APPEND and self.result is OperationResult.UNKNOWN


@dataclass(slots=True)
class OperationHistory:
    """All operations on one stream, which was empty at first. Events of a running one are appended."""

    name: str = "history"
    operations: list[StreamOperation] = field(default_factory=list)
    #: The operation of each event: it begins, or ends, at this position.
    events: list[StreamOperation] = field(default_factory=list)
    #: What happened to the server, before the event at the position.
    faults: list[tuple[int, str]] = field(default_factory=list)

    def begin(self, client: int, kind: OperationKind) -> StreamOperation:
        operation = StreamOperation(len(self.operations), client, kind, len(self.events))
        self.operations.append(operation)
        self.events.append(operation)
        return operation

    def end(self, operation: StreamOperation, result: OperationResult) -> None:
        """Note an answer. An append without one never ends: it may take effect at any time."""
        operation.result = result
        if not operation.unknown:
            operation.ended = len(self.events)
            self.events.append(operation)

    def fault(self, text: str) -> None:
        self.faults.append((len(self.events), text))


def chain_hash(stream_hash: int, record_hashes: Iterable[int]) -> int:
    """The hash of a stream to which records were appended; an empty stream has 0."""
    for record_hash in record_hashes:
        stream_hash = xxhash.xxh3_64_intdigest(record_hash.to_bytes(8, "little"), stream_hash)
    return stream_hash


def record_hash(body: bytes) -> int:
    return xxhash.xxh3_64_intdigest(body)


def lines(history: OperationHistory) -> Iterator[bytes]:
    """The JSON lines of a history; appends without an answer end at its end, as unknown."""
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
    """Write JSON lines, compressed if the name ends in .gz."""
    content = b"".join(line + b"\n" for line in lines(history))
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)


def read_history(path: Path) -> OperationHistory:
    """The history in a file; InvalidError says which line is not part of one."""
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError) as error:
        raise InvalidError(f"{path} cannot be read: {error}") from None
    return parse_history(path.name, content.splitlines())


def parse_history(name: str, content: Sequence[bytes]) -> OperationHistory:
    """The history that JSON lines describe."""
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
