"""Client calls through S2: unary appends, sessions, reads, followers, trims, fences and tokens."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec

from streamfold.model.records import Header, SequencedRecord
from streamfold.records.protobuf import delimited, varint
from streamfold.testing.adversary.client import Answer
from streamfold.testing.adversary.reading import ack_start
from streamfold.testing.simulation.books import BASIN, RETENTION
from streamfold.testing.simulation.exchange import (
    LostAnswerError,
    SimulatedExchange,
)
from streamfold.testing.simulation.ledger import StreamLedger, ViolationError
from streamfold.testing.simulation.loop import chance
from streamfold.wire.s2.errors import CODES, OWN_CODES
from streamfold.wire.s2.frames import FrameDecoder, encode_frame

if TYPE_CHECKING:
    from streamfold.testing.simulation.faces import Faces

_JSON = {"s2-basin": BASIN, "content-type": "application/json"}
_BASIN = {"s2-basin": BASIN}
_SCOPE = {
    "basins": {"prefix": ""},
    "streams": {"prefix": ""},
    "ops": ["append", "read", "check-tail"],
}
#: Codes that guarantee the request had no effect.
_CLEAN = {code for code, rule in (CODES | OWN_CODES).items() if rule.clean}


def is_clean(answer: Answer) -> bool:
    """Return whether a rejection guarantees that the request had no effect."""
    return answer.status == 412 or answer.code in _CLEAN


class S2Calls:
    """S2 requests of one client. Each call takes its operation's number."""

    def __init__(self, faces: Faces, client: int) -> None:
        self._faces = faces
        self._books = faces.books
        self.by_kind: dict[str, Callable[[int], Awaitable[None]]] = {
            "s2 append": self._append,
            "s2 session": self._append_session,
            "s2 read": self._read,
            "s2 tail": self._tail,
            "s2 follow": self._follow,
            "s2 list": self._list,
            "s2 delete": self._delete,
            "s2 trim": self._trim,
            "s2 fence": self._fence,
            "s2 missing": self._look_for_nothing,
            "token": self._use_token,
        }

    def _path(self, ledger: StreamLedger, rest: str = "/records") -> str:
        return f"/v1/streams/{quote(ledger.name)}{rest}"

    async def _append(self, number: int) -> None:
        books, random = self._books, chance()
        if (ledger := books.pick()) is None:
            return
        bodies = books.bodies(number, ledger, random.choice((1, 1, 1, 3)))
        content: dict[str, Any] = {}
        if random.random() < 0.2:
            content["match_seq_num"] = ledger.tail
        if random.random() < 0.15:
            content["fencing_token"] = random.choice(("", "a", "b"))
        await self._send_append(ledger, bodies, content)

    async def _send_append(
        self,
        ledger: StreamLedger,
        bodies: Sequence[bytes],
        content: Mapping[str, Any],
        *,
        token: str | None = None,
    ) -> Answer | None:
        """Append and record the outcome. Return the answer, or None if it was lost."""
        books = self._books
        mark, closed = books.mark(), ledger.closed
        call = f"s2 append {ledger.name} {list(bodies)} {dict(content) or ''}"
        sent = msgspec.json.encode(
            {"records": [{"body": body.decode()} for body in bodies], **content}
        )
        try:
            answer = await self._faces.ask(
                "POST",
                self._path(ledger),
                _JSON,
                sent,
                ledger=ledger,
                token=token,
                allowed=frozenset(() if token is None else (401,)),
            )
        except LostAnswerError:
            books.note(f"{call} -> lost")
            books.lose()
            return None
        if answer.status != 200:
            books.note(f"{call} -> {answer}")
            if is_clean(answer):
                books.refuse(ledger, bodies)
            else:
                books.lose()
            return answer
        start, end = (answer.json()[name]["seq_num"] for name in ("start", "end"))
        books.note(f"{call} -> {start} to {end}")
        self._check_ack(ledger, call, content, start, end - len(bodies), closed=closed)
        books.acknowledge(ledger, start, bodies, mark)
        return answer

    def _check_ack(
        self,
        ledger: StreamLedger,
        call: str,
        content: Mapping[str, Any],
        start: int,
        expected: int,
        *,
        closed: bool,
    ) -> None:
        if start != expected or content.get("match_seq_num", start) != start:
            raise ViolationError(f"{ledger.name}: {call} was acknowledged at {start}")
        if ledger.over:
            return
        if content.get("fencing_token", "") not in ledger.fences:
            raise ViolationError(f"{ledger.name}: {call} was taken with a token that nobody set")
        if closed:
            raise ViolationError(f"{ledger.name}: {call} was taken although it was closed")

    async def _append_session(self, number: int) -> None:
        """Send several batches in one append session without waiting for acks."""
        books, random = self._books, chance()
        if (ledger := books.pick()) is None:
            return
        bodies = books.bodies(number, ledger, random.randint(1, 8))
        batches = [bodies[at : at + 2] for at in range(0, len(bodies), 2)]
        mark = books.mark()
        exchange = self._faces.open(
            "POST", self._path(ledger), {**_BASIN, "content-type": "s2s/proto"}
        )
        sending = asyncio.create_task(_send_frames(exchange, batches))
        if random.random() < 0.15:
            loop = asyncio.get_running_loop()
            loop.call_later(random.random() ** 3 * 0.5, exchange.vanish)
        waiting = list(batches)
        call = f"s2 session {ledger.name} {batches}"
        try:
            async with asyncio.timeout(300):
                ending = await self._take_acks(exchange, ledger, waiting, mark)
        except LostAnswerError:
            ending = "lost"
        except TimeoutError:
            raise ViolationError(f"{ledger.name}: a session is silent for 300 s") from None
        finally:
            sending.cancel()
        books.note(f"{call} -> {len(batches) - len(waiting)} acknowledged, {ending}")
        if ending == "refused":
            books.refuse(ledger, [body for batch in waiting for body in batch])
        elif waiting and ending == "done":
            raise ViolationError(f"{ledger.name}: {call} ended without all acks")
        elif waiting:
            books.lose()

    async def _take_acks(
        self,
        exchange: SimulatedExchange,
        ledger: StreamLedger,
        waiting: list[list[bytes]],
        mark: tuple[int, float],
    ) -> str:
        """Record acks as they arrive. Return how the session ended."""
        if await exchange.head() != 200:
            answer = await exchange.answer()
            self._faces.judge("a session", answer.status, answer.code, ledger)
            return "refused" if is_clean(answer) else "unknown"
        decoder = FrameDecoder()
        async for piece in exchange.pieces():
            decoder.feed(piece)
            while (frame := decoder.next_frame()) is not None:
                if frame.terminal:
                    status, body = frame.failure()
                    answer = Answer(status, {}, body)
                    self._faces.judge("a session", status, answer.code, ledger)
                    return "refused" if is_clean(answer) else "unknown"
                batch = waiting.pop(0)
                start = ack_start(frame.body)
                self._books.note(f"  ack {ledger.name} {batch} -> {start}")
                self._books.acknowledge(ledger, start, batch, mark)
        return "done"

    async def _read(self, number: int) -> None:
        books = self._books
        if (ledger := books.pick()) is None or not ledger.tail:
            return
        first = chance().randrange(ledger.tail)
        trimmed = ledger.trimmed
        records = await self._fetch(ledger, first, f"s2 read {ledger.name} from {first}")
        if records and not ledger.over and ledger.trimmed == trimmed:
            last = int(records[-1].seq_num) + 1
            books.report.compared += len(records)
            ledger.check_read(records, int(records[0].seq_num), last, books.latest)

    async def _fetch(
        self, ledger: StreamLedger, first: int, call: str, *, faithful: bool = False
    ) -> list[SequencedRecord]:
        books = self._books
        path = self._path(ledger, f"/records?seq_num={first}")
        try:
            answer = await self._faces.ask("GET", path, _BASIN, ledger=ledger, faithful=faithful)
        except LostAnswerError:
            books.note(f"{call} -> lost")
            return []
        if answer.status != 200:
            books.note(f"{call} -> {answer}")
            return []
        records = _records(answer.json())
        books.note(f"{call} -> {[int(record.seq_num) for record in records]}")
        if not ledger.over:
            ledger.check_batch(records)
        return records

    async def _tail(self, number: int) -> None:
        books = self._books
        if (ledger := books.pick()) is None:
            return
        before = ledger.tail
        try:
            answer = await self._faces.ask(
                "GET", self._path(ledger, "/records/tail"), _BASIN, ledger=ledger
            )
        except LostAnswerError:
            return
        books.note(f"s2 tail of {ledger.name} -> {answer} {answer.body!r}")
        if answer.status == 200 and not ledger.over:
            ledger.check_tail(answer.json()["tail"]["seq_num"], before)

    async def _follow(self, number: int) -> None:
        """Follow through server-sent events briefly, then vanish."""
        books, random = self._books, chance()
        if (ledger := books.pick()) is None:
            return
        first = random.randrange(ledger.tail + 1)
        path = self._path(ledger, f"/records?seq_num={first}&clamp=true")
        exchange = self._faces.open("GET", path, {**_BASIN, "accept": "text/event-stream"})
        exchange.upload(b"", last=True)
        asyncio.get_running_loop().call_later(random.random(), exchange.vanish)
        numbers: list[int] = []
        unread, ending = b"", "done"
        try:
            if await exchange.head() != 200:
                answer = await exchange.answer()
                self._faces.judge("a follower", answer.status, answer.code, ledger)
                ending = str(answer)
            async for piece in exchange.pieces():
                *events, unread = (unread + piece).split(b"\n\n")
                for event in events:
                    self._take_event(ledger, event, numbers)
        except LostAnswerError:
            ending = "gone"
        books.note(f"s2 follow {ledger.name} from {first} -> {numbers}, {ending}")

    def _take_event(self, ledger: StreamLedger, event: bytes, numbers: list[int]) -> None:
        """Check that one event's records are consecutive and match what clients learned."""
        _, _, data = event.partition(b"\ndata: ")
        if event.startswith(b"event: error"):
            answer = Answer(0, {}, data)
            status = 500 if answer.code in ("other", "storage") else 0
            self._faces.judge("a follower", status, answer.code, ledger)
        if not event.startswith(b"event: batch"):
            return
        records = _records(msgspec.json.decode(data))
        if ledger.over:
            return
        ledger.check_batch(records)
        for record in records:
            seq_num = int(record.seq_num)
            gap = numbers and seq_num != numbers[-1] + 1
            if gap and (seq_num <= numbers[-1] or not self._may_skip(ledger, numbers[-1] + 1)):
                raise ViolationError(f"{ledger.name}: a follower got {seq_num} after {numbers}")
            numbers.append(seq_num)
        if records:
            self._books.report.compared += len(records)
            first, end = int(records[0].seq_num), int(records[-1].seq_num) + 1
            visible = [record for record in records if record.seq_num >= ledger.trimmed]
            ledger.check_read(visible, max(first, ledger.trimmed), end, self._books.latest)

    def _may_skip(self, ledger: StreamLedger, seq_num: int) -> bool:
        return seq_num < ledger.trim_attempted or ledger.retention is not None

    async def _list(self, number: int) -> None:
        """List streams, and check that every existing stream is listed."""
        books = self._books
        names = {name for name, ledger in books.streams.items() if books.exists(ledger)}
        try:
            answer = await self._faces.ask("GET", "/v1/streams", _BASIN)
        except LostAnswerError:
            return
        books.note(f"s2 list -> {answer.status}")
        if answer.status != 200:
            return
        listed = {item["name"] for item in answer.json()["streams"]}
        for name in sorted(names - listed):
            if books.exists(books.streams[name]):
                raise ViolationError(f"{name}: exists, and is not in the list {sorted(listed)}")

    async def _delete(self, number: int) -> None:
        books = self._books
        if (ledger := books.pick()) is None:
            return
        ledger.over = True
        try:
            answer = await self._faces.ask("DELETE", self._path(ledger, ""), _BASIN)
        except LostAnswerError:
            return
        books.note(f"s2 delete {ledger.name} -> {answer}")
        if answer.status == 202:
            again = chance().random() < 0.5 and not ledger.json  # S2 creates octet streams
            await self._create(ledger.name if again else books.new_name())

    async def _create(self, name: str) -> None:
        books = self._books
        retention = RETENTION if chance().random() < 0.5 else None
        policy: dict[str, object] = {"infinite": {}} if retention is None else {"age": retention}
        spec = {"stream": name, "config": {"retention_policy": policy}}
        try:
            answer = await self._faces.ask("POST", "/v1/streams", _JSON, msgspec.json.encode(spec))
        except LostAnswerError:
            return
        books.note(f"s2 create {name} -> {answer}")
        if answer.status == 201:
            books.open_ledger(StreamLedger(name, retention))

    async def _command(self, ledger: StreamLedger, name: str, body: bytes) -> int | None:
        """Append a command record. Return the tail after it, or None if not acknowledged."""
        books = self._books
        record = {
            "headers": [["", b64encode(name.encode()).decode()]],
            "body": b64encode(body).decode(),
        }
        call = f"s2 {name} {ledger.name} {body!r}"
        headers = {**_JSON, "s2-format": "base64"}
        sent = msgspec.json.encode({"records": [record]})
        try:
            answer = await self._faces.ask("POST", self._path(ledger), headers, sent, ledger=ledger)
        except LostAnswerError:
            books.note(f"{call} -> lost")
            return None
        books.note(f"{call} -> {answer}")
        return int(answer.json()["end"]["seq_num"]) if answer.status == 200 else None

    async def _trim(self, number: int) -> None:
        books = self._books
        if (ledger := books.pick(json=False)) is None or not ledger.tail:
            return
        point = chance().randrange(ledger.tail + 1)
        books.attempt_trim(ledger, point)
        end = await self._command(ledger, "trim", point.to_bytes(8, "big"))
        if end is not None and not ledger.over:
            ledger.trimmed = max(ledger.trimmed, point)
            ledger.tail = max(ledger.tail, end)

    async def _fence(self, number: int) -> None:
        if (ledger := self._books.pick(json=False)) is None:
            return
        token = chance().choice(("", "", "a"))
        ledger.fences.add(token)
        end = await self._command(ledger, "fence", token.encode())
        if end is not None and not ledger.over:
            ledger.tail = max(ledger.tail, end)

    async def _look_for_nothing(self, number: int) -> None:
        name = f"missing-{chance().randrange(1000)}"
        try:
            answer = await self._faces.ask("GET", f"/v1/streams/{name}/records/tail", _BASIN)
        except LostAnswerError:
            return
        self._books.note(f"s2 look for {name} -> {answer}")
        if answer.status == 200:
            raise ViolationError(f"{name}: exists although nobody created it")

    async def _use_token(self, number: int) -> None:
        """Append with an access token that is revoked or expires in between."""
        books, random = self._books, chance()
        expires = books.now() + 2000 if random.random() < 0.5 else None
        spec: dict[str, Any] = {"id": f"token-{number}", "scope": _SCOPE}
        if expires is not None:
            spec["expires_at"] = datetime.fromtimestamp(expires / 1000, UTC).isoformat()
        try:
            answer = await self._faces.ask(
                "POST",
                "/v1/access-tokens",
                _JSON,
                msgspec.json.encode(spec),
                allowed=frozenset((422,)),  # it may expire before it is issued
            )
            books.note(f"issue token-{number} until {expires} -> {answer.status}")
            if answer.status != 201:
                return
            token = answer.json()["access_token"]
            await self._append_with(token, number, 0)
            if expires is None:
                answer = await self._faces.ask("DELETE", f"/v1/access-tokens/token-{number}")
                books.note(f"revoke token-{number} -> {answer}")
                if answer.status != 204:
                    return
            else:
                await asyncio.sleep(2.5)
        except LostAnswerError:
            return
        before = books.now()
        answer_after = await self._append_with(token, number, 1)
        ended = expires is None or min(before, books.now()) > expires
        if ended and answer_after is not None and answer_after.status == 200:
            raise ViolationError(f"token-{number}: was accepted after its end")

    async def _append_with(self, token: str, number: int, index: int) -> Answer | None:
        if (ledger := self._books.pick()) is None:
            return None
        bodies = self._books.bodies(number, ledger, index + 1)[index:]
        return await self._send_append(ledger, bodies, {}, token=token)

    async def check(self, ledger: StreamLedger) -> None:
        """Read a stream to its end and compare it with what clients learned."""
        books, first = self._books, 0
        records: list[SequencedRecord] = []
        while True:
            more = await self._fetch(ledger, first, f"s2 check {ledger.name}", faithful=True)
            if not more:
                break
            records += more
            first = int(more[-1].seq_num) + 1
        books.report.compared += len(records)
        ledger.check_read(records, 0, ledger.tail, books.latest)


