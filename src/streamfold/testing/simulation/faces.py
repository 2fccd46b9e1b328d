"""The faces of a simulated server: both protocols with access rules, wired as in a real server."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from types import TracebackType

from streamfold.model.access_tokens import Secret
from streamfold.model.names import parse_bucket_name
from streamfold.server.auth import Access
from streamfold.server.config import Configuration
from streamfold.server.console import MetricsHistory
from streamfold.server.durable_streams.subscriptions import Subscriptions
from streamfold.server.http.connections import ClientLimits, Connection, Connections
from streamfold.server.http.drain import DrainGate
from streamfold.server.http.offload import OffloadPool
from streamfold.server.http.request import Request
from streamfold.server.http.request_limits import RequestBudget
from streamfold.server.http.response_limits import ResponseBudget
from streamfold.server.main import make_application, make_instruments
from streamfold.store import StreamStore
from streamfold.testing.adversary.client import Answer
from streamfold.testing.simulation.books import BASIN, Books
from streamfold.testing.simulation.durable_calls import DurableCalls
from streamfold.testing.simulation.exchange import (
    LostAnswerError,
    SimulatedExchange,
)
from streamfold.testing.simulation.ledger import StreamLedger, ViolationError
from streamfold.testing.simulation.loop import SimulatedProcess, chance
from streamfold.testing.simulation.s2_calls import S2Calls

#: The token of the simulated operator.
ROOT_TOKEN = "simulated-root"  # noqa: S105 - of no real server
#: Statuses that a well-formed, fully authorized request never gets.
_NEVER = frozenset((400, 401, 403, 405, 406, 408, 413, 415, 422, 501))
#: Path parts of requests that need not renew a stream's TTL.
_NO_USE = ("/tail", "/snapshot", "/bootstrap")
#: Simulated seconds after which an unanswered request is a violation.
_PATIENCE = 300.0


class Faces:
    """Accepts requests for one store until drained."""

    def __init__(
        self, store: StreamStore, process: SimulatedProcess, books: Books, drain: float
    ) -> None:
        self.books = books
        self._process = process
        self._drain = drain
        configuration = Configuration(
            root_token=Secret(ROOT_TOKEN), console=None, default_basin=BASIN, long_poll=1.0
        )
        self._gate = DrainGate()
        access = Access(store.account, configuration.root_token)
        subscriptions = Subscriptions(
            store,
            parse_bucket_name(configuration.default_basin),
            public_url=lambda request: request.url_of(""),
            authorise=access.grant,
            grant_of=access.grant_of,
            chance=random.Random(0),  # noqa: S311 - repeatable, not secret
        )
        self._limits = ClientLimits(RequestBudget(), Connections(), ResponseBudget())
        self._limits.unread.seed(chance())
        self._workers = OffloadPool(2)
        instruments = make_instruments(configuration, store, self._gate, self._limits)
        self._application = make_application(
            configuration,
            store,
            self._gate,
            access,
            subscriptions,
            None,
            self._limits,
            instruments,
            MetricsHistory(instruments.collectors),
        )
        #: Storage faults before this server started. Only later ones can explain its failures.
        self._faults = books.report.faults.total()
        self._replacements = books.report.replacements

    async def __aenter__(self) -> Faces:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._gate.drain(self._drain)

    def calls(self, client: int) -> FaceClient:
        return FaceClient(self, client)

    def begin(self, exchange: SimulatedExchange) -> None:
        """Pass a request to the server, as its door does."""
        self.books.report.requests += 1
        limits = self._limits
        request = Request(exchange, limits.request_budget, limits.unread, self._workers)
        request.running = limits.connections.begin(exchange.connection)
        request.task = self._process.start(self._answer(request), chance())

    async def _answer(self, request: Request) -> None:
        try:
            await self._application(request)
        finally:
            request.finish()
            self._limits.connections.end(request.connection)

    async def ask(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        *,
        ledger: StreamLedger | None = None,
        token: str | None = None,
        faithful: bool = False,
        allowed: frozenset[int] = frozenset(),
    ) -> Answer:
        """Send one request and return its answer.

        Raises LostAnswerError if the answer is cut off or the client vanishes. A `faithful` client
        never vanishes. Raises ViolationError for impossible statuses, unless they are `allowed`.
        """
        random, mark = chance(), self.books.mark()
        declared = len(body) if body and random.random() < 0.8 else None
        whole = body if declared is not None and random.random() < 0.5 else None
        exchange = self.open(
            method, path, headers or {}, token=token, declared=declared, body=whole
        )
        sending = asyncio.create_task(exchange.upload_all(body))
        hangs_up = None
        loop = asyncio.get_running_loop()
        if not faithful and random.random() < 0.1:
            hangs_up = loop.call_later(random.random() ** 3 * 0.5, exchange.vanish)
        try:
            async with asyncio.timeout(_PATIENCE):
                answer = await exchange.answer()
        except LostAnswerError:
            if exchange.gone_away:
                self.books.report.vanished += 1
            else:
                self.books.report.broken += 1
            raise
        except TimeoutError:
            raise ViolationError(f"{path}: {method} has no answer after {_PATIENCE:g} s") from None
        finally:
            sending.cancel()
            if hangs_up is not None:
                hangs_up.cancel()
        self.judge(f"{method} {path}", answer.status, answer.code, ledger, allowed)
        uses = method in ("GET", "POST") and not any(part in path for part in _NO_USE)
        if ledger is not None and answer.status in (200, 204) and uses:
            ledger.used = self.books.arrival(mark)
        return answer

    def open(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        *,
        token: str | None = None,
        declared: int | None = None,
        body: bytes | None = None,
    ) -> SimulatedExchange:
        """Begin a request. The caller sends the body unless `body` is given, and reads the answer."""
        named = {"host": "localhost", "authorization": f"Bearer {token or ROOT_TOKEN}", **headers}
        connection = Connection(0, "192.0.2.1", chance().randrange(1024, 65536), _ignore_cut)
        exchange = SimulatedExchange(connection, method, path, named, declared=declared, body=body)
        self.begin(exchange)
        return exchange

    def judge(
        self,
        what: str,
        status: int,
        code: str,
        ledger: StreamLedger | None = None,
        allowed: frozenset[int] = frozenset(),
    ) -> None:
        """Raise ViolationError if nothing explains this answer."""
        name = ledger.name if ledger is not None else "faces"
        if status == 500:
            faults = self.books.report.faults.total() > self._faults
            replaced = self.books.report.replacements > self._replacements
            if code == "other" or not (faults or replaced):
                raise ViolationError(f"{name}: {what} is answered with 500 {code}, unexplained")
        replaced = ledger is not None and ledger.over
        if status in _NEVER and status not in allowed and not replaced:
            raise ViolationError(f"{name}: {what} is answered with {status} {code}")
        gone = code in ("stream_not_found", "stream_deletion_pending", "basin_not_found")
        if gone and ledger is not None and not ledger.may_be_missing(self.books.latest):
            raise ViolationError(f"{name}: {what} is answered with {status} {code}, but it exists")


def _ignore_cut(_: int) -> None:
    """Do nothing: a simulated client learns of the cut from its broken answer."""


class FaceClient:
    """One client of both faces."""

    def __init__(self, faces: Faces, client: int) -> None:
        self._faces = faces
        self._s2 = S2Calls(faces, client)
        self._durable = DurableCalls(faces, client)
        self.by_kind = self._s2.by_kind | self._durable.by_kind
        self.by_kind["clock"] = self._move_clock

    async def create_stream(self, number: int) -> None:
        await self._durable.create(number)

    async def check(self, ledger: StreamLedger) -> None:
        """Read a stream through both faces, with calm storage."""
        await self._s2.check(ledger)
        await self._durable.check(ledger)

    async def _move_clock(self, number: int) -> None:
        self._faces.books.jump(chance().choice((-30.0, -1.0, 1.0, 30.0)))
