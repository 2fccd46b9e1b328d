"""Client calls on the store's own interface."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from streamfold.errors import StreamfoldError
from streamfold.model.configs import INFINITE, BasinConfig, StreamConfigLayer
from streamfold.model.names import StreamName
from streamfold.model.records import Record, SequencedRecord, trim_record
from streamfold.model.resources import Claim, Producer
from streamfold.records.batch import RecordBatch
from streamfold.store import ReadRequest, StreamStore, from_seq_num
from streamfold.store.catalog.creation import ForkSpec, NewStream, prepared
from streamfold.store.catalog.snapshots import Publication
from streamfold.store.log.admission import AppendRequest
from streamfold.testing.simulation.books import BASIN, RETENTION, Books
from streamfold.testing.simulation.ledger import ProducerBook, StreamLedger, ViolationError
from streamfold.testing.simulation.loop import chance
from streamfold.wire.durable_streams.responses import SnapshotDigest

StoreCall = Callable[[int], Awaitable[None]]


class StoreCalls:
    """Store calls of one client. Each takes its operation's number."""

    def __init__(self, books: Books, store: StreamStore, client: int) -> None:
        self._books = books
        self._store = store
        self._client = client
        self.by_kind: dict[str, StoreCall] = {
            "append": self._append,
            "look for nothing": self._look_for_nothing,
            "check tail": self._check_tail,
            "read": self._read,
            "trim": self._trim,
            "publish": self._publish,
            "fork": self._fork,
            "delete": self._delete,
            "follow": self._follow,
            "delete basin": self._delete_basin,
            "produce": self._produce,
            "wait": self._wait,
        }

    async def new_stream(self, name: str | None = None) -> None:
        """Create a stream, reusing an earlier `name` if given."""
        books = self._books
        name = name or books.new_name()
        retention = RETENTION if chance().random() < 0.5 else None
        layer = StreamConfigLayer(retention=INFINITE if retention is None else retention)
        try:
            await self._store.create_stream(BASIN, name, layer)
        except StreamfoldError as error:
            books.note(f"create {name} -> {error.code}")
            return
        books.note(f"create {name} -> done")
        books.open_ledger(StreamLedger(name, retention))

    async def _append(self, number: int) -> None:
        books, random = self._books, chance()
        if (ledger := books.pick(json=False)) is None:
            return
        bodies = books.bodies(number, ledger, random.choice((1, 1, 1, 3)))
        match = ledger.tail if random.random() < 0.2 else None
        mark = books.mark()
        call = f"append {ledger.name} {bodies} match={match}"
        try:
            ack = await self._store.append(
                BASIN, ledger.name, [Record(body) for body in bodies], match_seq_num=match
            )
        except StreamfoldError as error:
            books.fail(call, ledger, error)
            if error.definite:
                books.refuse(ledger, bodies)
            else:
                books.lose()
            return
        start = int(ack.start.seq_num)
        books.note(f"{call} -> {start} to {int(ack.end.seq_num)}")
        books.acknowledge(ledger, start, bodies, mark)

    async def _produce(self, number: int) -> None:
        """Append as an idempotent producer, retrying up to five times until answered."""
        books = self._books
        if (ledger := books.pick(json=False)) is None:
            return
        book = ledger.producers.setdefault(-self._client - 1, ProducerBook(f"p{self._client}"))
        if book.busy:
            return
        body = book.pending = book.pending or books.bodies(number, ledger, 1)[0]
        claim = Claim(None, Producer(book.name, 0, book.seq), None, False)
        for _ in range(5):
            call = f"produce {ledger.name} {body!r} by {book.name} as {book.seq}"
            try:
                append = AppendRequest((RecordBatch.of([Record(body)]),), claim=claim)
                appended = await self._store.stream(BASIN, ledger.name).submit(append).appended()
            except StreamfoldError as error:
                books.fail(call, ledger, error)
                if error.definite:
                    return
                continue
            books.note(f"{call} -> repeated {appended.repeated}")
            if not ledger.over:
                ledger.produced.add(body)
            book.pending, book.seq = None, book.seq + 1
            return

    async def _follow(self, number: int) -> None:
        """Follow a stream briefly, and check that its records are consecutive and as acknowledged."""
        books, random = self._books, chance()
        if (ledger := books.pick()) is None:
            return
        first = random.randrange(ledger.tail + 1)
        records: list[SequencedRecord] = []
        trimmed = ledger.trimmed
        try:
            request = ReadRequest(from_seq_num(first), clamp=True)
            async with self._store.follow(BASIN, ledger.name, request) as session:
                async with asyncio.timeout(random.random()):
                    while (batch := await session.next()) is not None:
                        ledger.check_batch(batch.records())
                        records += batch.records()
        except TimeoutError:
            pass
        except StreamfoldError as error:
            books.fail(f"follow {ledger.name} from {first}", ledger, error)
        numbers = [int(record.seq_num) for record in records]
        books.note(f"follow {ledger.name} from {first} -> {numbers}")
        if ledger.over or ledger.trimmed != trimmed or ledger.trim_attempted > first:
            return
        if ledger.retention is None and numbers:
            expected = list(range(numbers[0], numbers[0] + len(numbers)))
            if numbers != expected:
                raise ViolationError(f"{ledger.name}: a follower got {numbers}")
            books.report.compared += len(records)
            ledger.check_read(records, numbers[0], numbers[-1] + 1, books.latest)

    async def _delete_basin(self, number: int) -> None:
        """Delete a basin with streams, and check that it then acknowledges no append."""
        books, store = self._books, self._store
        basin = f"basin-{number:05d}"
        try:
            await store.create_basin(basin, BasinConfig(create_stream_on_append=True))
            for stream in range(3):
                await store.append(basin, f"s-{stream}", [Record(b"x")])
            await store.delete_basin(basin)
        except StreamfoldError as error:
            books.fail(f"delete {basin}", None, error)
            return
        books.note(f"delete {basin} -> done")
        for stream in range(4):
            try:
                await store.append(basin, f"s-{stream}", [Record(b"late")])
            except StreamfoldError as error:
                books.fail(f"append {basin} {stream}", None, error)
            else:
                raise ViolationError(f"{basin}: took an append after its deletion")

    async def _look_for_nothing(self, number: int) -> None:
        name = f"missing-{chance().randrange(1000)}"
        try:
            await self._store.check_tail(BASIN, name)
        except StreamfoldError as error:
            self._books.fail(f"look for {name}", None, error)
        else:
            raise ViolationError(f"{name}: exists although nobody created it")

    async def _check_tail(self, number: int) -> None:
        books = self._books
        if (ledger := books.pick()) is None:
            return
        before = ledger.tail
        try:
            tail = int((await self._store.check_tail(BASIN, ledger.name)).seq_num)
        except StreamfoldError as error:
            books.fail(f"tail of {ledger.name}", ledger, error)
            return
        books.note(f"tail of {ledger.name} -> {tail}")
        if not ledger.over:
            ledger.check_tail(tail, before)

    async def _read(self, number: int) -> None:
        books = self._books
        if (ledger := books.pick()) is None or not ledger.tail:
            return
        first = chance().randrange(ledger.tail)
        trimmed = ledger.trimmed
        try:
            batch = await self._store.read(BASIN, ledger.name, ReadRequest(from_seq_num(first)))
        except StreamfoldError as error:
            books.fail(f"read {ledger.name} from {first}", ledger, error)
            return
        records = batch.records()
        numbers = [int(record.seq_num) for record in records]
        books.note(f"read {ledger.name} from {first} -> {numbers}")
        ledger.check_batch(records)
        if not ledger.over and ledger.trimmed == trimmed and numbers:
            books.report.compared += len(records)
            ledger.check_read(records, numbers[0], numbers[-1] + 1, books.latest)

    async def _trim(self, number: int) -> None:
        books = self._books
        if (ledger := books.pick(json=False)) is None or not ledger.tail:
            return
        point = chance().randrange(ledger.tail + 1)
        books.attempt_trim(ledger, point)
        try:
            ack = await self._store.append(BASIN, ledger.name, [trim_record(point)])
        except StreamfoldError as error:
            books.fail(f"trim {ledger.name} to {point}", ledger, error)
            return
        books.note(f"trim {ledger.name} to {point} -> {int(ack.end.seq_num)}")
        if not ledger.over:
            ledger.trimmed = max(ledger.trimmed, point)
            ledger.tail = max(ledger.tail, int(ack.end.seq_num))

    async def _publish(self, number: int) -> None:
        books = self._books
        if (ledger := books.pick(json=False)) is None or not ledger.tail:
            return
        point = chance().randrange(ledger.tail + 1)
        books.attempt_trim(ledger, point)
        state = b"state %d" % number
        ledger.snapshots.setdefault(point, set()).add(state)

        async def pieces() -> AsyncIterator[bytes]:
            yield state

        digest = SnapshotDigest("a/b")
        new = Publication(
            point, "a/b", pieces(), digest, None, False, None, trim=True, size=len(state)
        )
        try:
            await self._store.stream(BASIN, ledger.name).snapshots.publish(new)
        except StreamfoldError as error:
            books.fail(f"publish {ledger.name} at {point}", ledger, error)
            return
        books.note(f"publish {ledger.name} at {point} -> done")
        if not ledger.over:
            ledger.trimmed = max(ledger.trimmed, point)
            ledger.published = max(ledger.published, point)

    async def _fork(self, number: int) -> None:
        books = self._books
        if (source := books.pick()) is None or not source.tail:
            return
        name = books.new_name()
        point = chance().randrange(source.tail + 1)
        fork = ForkSpec(StreamName(source.name), point, 0, lambda _: True)
        spec = NewStream(None, None, None, None, False, fork, prepared([]), None)
        call = f"fork {source.name} at {point} as {name}"
        ledger = source.fork(name, point)
        try:
            status, _ = await self._store.stream(BASIN, name).create(spec)
        except StreamfoldError as error:
            books.fail(call, source, error)
            return
        books.note(f"{call} -> from {status.first}")
        ledger.trimmed = ledger.trim_attempted = int(status.first)
        books.open_ledger(ledger)

    async def _delete(self, number: int) -> None:
        books = self._books
        if (ledger := books.pick()) is None:
            return
        ledger.over = True
        try:
            await self._store.delete_stream(BASIN, ledger.name)
        except StreamfoldError as error:
            books.fail(f"delete {ledger.name}", ledger, error)
            return
        books.note(f"delete {ledger.name} -> done")
        again = chance().random() < 0.5 and not ledger.json  # the store creates octet streams
        await self.new_stream(ledger.name if again else None)

    async def _wait(self, number: int) -> None:
        await asyncio.sleep(chance().choice((1.0, 1.0, 1.0, RETENTION / 2)))

    async def check(self, ledger: StreamLedger) -> None:
        """Read a stream to its end and compare it with what clients learned."""
        books, store = self._books, self._store
        tail = int((await store.check_tail(BASIN, ledger.name)).seq_num)
        ledger.check_tail(tail, ledger.tail)
        records: list[SequencedRecord] = []
        first = 0
        while first < tail:
            batch = await store.read(BASIN, ledger.name, ReadRequest(from_seq_num(first)))
            if not batch.count:
                break
            ledger.check_batch(batch.records())
            records += batch.records()
            first = int(records[-1].seq_num) + 1
        books.note(f"check {ledger.name} -> {[int(r.seq_num) for r in records]} of {tail}")
        books.report.compared += len(records)
        ledger.check_read(records, 0, tail, books.latest)
        ledger.check_produced()
