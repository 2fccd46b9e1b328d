"""Clients that append to, read and tail-check one stream over real connections.

They record every request and its answer in the stream's history.
"""

from __future__ import annotations

import asyncio
import enum
import random
from dataclasses import dataclass, field
from typing import Any

import msgspec

from streamfold.testing.adversary.client import Answer, Client, LostError
from streamfold.testing.adversary.ledger import OperationOutcome
from streamfold.testing.adversary.reading import outcome_of
from streamfold.testing.linearizability.contradiction import Contradiction
from streamfold.testing.linearizability.history import (
    OperationHistory,
    OperationKind,
    OperationResult,
    StreamOperation,
    chain_hash,
    record_hash,
)
from streamfold.testing.linearizability.writers import (
    AppendPlan,
    AppendPlanner,
    FencingWriter,
    MatchingWriter,
    PlainWriter,
    ProducingWriter,
)

BASIN = "linearizability"
_S2 = {"s2-basin": BASIN, "content-type": "application/json", "s2-format": "raw"}
_JSON = {"content-type": "application/json"}
#: The first offset of a Durable Stream.
_HEAD = "-1"


class ClientKind(enum.StrEnum):
    """How the clients of a stream append."""

    PLAIN = "plain"
    MATCH_SEQ_NUM = "match-seq-num"
    FENCING = "fencing"
    PRODUCERS = "producers"


class UnexpectedAnswerError(Exception):
    """The server gave an answer that is never valid for the request."""

    def __init__(self, operation: StreamOperation, answer: object) -> None:
        super().__init__(str(answer))
        text = f"{operation.kind} {operation.id} was answered with {answer}"
        self.contradiction = Contradiction(text, (operation,))


class _Page(msgspec.Struct):
    class Record(msgspec.Struct):
        seq_num: int
        body: str = ""

    records: list[Record] = []


_DECODE_PAGE = msgspec.json.Decoder(_Page).decode
_DECODE_MESSAGES = msgspec.json.Decoder(list[str]).decode


