"""Authenticates the callers of all faces, and checks what they may do."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from streamfold.errors import StreamfoldError, UnauthenticatedError
from streamfold.model.access_tokens import Operation, Secret
from streamfold.model.grants import ROOT, Grant
from streamfold.model.names import StreamRef
from streamfold.records.batch import Fence, RecordBatch
from streamfold.server.http.request import Request
from streamfold.store.catalog.account import Account

logger = logging.getLogger(__name__)

_SCHEME: Final = "bearer "
#: What the records and commands of an append need.
_APPENDING: Final = frozenset((Operation.APPEND, Operation.FENCE, Operation.TRIM))

#: Seconds between checks of whether the token of a quiet session is still valid.
_LOOK_INTERVAL: Final = 1.0

Result = TypeVar("Result")


class Access:
    """Looks up a caller's rights by its access token; without a root token every caller has all."""

    def __init__(self, account: Account, root: Secret | None) -> None:
        self._account = account
        self._root = root
        #: Whether every caller has all rights.
        self.open = root is None
        #: Tasks that wait for a token to become invalid, by the header that carries it.
        self._lapses: dict[str, _Lapse] = {}

    async def grant(self, request: Request) -> Grant:
        """The rights of the caller; UnauthenticatedError if it cannot prove that it has any."""
        if self._root is None:
            return ROOT
        grant = await self._grant_of(request.header("authorization") or "")
        request.hidden_prefix = grant.stream_prefix
        return grant

    async def _grant_of(self, header: str) -> Grant:
        if self._root is None:
            return ROOT
        if header[: len(_SCHEME)].lower() != _SCHEME:
            raise UnauthenticatedError(
                "the access token is missing: send the header 'authorization: Bearer <token>'"
            )
        secret = Secret(header[len(_SCHEME) :].strip())
        if hmac.compare_digest(secret.digest, self._root.digest):
            return ROOT
        return await self._account.authenticate(secret)

    async def grant_of(self, token_id: str | None) -> Grant:
        """What a token allows now, without a request that carries it; None stands for root."""
        return ROOT if token_id is None else await self._account.grant_of(token_id)

    async def allow(
        self,
        request: Request,
        operation: Operation,
        basin: str | None = None,
        stream: str | None = None,
        token_id: str | None = None,
    ) -> Grant:
        """Raise unless the caller may do this; return what else it may do."""
        grant = await self.grant(request)
        if grant is ROOT:
            return grant
        if stream is not None:
            stream = grant.full_stream_name(stream)
        grant.require(operation, basin, stream, token_id)
        return grant

    async def allow_some(
        self, request: Request, operation: Operation, basin: str | None = None
    ) -> Grant:
        """Raise unless the caller may do this to some resource; call it before reading a body."""
        grant = await self.grant(request)
        if not grant.allows_somewhere(operation, basin):
            grant.require(operation, basin)
        return grant

    @asynccontextmanager
    async def active_grant(self, request: Request, grant: Grant) -> AsyncIterator[ActiveGrant]:
        """Watches the token of a session while the context lasts."""
        if grant is ROOT:
            yield ActiveGrant(None, None)
            return
        header = request.header("authorization") or ""
        lapse = self._lapses.get(header)
        if lapse is None:
            lapse = self._lapses[header] = _Lapse(asyncio.create_task(self._lapsed(header)))
        lapse.sessions += 1
        try:
            yield ActiveGrant(lapse.task, partial(self._grant_of, header))
        finally:
            lapse.sessions -= 1
            if not lapse.sessions:
                lapse.task.cancel()
                del self._lapses[header]

    async def _lapsed(self, header: str) -> UnauthenticatedError:
        """Return the reason soon after a token becomes invalid."""
        while True:
            try:
                await self._grant_of(header)
            except UnauthenticatedError as error:
                return error
            except StreamfoldError as error:
                # The session itself notices that the store fails.
                logger.debug("an access token cannot be looked up: %s", error)
            await asyncio.sleep(_LOOK_INTERVAL)


class ActiveGrant:
    """The rights of a session, rechecked while it lasts: tokens expire and are revoked."""

    def __init__(
        self,
        lapse: asyncio.Task[UnauthenticatedError] | None,
        look_up: Callable[[], Awaitable[Grant]] | None,
    ) -> None:
        self._lapse = lapse
        self._look_up = look_up

    @property
    def certain(self) -> bool:
        """Whether the rights cannot be lost, because they do not come from an issued token."""
        return self._lapse is None

    async def require(self) -> None:
        """Raise UnauthenticatedError if the token is invalid now."""
        if self._look_up is not None:
            await self._look_up()

    async def lost(self) -> UnauthenticatedError:
        """Wait until the token becomes invalid, and return the reason."""
        if self._lapse is None:
            await asyncio.Event().wait()
            raise AssertionError("this event is never set")
        return await asyncio.shield(self._lapse)

    async def during(self, work: Coroutine[object, object, Result]) -> Result:
        """The result of `work`; UnauthenticatedError if the token becomes invalid first."""
        if self._lapse is None:
            return await work
        working = asyncio.ensure_future(work)
        try:
            await asyncio.wait({working, self._lapse}, return_when=asyncio.FIRST_COMPLETED)
            if self._lapse.done():
                raise self._lapse.result()
            return working.result()
        finally:
            working.cancel()


@dataclass(slots=True)
class _Lapse:
    """The one watch for all sessions with the same token."""

    task: asyncio.Task[UnauthenticatedError]
    sessions: int = 0


class AppendRights:
    """What of an append a caller may do to one stream, looked up once per request."""

    __slots__ = ("_allowed", "_grant", "_ref")

    def __init__(self, grant: Grant, ref: StreamRef) -> None:
        """Raise if the caller may append nothing at all: call this before reading a body."""
        self._grant = grant
        self._ref = ref
        self._allowed = frozenset(op for op in _APPENDING if grant.allows(op, *ref))
        if not self._allowed:
            grant.require(Operation.APPEND, *ref)

    @classmethod
    def of(cls, grant: Grant, ref: StreamRef) -> AppendRights:
        """The same; one object serves all callers with all rights."""
        return _ALL_RIGHTS if grant is ROOT else cls(grant, ref)

    def check(self, batch: RecordBatch) -> None:
        """Raise unless the caller may append this: records, and each kind of command among them."""
        if len(batch.commands) < batch.count:
            self._require(Operation.APPEND)
        for command in batch.commands:
            self._require(Operation.FENCE if isinstance(command, Fence) else Operation.TRIM)

    def _require(self, operation: Operation) -> None:
        if operation not in self._allowed:
            self._grant.require(operation, *self._ref)


class _AllRights(AppendRights):
    """What a caller with all rights may do."""

    __slots__ = ()

    def __init__(self) -> None:
        """Nothing is looked up."""

    def check(self, batch: RecordBatch) -> None:
        """Allow everything."""


_ALL_RIGHTS: Final = _AllRights()