async def _send_frames(exchange: SimulatedExchange, batches: Sequence[Sequence[bytes]]) -> None:
    """Send batches as frames, split at random points, with pauses."""
    random = chance()
    for batch in batches:
        if random.random() < 0.5:
            await asyncio.sleep(random.random() ** 3 * 0.2)
        frame = encode_frame(_encode_batch(batch))
        cut = random.randrange(len(frame))
        exchange.upload(frame[:cut], last=False)
        if random.random() < 0.3:
            await asyncio.sleep(random.random() ** 3 * 0.2)
        exchange.upload(frame[cut:], last=False)
    exchange.upload(b"", last=True)


def _encode_batch(bodies: Sequence[bytes]) -> bytes:
    """Encode bodies as an S2 AppendInput protobuf."""
    records = [delimited(b"\x1a", body) for body in bodies]
    return b"".join(b"\x0a" + varint(len(record)) + record for record in records)


def _records(batch: Mapping[str, Any]) -> list[SequencedRecord]:
    """Return the records of a JSON batch in the raw format."""
    return [
        SequencedRecord(
            item["seq_num"],
            item["timestamp"],
            tuple(Header(name.encode(), value.encode()) for name, value in item.get("headers", ())),
            item.get("body", "").encode(),
        )
        for item in batch.get("records", ())
    ]