@dataclass(eq=False)
class StreamClients:
    """All clients of one stream. They share a budget of operations."""

    name: str
    kind: ClientKind
    client: Client
    #: Set while a server answers. Clients wait for it after a refused connection.
    serving: asyncio.Event
    dice: random.Random
    operations: int
    history: OperationHistory = field(init=False)
    #: Operations that found no server to connect to.
    unsent: int = 0
    _client_ids: int = 0
    _bodies: int = 0

    def __post_init__(self) -> None:
        self.history = OperationHistory(self.name)

    async def work(self, clients: int) -> None:
        """Create the stream and use it until the operations are exhausted."""
        await self._create()
        async with asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(self._use(self._writer(number)))

    async def close(self) -> None:
        """Read the whole stream. `contents` then settle the fate of unanswered appends."""
        while True:
            await self.serving.wait()
            operation = await self._read(self._next_client(), contents=True)
            if operation.result is OperationResult.OK:
                return
            await asyncio.sleep(0.05)

    def _next_client(self) -> int:
        self._client_ids += 1
        return self._client_ids

    def _writer(self, number: int) -> AppendPlanner:
        dice = random.Random(self.dice.random())
        if self.kind is ClientKind.MATCH_SEQ_NUM:
            return MatchingWriter(dice)
        if self.kind is ClientKind.FENCING:
            return FencingWriter(f"token-{number}", dice)
        if self.kind is ClientKind.PRODUCERS:
            return ProducingWriter(f"producer-{number // 2}", dice)
        return PlainWriter()

    async def _create(self) -> None:
        while True:
            await self.serving.wait()
            try:
                if self.kind is ClientKind.PRODUCERS:
                    answer = await self.client.exchange("PUT", f"/{BASIN}/{self.name}", _JSON)
                else:
                    body = msgspec.json.encode({"stream": self.name})
                    answer = await self.client.exchange("POST", "/v1/streams", _S2, body)
                if answer.status in (200, 201, 409):
                    return
            except LostError:
                pass
            await asyncio.sleep(0.05)

    async def _use(self, writer: AppendPlanner) -> None:
        """Run clients in sequence. A client whose append got no answer sends no further requests."""
        client = self._next_client()
        while self.operations > 0:
            self.operations -= 1
            await self.serving.wait()
            roll, plan = self.dice.random(), None
            if roll < 0.45:
                plan = writer.plan(self._make_bodies())
                operation = await self._append(client, plan)
            elif roll < 0.65:
                operation = await self._read(client)
            else:
                operation = await self._check_tail(client)
            writer.learn(operation, plan)
            if operation.unknown:
                client = self._next_client()
            if operation.result is not OperationResult.OK and not operation.observed:
                await asyncio.sleep(0.02)

    def _make_bodies(self) -> list[str]:
        self._bodies += 1
        # Large records are rare because every read returns all records.
        filler = "." * (self.dice.choice([0, 10, 100]) if self.dice.random() < 0.99 else 5000)
        count = self.dice.choice([1, 1, 1, 2, 3])
        return [f"{self._bodies}.{index}{filler}" for index in range(count)]

    async def _exchange(
        self,
        operation: StreamOperation,
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes = b"",
    ) -> Answer | None:
        """Return the answer, or None if there is none. Some requests have a short timeout."""
        patience = self.dice.uniform(0.02, 0.5) if self.dice.random() < 0.02 else None
        generation = self.client.target.generation
        try:
            async with asyncio.timeout(patience):
                answer = await self.client.exchange(method, path, headers, body)
        except TimeoutError:
            return None
        except LostError as error:
            if not error.sent:
                operation.result = OperationResult.REFUSED
                self.unsent += 1
                if generation == self.client.target.generation:
                    self.serving.clear()
            return None
        if answer.status == 500 and answer.code == "other":
            raise UnexpectedAnswerError(operation, answer)
        return answer

    async def _append(self, client: int, plan: AppendPlan) -> StreamOperation:
        operation = self.history.begin(client, OperationKind.APPEND)
        operation.match_seq_num, operation.fencing_token = plan.match_seq_num, plan.fencing_token
        operation.set_fencing_token, operation.producer = plan.set_fencing_token, plan.producer
        durable = self.kind is ClientKind.PRODUCERS
        bodies = [f'"{body}"' for body in plan.bodies] if durable else plan.bodies
        operation.record_hashes = tuple(record_hash(body.encode()) for body in bodies)
        if durable and (plan.producer is not None or self.dice.random() < 0.5):
            await self._append_durable(operation, bodies)
        else:
            await self._append_s2(operation, bodies)
        self.history.end(operation, operation.result)
        return operation

    async def _append_s2(self, operation: StreamOperation, bodies: list[str]) -> None:
        records: list[dict[str, Any]] = [{"body": body} for body in bodies]
        if operation.set_fencing_token is not None:
            records[0]["headers"] = [["", "fence"]]
        content: dict[str, Any] = {"records": records}
        if operation.match_seq_num is not None:
            content["match_seq_num"] = operation.match_seq_num
        if operation.fencing_token is not None:
            content["fencing_token"] = operation.fencing_token
        path = f"/v1/streams/{self.name}/records"
        answer = await self._exchange(operation, "POST", path, _S2, msgspec.json.encode(content))
        if answer is None:
            return
        outcome = outcome_of(answer)
        if outcome is OperationOutcome.KEPT:
            ack = answer.json()
            operation.result, operation.tail = OperationResult.OK, ack["end"]["seq_num"]
            operation.observed = {"tail": ack["tail"]["seq_num"]}
            if ack["start"]["seq_num"] + operation.count != operation.tail:
                raise UnexpectedAnswerError(operation, answer)
        elif answer.status == 412:
            operation.result = OperationResult.REFUSED
            mismatch = answer.json()
            if "fencing_token_mismatch" in mismatch:
                operation.observed = {"fencing_token": mismatch["fencing_token_mismatch"]}
            else:
                operation.observed = {"tail": mismatch["seq_num_mismatch"]}
        elif answer.status < 500:
            raise UnexpectedAnswerError(operation, answer)
        elif outcome is OperationOutcome.REFUSED:
            operation.result = OperationResult.REFUSED

    async def _append_durable(self, operation: StreamOperation, bodies: list[str]) -> None:
        headers, number = dict(_JSON), operation.producer
        if number is not None:
            headers |= {"producer-id": number.id, "producer-epoch": str(number.epoch)}
            headers["producer-seq"] = str(number.seq)
        content = f"[{','.join(bodies)}]".encode()
        answer = await self._exchange(operation, "POST", f"/{BASIN}/{self.name}", headers, content)
        if answer is None:
            return
        outcome = outcome_of(answer)
        if answer.status == 200 or (answer.status == 204 and number is None):
            operation.result = OperationResult.OK
            operation.tail = _seq_num(answer.headers["stream-next-offset"])
        elif answer.status == 204:
            operation.result = OperationResult.REFUSED  # a duplicate
            operation.observed = {
                "producer_epoch": int(answer.headers["producer-epoch"]),
                "producer_seq": int(answer.headers["producer-seq"]),
            }
        elif number is not None and answer.code == "producer_gap":
            operation.result = OperationResult.REFUSED
            expected = int(answer.headers["producer-expected-seq"])
            operation.observed = {"producer_epoch": number.epoch, "producer_seq": expected - 1}
        elif number is not None and answer.code == "producer_stale":
            operation.result = OperationResult.REFUSED
            operation.observed = {"producer_epoch": int(answer.headers["producer-epoch"])}
        elif number is not None and number.seq and answer.status == 400:
            # A new epoch must start at sequence number 0.
            operation.result = OperationResult.REFUSED
        elif answer.status < 500:
            raise UnexpectedAnswerError(operation, answer)
        elif outcome is OperationOutcome.REFUSED:
            operation.result = OperationResult.REFUSED

    async def _check_tail(self, client: int) -> StreamOperation:
        operation = self.history.begin(client, OperationKind.CHECK_TAIL)
        path = f"/v1/streams/{self.name}/records/tail"
        answer = await self._exchange(operation, "GET", path, _S2)
        if answer is not None and answer.status == 200:
            operation.tail = answer.json()["tail"]["seq_num"]
        elif answer is not None and answer.status < 500:
            raise UnexpectedAnswerError(operation, answer)
        ok = operation.tail is not None
        self.history.end(operation, OperationResult.OK if ok else OperationResult.REFUSED)
        return operation

    async def _read(self, client: int, *, contents: bool = False) -> StreamOperation:
        operation = self.history.begin(client, OperationKind.READ)
        durable = self.kind is ClientKind.PRODUCERS and self.dice.random() < 0.5
        records = await (self._read_durable if durable else self._read_s2)(operation)
        if records is None:
            self.history.end(operation, OperationResult.REFUSED)
            return operation
        operation.tail, operation.stream_hash = len(records), chain_hash(0, records)
        operation.contents = tuple(records) if contents else None
        self.history.end(operation, OperationResult.OK)
        return operation

    async def _read_s2(self, operation: StreamOperation) -> list[int] | None:
        """Read page by page up to the tail. Return the record hashes, or None if a page fails."""
        records: list[int] = []
        while True:
            path = f"/v1/streams/{self.name}/records?seq_num={len(records)}&count=1000"
            answer = await self._exchange(operation, "GET", path, _S2)
            if answer is None or answer.status >= 500:
                return None
            if answer.status == 416 and answer.json()["tail"]["seq_num"] == len(records):
                return records
            if answer.status != 200:
                raise UnexpectedAnswerError(operation, answer)
            for record in _DECODE_PAGE(answer.body).records:
                if record.seq_num != len(records):
                    place = f"seq_num {record.seq_num} where {len(records)} is next"
                    raise UnexpectedAnswerError(operation, place)
                records.append(record_hash(record.body.encode()))

    async def _read_durable(self, operation: StreamOperation) -> list[int] | None:
        """Read through Durable Streams. Return the record hashes, or None if a page fails."""
        records: list[int] = []
        offset = _HEAD
        while True:
            path = f"/{BASIN}/{self.name}?offset={offset}"
            answer = await self._exchange(operation, "GET", path, {})
            if answer is None or answer.status >= 500:
                return None
            if answer.status != 200:
                raise UnexpectedAnswerError(operation, answer)
            messages = _DECODE_MESSAGES(answer.body)
            records += [record_hash(f'"{message}"'.encode()) for message in messages]
            offset = answer.headers["stream-next-offset"]
            if _seq_num(offset) != len(records):
                raise UnexpectedAnswerError(operation, f"{len(records)} messages up to {offset}")
            if answer.headers.get("stream-up-to-date") == "true":
                return records


def _seq_num(offset: str) -> int:
    return int(offset.split("_")[0])
