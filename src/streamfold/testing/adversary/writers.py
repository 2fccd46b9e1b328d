"""Writers: unary appends through both faces, sessions, and idempotent producers."""

from __future__ import annotations

import asyncio
import json
import random
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field

from streamfold.records.protobuf import delimited, varint
from streamfold.testing.adversary.client import (
    Answer,
    Client,
    LostError,
    chunk,
    read_chunks,
    read_head,
)
from streamfold.testing.adversary.ledger import (
    Append,
    Breach,
    BrokenPromiseError,
    Ledger,
    Life,
    OperationOutcome,
    StreamHistory,
)
from streamfold.testing.adversary.reading import (
    JSON,
    ack_start,
    outcome_of,
    stream_headers,
)
from streamfold.wire.s2.frames import FrameDecoder, encode_frame

#: Seconds without an ack after which a session counts as lost.
_SILENCE = 20.0


@dataclass
class ProducerState:
    """An idempotent producer of one life. It repeats an append until answered."""

    name: str
    life: Life
    epoch: int = 0
    seq: int = 0
    pending: Append | None = None
    busy: bool = False


@dataclass
class Writers:
    """Appends to streams and records every answer."""

    ledger: Ledger
    client: Client
    #: Whether appends may have conditions and commands.
    conditions: bool = True
    _producers: dict[StreamHistory, ProducerState] = field(default_factory=dict)

    def producing(self, history: StreamHistory) -> bool:
        """Return whether the stream's producer has an unanswered append."""
        state = self._producers.get(history)
        return state is not None and (state.pending is not None or state.busy)

    async def append(self, history: StreamHistory, dice: random.Random) -> None:
        """Append one batch through either face."""
        if history.json and dice.random() < 0.8:
            await self._append_durable(history, self._plan(history, dice))
        else:
            await self.append_s2(history, self._plan(history, dice))

    def _plan(self, history: StreamHistory, dice: random.Random) -> Append:
        size = dice.choice([0, 10, 10, 100, 100, 3000]) if dice.random() < 0.99 else 200_000
        count = dice.choice([1, 1, 1, 2, 5, 20, 100]) if size < 3000 else 4
        append = self.ledger.begin(history, self.client.target.generation, count, size)
        life = append.life
        roll = dice.random()
        if history.json or life is None or not self.conditions:
            return append
        if roll < 0.15:
            append.match = life.tail + (dice.random() < 0.2)
        elif roll < 0.25:
            append.token = dice.choice(["", f"token-{dice.randrange(3)}"])
        elif roll < 0.30:
            append.fence = dice.choice(["", f"token-{dice.randrange(3)}"])
        elif roll < 0.34 and life.tail:
            append.trim = dice.randint(life.first, life.tail)
        return append

    async def append_s2(self, history: StreamHistory, append: Append) -> None:
        """Send an append through S2."""
        records = []
        for command, body in append.records():
            record: dict[str, object] = {"body": b64encode(body).decode()}
            if command:
                record["headers"] = [["", b64encode(command.encode()).decode()]]
            records.append(record)
        content: dict[str, object] = {"records": records}
        if append.match is not None:
            content["match_seq_num"] = append.match
        if append.token is not None:
            content["fencing_token"] = append.token
        path = f"/v1/streams/{history.name}/records"
        answer = await self._send(
            append, "POST", path, stream_headers(history.basin), json.dumps(content).encode()
        )
        if answer is None:
            return
        outcome = outcome_of(answer)
        place = None
        if outcome is OperationOutcome.KEPT:
            ack = answer.json()
            place = ack["start"]["seq_num"]
            if ack["end"]["seq_num"] != place + append.length:
                raise BrokenPromiseError(history, f"append {append.id} is answered with {answer}")
            if append.match not in (None, place):
                raise BrokenPromiseError(history, f"{append}: match_seq_num ignored, {answer}")
        self._ended(append, outcome, place, answer)

    async def _append_durable(self, history: StreamHistory, append: Append) -> None:
        headers = dict(JSON)
        if append.producer is not None:
            name, epoch, seq = append.producer
            headers |= {"producer-id": name, "producer-epoch": str(epoch)}
            headers["producer-seq"] = str(seq)
        body = b"[" + b",".join(record.body for record in append.records()) + b"]"
        path = f"/{history.basin}/{history.name}"
        answer = await self._send(append, "POST", path, headers, body)
        if answer is None:
            return
        outcome, place = outcome_of(answer), None
        repeated = append.producer is not None and answer.status == 204
        if outcome is OperationOutcome.KEPT and not repeated:
            place = int(answer.headers["stream-next-offset"].split("_")[0]) - append.length
        self._ended(append, outcome, place, answer)

    async def _send(
        self, append: Append, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> Answer | None:
        """Send an append and return its answer. Without one, record the outcome and raise."""
        append.generation = self.client.target.generation
        try:
            return await self.client.exchange(
                method, path, headers, body, generation=append.generation
            )
        except LostError as error:
            outcome = OperationOutcome.UNKNOWN if error.sent else OperationOutcome.REFUSED
            self.ledger.end(append, outcome, None, f"no answer: {error}")
            raise
        except BaseException:
            self.ledger.end(append, OperationOutcome.UNKNOWN, None, "no answer: cancelled")
            raise

    def _ended(
        self, append: Append, outcome: OperationOutcome, place: int | None, answer: Answer
    ) -> None:
        if answer.status == 500 and answer.code == "other":
            raise BrokenPromiseError(
                append.history,
                f"append {append.id} is answered with {answer}",
                Breach.UNEXPLAINED,
            )
        sure = append.life is not None and append.changes == append.history.changes
        if answer.status in (400, 413, 422) or (sure and answer.status in (403, 404, 409, 410)):
            raise BrokenPromiseError(append.history, f"{append} is answered with {answer}")
        self.ledger.end(
            append, outcome, place, str(answer) if outcome != OperationOutcome.KEPT else ""
        )

    async def session(self, history: StreamHistory, dice: random.Random) -> None:
        """Append several batches in one session, without waiting for acks."""
        appends = [self._plan(history, dice) for _ in range(dice.randint(2, 12))]
        for append in appends:
            append.match = None
            if append is not appends[-1]:  # an unmet condition ends a session
                append.token = append.fence = append.trim = None
            append.size = min(append.size, 3000)
        await append_all(self.client, self.ledger, history, appends)

    async def produce(self, history: StreamHistory, dice: random.Random) -> None:
        """Append as the stream's producer, one append at a time."""
        life = history.living
        if life is None:
            return
        state = self._producers.get(history)
        if state is None or state.life is not life:
            state = ProducerState(f"p-{life.number}-{life.born}", life)
            self._producers[history] = state
        if state.busy:
            return
        state.busy = True
        try:
            await self._produce_next(history, state, dice)
        finally:
            state.busy = False

    async def _produce_next(
        self, history: StreamHistory, state: ProducerState, dice: random.Random
    ) -> None:
        append = state.pending
        if append is None:
            if dice.random() < 0.1:
                state.epoch, state.seq = state.epoch + 1, 0
            append = self._plan(history, dice)
            append.producer = (state.name, state.epoch, state.seq)
            state.pending = append
        else:
            self.ledger.repeat(append)
        await self._append_durable(history, append)
        if append.outcome is OperationOutcome.KEPT:
            state.pending, state.seq = None, state.seq + 1
            if dice.random() < 0.2:
                await self._repeat(history, append)
        elif append.outcome is OperationOutcome.REFUSED and self._producers.get(history) is state:
            append.outcome = OperationOutcome.UNKNOWN  # until it is sent again

    async def _repeat(self, history: StreamHistory, append: Append) -> None:
        """Repeat a producer's acknowledged append, which must write nothing."""
        assert append.producer is not None
        changes = history.changes
        name, epoch, seq = append.producer
        headers = JSON | {
            "producer-id": name,
            "producer-epoch": str(epoch),
            "producer-seq": str(seq),
        }
        body = b"[" + b",".join(record.body for record in append.records()) + b"]"
        answer = await self.client.exchange(
            "POST", f"/{history.basin}/{history.name}", headers, body
        )
        if answer.status == 200 and changes == history.changes and history.settled:
            raise BrokenPromiseError(
                history, f"{append} was accepted twice: {answer}", Breach.DOUBLED
            )


def encode_append(append: Append) -> bytes:
    """Encode an S2 AppendInput: records, match_seq_num, fencing_token."""
    message = b""
    for command, body in append.records():
        record = delimited(b"\x12", delimited(b"\x12", command.encode())) if command else b""
        content = record + delimited(b"\x1a", body)
        message += b"\x0a" + varint(len(content)) + content
    if append.match is not None:
        message += b"\x10" + varint(append.match)
    if append.token is not None:
        token = append.token.encode()
        message += b"\x1a" + varint(len(token)) + token
    return message


async def append_all(
    client: Client, ledger: Ledger, history: StreamHistory, appends: Sequence[Append]
) -> None:
    """Send appends without waiting for acks. Those without an ack have unknown outcomes."""
    headers = {"s2-basin": history.basin, "content-type": "s2s/proto"}
    waiting = list(appends)
    path = f"/v1/streams/{history.name}/records"
    reason = "the session ended"
    try:
        async with (
            asyncio.timeout(_SILENCE),
            client.streaming("POST", path, headers) as (reader, writer),
        ):
            for append in appends:
                writer.write(chunk(encode_frame(encode_append(append))))
            writer.write(chunk(b""))
            status, answered = await read_head(reader)
            if status != 200:
                body = await reader.readexactly(int(answered.get("content-length", 0)))
                answer = Answer(status, answered, body)
                for append in waiting:
                    ledger.end(append, outcome_of(answer), None, f"session: {answer}")
                return
            decoder = FrameDecoder()
            async for piece in read_chunks(reader):
                decoder.feed(piece)
                while waiting and (frame := decoder.next_frame()) is not None:
                    if frame.terminal:
                        reason = repr(frame.body[:120])
                        return
                    ledger.end(
                        waiting.pop(0), OperationOutcome.KEPT, ack_start(frame.body), "session"
                    )
    except (LostError, TimeoutError) as error:
        reason = str(error)
        raise LostError(reason, sent=True) from None
    finally:
        for append in waiting:
            if append.outcome is OperationOutcome.PENDING:
                ledger.end(append, OperationOutcome.UNKNOWN, None, f"session: {reason}")
