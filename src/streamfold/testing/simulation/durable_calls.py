"""Client calls through Durable Streams: appends, producers, reads, followers, snapshots, forks."""

from __future__ import annotations

import asyncio
from base64 import b64decode
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from streamfold.testing.adversary.client import Answer
from streamfold.testing.simulation.books import BASIN
from streamfold.testing.simulation.exchange import LostAnswerError
from streamfold.testing.simulation.ledger import ProducerBook, StreamLedger, ViolationError
from streamfold.testing.simulation.loop import chance
from streamfold.wire.durable_streams.offsets import format_offset, parse_offset
from streamfold.wire.durable_streams.responses import SnapshotDigest

if TYPE_CHECKING:
    from streamfold.testing.simulation.faces import Faces

_JSON, _OCTETS = "application/json", "application/octet-stream"
_STATE = "text/plain"
#: Statuses that guarantee the request had no effect.
_CLEAN = frozenset((400, 403, 404, 409, 410, 412, 413, 429))
_LATER = frozenset(
    ("server_draining", "server_busy", "storage_full", "uploads_busy", "store_recovering")
)


def _is_clean(answer: Answer) -> bool:
    return answer.status in _CLEAN or answer.code in _LATER


def _next_offset(answer: Answer) -> int:
    return int(parse_offset(answer.headers["stream-next-offset"]))


def _content_type(ledger: StreamLedger) -> str:
    return _JSON if ledger.json else _OCTETS


def _content(ledger: StreamLedger, bodies: Sequence[bytes]) -> bytes:
    return b"[%b]" % b",".join(bodies) if ledger.json else b"".join(bodies)


def _bodies(ledger: StreamLedger, content: bytes) -> list[bytes]:
    """Split the content of a read into record bodies."""
    if ledger.json:
        return [b"%d" % number for number in msgspec.json.decode(content or b"[]")]
    return [part + b";" for part in content.split(b";")[:-1]]


class DurableCalls:
    """Durable Streams requests of one client. Each call takes its operation's number."""

    def __init__(self, faces: Faces, client: int) -> None:
        self._faces = faces
        self._books = faces.books
        self._client = client
        self.by_kind: dict[str, Callable[[int], Awaitable[None]]] = {
            "ds append": self._append,
            "ds produce": self._produce,
            "ds read": self._read,
            "ds poll": self._poll,
            "ds events": self._follow,
            "ds head": self._head,
            "ds create": self.create,
            "ds delete": self._delete,
            "ds fork": self._fork,
            "ds close": self._close,
            "ds snapshot": self._publish,
            "ds parts": self._publish_parts,
            "ds bootstrap": self._bootstrap,
        }

    def _path(self, ledger: StreamLedger, rest: str = "") -> str:
        return f"/{BASIN}/{ledger.name}{rest}"

    async def create(self, number: int, former: StreamLedger | None = None) -> None:
        """Create a stream, optionally with initial content and in place of a `former` one.

        It reuses the former one's content type, because late requests for that one may arrive here.
        """
        books, random = self._books, chance()
        name, json = books.new_name(), random.random() < 0.6
        if former is not None:
            name, json = former.name, former.json
        ledger = StreamLedger(name, json=json)
        bodies = books.bodies(number, ledger, 1) if random.random() < 0.3 else []
        mark = books.mark()
        headers = {"content-type": _content_type(ledger)}
        if random.random() < 0.2:
            ledger.ttl = random.choice((5, 40))
            headers["stream-ttl"] = str(ledger.ttl)
        try:
            answer = await self._faces.ask(
                "PUT",
                self._path(ledger),
                headers,
                _content(ledger, bodies) if bodies else b"",
            )
        except LostAnswerError:
            books.note(f"ds create {ledger.name} -> lost")
            return
        books.note(
            f"ds create {ledger.name} json={ledger.json} ttl={ledger.ttl} {bodies} -> {answer}"
        )
        if answer.status == 201:
            ledger.used = books.arrival(mark)
            books.open_ledger(ledger)
            books.acknowledge(ledger, 0, bodies, mark)

    async def _append(self, number: int) -> None:
        books, random = self._books, chance()
        if (ledger := books.pick()) is None:
            return
        bodies = books.bodies(number, ledger, random.choice((1, 1, 3)) if ledger.json else 1)
        mark, closed = books.mark(), ledger.closed
        call = f"ds append {ledger.name} {bodies}"
        try:
            answer = await self._faces.ask(
                "POST",
                self._path(ledger),
                {"content-type": _content_type(ledger)},
                _content(ledger, bodies),
                ledger=ledger,
            )
        except LostAnswerError:
            books.note(f"{call} -> lost")
            books.lose()
            return
        books.note(f"{call} -> {answer} {answer.headers.get('stream-next-offset', '')[:16]}")
        if answer.status == 204:
            if closed and not ledger.over:
                raise ViolationError(f"{ledger.name}: {call} was taken although it was closed")
            books.acknowledge(ledger, _next_offset(answer) - len(bodies), bodies, mark)
        elif _is_clean(answer):
            books.refuse(ledger, bodies)
        else:
            books.lose()

    async def _produce(self, number: int) -> None:
        """Append as an idempotent producer. Retries unanswered appends and some answered ones."""
        books, random = self._books, chance()
        if (ledger := books.pick()) is None:
            return
        book = ledger.producers.setdefault(
            self._client, ProducerBook(f"producer-{self._client}-{number}")
        )
        if book.busy:
            return
        if book.pending is None and random.random() < 0.15:
            book.epoch, book.seq = book.epoch + 1, 0
        body = book.pending or books.bodies(number, ledger, 1)[0]
        if not ledger.over:
            book.pending = body
        epoch, seq = book.epoch, book.seq
        answer = await self._send_produced(ledger, book, body, epoch, seq)
        if answer is None or answer.status not in (200, 204):
            return
        book.pending, book.seq = None, seq + 1
        if not ledger.over:
            ledger.produced.add(body)
        if random.random() < 0.3:
            again = await self._send_produced(ledger, book, body, epoch, seq)
            if again is not None and again.status == 200 and not ledger.over:
                raise ViolationError(f"{ledger.name}: {body!r} of a producer was taken twice")
        if epoch and random.random() < 0.3:
            stale = books.bodies(number, ledger, 3)[2]
            late = await self._send_produced(ledger, book, stale, epoch - 1, 1000)
            if late is not None and late.status in (200, 204) and not ledger.over:
                raise ViolationError(f"{ledger.name}: a producer of epoch {epoch - 1} was heard")

    async def _send_produced(
        self, ledger: StreamLedger, book: ProducerBook, body: bytes, epoch: int, seq: int
    ) -> Answer | None:
        call = f"ds produce {ledger.name} {body!r} by {book.name} epoch {epoch} seq {seq}"
        headers = {
            "content-type": _content_type(ledger),
            "producer-id": book.name,
            "producer-epoch": str(epoch),
            "producer-seq": str(seq),
        }
        mark = self._books.mark()
        try:
            answer = await self._faces.ask(
                "POST",
                self._path(ledger),
                headers,
                _content(ledger, [body]),
                ledger=ledger,
                allowed=frozenset((403,)),
            )
        except LostAnswerError:
            self._books.note(f"{call} -> lost")
            return None
        self._books.note(f"{call} -> {answer}")
        if answer.status == 200:
            self._books.acknowledge(ledger, _next_offset(answer) - 1, [body], mark)
        if answer.status == 409 and answer.code == "producer_gap" and not ledger.over:
            raise ViolationError(f"{ledger.name}: {call} is answered with {answer}")
        return answer

    def _check_page(
        self, ledger: StreamLedger, answer: Answer, first: int, before: int, trimmed: int
    ) -> str:
        """Compare a page from `first` with the ledger. Return its content for the trace."""
        bodies = [] if answer.status == 204 else _bodies(ledger, answer.body)
        end = _next_offset(answer)
        if ledger.over:
            return "over"
        up_to_date = answer.headers.get("stream-up-to-date") == "true"
        if up_to_date and end < before:
            raise ViolationError(f"{ledger.name}: up to date at {end}, but the tail was {before}")
        if end < first:
            raise ViolationError(f"{ledger.name}: a read from {first} ends at {end}")
        if answer.headers.get("stream-closed") == "true":
            ledger.closed = True
        self._books.report.compared += len(bodies)
        if ledger.trimmed == trimmed:
            ledger.check_bodies(bodies, first, end, self._books.latest)
        return f"{bodies} to {end}{' up to date' if up_to_date else ''}"

    async def _read(self, number: int) -> None:
        if (ledger := self._books.pick()) is not None:
            await self._fetch(ledger, chance().randrange(ledger.tail + 1), "")

    async def _poll(self, number: int) -> None:
        """Long-poll near the tail."""
        if (ledger := self._books.pick()) is not None:
            await self._fetch(
                ledger, max(0, ledger.tail - chance().randrange(3)), "&live=long-poll"
            )

    async def _fetch(
        self, ledger: StreamLedger, first: int, live: str, *, faithful: bool = False
    ) -> int | None:
        """Read one page. Return the next page's offset, or None if the read failed."""
        books, before, trimmed = self._books, ledger.tail, ledger.trimmed
        path = self._path(ledger, f"?offset={format_offset(first)}{live}")
        call = f"ds read {ledger.name} from {first}{live}"
        try:
            answer = await self._faces.ask("GET", path, ledger=ledger, faithful=faithful)
        except LostAnswerError:
            books.note(f"{call} -> lost")
            return None
        if answer.status not in (200, 204):
            books.note(f"{call} -> {answer}")
            return None
        books.note(f"{call} -> {self._check_page(ledger, answer, first, before, trimmed)}")
        return _next_offset(answer)

    async def _follow(self, number: int) -> None:
        """Follow through server-sent events briefly, then vanish."""
        books, random = self._books, chance()
        if (ledger := books.pick()) is None:
            return
        position = first = random.randrange(ledger.tail + 1)
        path = self._path(ledger, f"?offset={format_offset(first)}&live=sse")
        exchange = self._faces.open("GET", path, {})
        exchange.upload(b"", last=True)
        asyncio.get_running_loop().call_later(random.random(), exchange.vanish)
        unread, bodies, ending = b"", list[bytes](), "done"
        trimmed = ledger.trimmed
        try:
            if await exchange.head() != 200:
                answer = await exchange.answer()
                self._faces.judge("a follower", answer.status, answer.code, ledger)
                ending = str(answer)
            async for piece in exchange.pieces():
                *events, unread = (unread + piece).split(b"\n\n")
                for event in events:
                    kind, _, data = event.partition(b"\ndata:")
                    if kind == b"event: data":
                        content = data if ledger.json else b64decode(data)
                        bodies += _bodies(ledger, content)
                    elif kind == b"event: control" and not ledger.over:
                        control = msgspec.json.decode(data)
                        end = int(parse_offset(control["streamNextOffset"]))
                        if end < position:
                            raise ViolationError(f"{ledger.name}: a follower went back to {end}")
                        position = end
                        if ledger.trimmed == trimmed:
                            ledger.check_bodies(bodies, first, end, books.latest)
        except LostAnswerError:
            ending = "gone"
        books.report.compared += len(bodies)
        books.note(f"ds follow {ledger.name} from {first} -> {bodies} to {position}, {ending}")

    async def _head(self, number: int) -> None:
        books = self._books
        if (ledger := books.pick()) is None:
            return
        before, closed = ledger.tail, ledger.closed
        try:
            answer = await self._faces.ask("HEAD", self._path(ledger), ledger=ledger)
        except LostAnswerError:
            return
        books.note(f"ds head {ledger.name} -> {answer}")
        if answer.status != 200 or ledger.over:
            return
        ledger.check_tail(_next_offset(answer), before)
        if closed and "stream-closed" not in answer.headers:
            raise ViolationError(f"{ledger.name}: is open again")

    async def _close(self, number: int) -> None:
        """Close a stream, with or without a last append. Rare, because no append can follow."""
        books, random = self._books, chance()
        if random.random() < 0.5 or (ledger := books.pick()) is None:
            return
        try:
            answer = await self._faces.ask(
                "POST", self._path(ledger), {"stream-closed": "true"}, ledger=ledger
            )
        except LostAnswerError:
            return
        books.note(f"ds close {ledger.name} -> {answer}")
        if answer.status == 204 and not ledger.over:
            ledger.closed = True

    async def _delete(self, number: int) -> None:
        books = self._books
        if (ledger := books.pick()) is None:
            return
        ledger.over = True
        try:
            answer = await self._faces.ask("DELETE", self._path(ledger))
        except LostAnswerError:
            return
        books.note(f"ds delete {ledger.name} -> {answer}")
        if answer.status == 204:
            await self.create(number, ledger if chance().random() < 0.5 else None)

    async def _fork(self, number: int) -> None:
        books = self._books
        if (source := books.pick()) is None or not source.tail:
            return
        point = chance().randrange(source.tail + 1)
        ledger = source.fork(books.new_name(), point)
        trimmed = source.trim_attempted
        headers = {
            "stream-forked-from": self._path(source),
            "stream-fork-offset": format_offset(point),
        }
        call = f"ds fork {source.name} at {point} as {ledger.name}"
        try:
            answer = await self._faces.ask("PUT", self._path(ledger), headers, ledger=source)
        except LostAnswerError:
            books.note(f"{call} -> lost")
            return
        books.note(f"{call} -> {answer}")
        if answer.status == 201:
            # Trims of the source before the fork also apply to the fork.
            ledger.trim_attempted = max(trimmed, source.trim_attempted)
            if source.retention is not None:
                ledger.trim_attempted = point
            books.open_ledger(ledger)

    async def _publish(self, number: int) -> None:
        """Publish a snapshot that may trim the records it covers."""
        books, random = self._books, chance()
        if (ledger := books.pick()) is None or not ledger.tail:
            return
        point, trims = random.randrange(ledger.tail + 1), random.random() < 0.5
        state = b"state %d of %s" % (number, b"x" * random.randrange(300))
        if trims:
            books.attempt_trim(ledger, point)
        ledger.snapshots.setdefault(point, set()).add(state)
        headers = {"content-type": _STATE, "stream-trim-on-snapshot": str(trims).lower()}
        await self._put_snapshot(ledger, point, headers, state, trims=trims)

    async def _put_snapshot(
        self, ledger: StreamLedger, point: int, headers: dict[str, str], body: bytes, *, trims: bool
    ) -> None:
        books = self._books
        path = self._path(ledger, f"/snapshot/{format_offset(point)}")
        call = f"ds snapshot {ledger.name} at {point} trims={trims}"
        try:
            answer = await self._faces.ask("PUT", path, headers, body, ledger=ledger)
        except LostAnswerError:
            books.note(f"{call} -> lost")
            return
        books.note(f"{call} -> {answer}")
        if answer.status == 204 and not ledger.over:
            ledger.published = max(ledger.published, point)
            if trims:
                ledger.trimmed = max(ledger.trimmed, point)

    async def _publish_parts(self, number: int) -> None:
        """Publish a snapshot uploaded in two parts."""
        books, random = self._books, chance()
        if (ledger := books.pick()) is None or not ledger.tail:
            return
        point = random.randrange(ledger.tail + 1)
        parts = [b"part %d.%d " % (number, part) * random.randint(1, 30) for part in range(2)]
        digest, names = SnapshotDigest(_STATE), list[str]()
        path = self._path(ledger, f"/snapshot/{format_offset(point)}/parts")
        for part in parts:
            digest.update(part)
            try:
                answer = await self._faces.ask("POST", path, {}, part, ledger=ledger)
            except LostAnswerError:
                return
            books.note(f"ds part {ledger.name} -> {answer}")
            if answer.status != 201:
                return
            names.append(answer.headers["stream-snapshot-part"])
        ledger.snapshots.setdefault(point, set()).add(b"".join(parts))
        headers = {
            "content-type": _STATE,
            "stream-trim-on-snapshot": "false",
            "stream-snapshot-parts": str(len(parts)),
            "stream-snapshot-digest": digest.hexdigest(),
        }
        manifest = "".join(f"{name}\n" for name in names).encode()
        await self._put_snapshot(ledger, point, headers, manifest, trims=False)

    async def _bootstrap(self, number: int) -> None:
        if (ledger := self._books.pick()) is not None:
            await self._fetch_bootstrap(ledger)

    async def _fetch_bootstrap(self, ledger: StreamLedger, *, faithful: bool = False) -> None:
        """Read the newest snapshot and the records after it."""
        books = self._books
        published, trimmed = ledger.published, ledger.trimmed
        call = f"ds bootstrap {ledger.name}"
        try:
            answer = await self._faces.ask(
                "GET", self._path(ledger, "/bootstrap"), ledger=ledger, faithful=faithful
            )
        except LostAnswerError:
            books.note(f"{call} -> lost")
            return
        books.note(f"{call} -> {answer} {answer.headers.get('stream-snapshot-offset', '')[:16]}")
        if answer.status != 200 or ledger.over:
            return
        separator = answer.headers["content-type"].partition("boundary=")[2].encode()
        parts = [
            part.partition(b"\r\n\r\n")[2][:-2]
            for part in answer.body.split(b"--" + separator)[1:-1]
        ]
        at = answer.headers["stream-snapshot-offset"]
        position = -1 if at == "-1" else int(parse_offset(at))
        # A snapshot is removed when the records after it expire or are trimmed.
        goes = ledger.retention is not None or ledger.trim_attempted > published
        if position < published and not goes:
            raise ViolationError(
                f"{ledger.name}: the newest snapshot is at {position}, but {published} was published"
            )
        if position >= 0 and parts[0] not in ledger.snapshots.get(position, set()):
            raise ViolationError(f"{ledger.name}: the snapshot at {position} is {parts[0][:60]!r}")
        if position >= 0 and ledger.trimmed == trimmed:
            content = b"[%b]" % b",".join(parts[1:]) if ledger.json else b"".join(parts[1:])
            bodies = _bodies(ledger, content)
            books.report.compared += len(bodies)
            ledger.check_bodies(bodies, position, _next_offset(answer), books.latest)

    async def check(self, ledger: StreamLedger) -> None:
        """Read a stream and its snapshot, and compare them with what clients learned."""
        position: int | None = max(ledger.trimmed, ledger.trim_attempted)
        while position is not None and position < ledger.tail:
            former = position
            position = await self._fetch(ledger, position, "", faithful=True)
            if position == former:
                break
        await self._fetch_bootstrap(ledger, faithful=True)
