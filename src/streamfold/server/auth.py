"""Authenticates callers of all faces and checks their rights."""

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
from streamfold.model.access_tokens import Right, Secret
from streamfold.model.grants import ROOT, Grant
from streamfold.model.names import StreamRef
from streamfold.records.batch import Fence, RecordBatch
from streamfold.server.http.request import Request
from streamfold.store.catalog.account import Account

logger = logging.getLogger(__name__)

_SCHEME: Final = "bearer "
#: The rights that records and commands of an append need.
_APPENDING: Final = frozenset((Right.APPEND, Right.FENCE, Right.TRIM))

#: Seconds between checks of whether an idle session's token is still valid.
_LOOK_INTERVAL: Final = 1.0

Result = TypeVar("Result")


class Access:
    """Looks up callers' rights by access token. Without a root token every caller has all rights."""

    def __init__(self, account: Account, root: Secret | None) -> None:
        self._account = account
        self._root = root
        #: Whether every caller has all rights.
        self.open = root is None
        #: Tasks that wait for a token to become invalid, by header value.
        self._lapses: dict[str, _Lapse] = {}

    async def grant(self, request: Request) -> Grant:
        """Return the caller's rights. Raises UnauthenticatedError if it has no valid token."""
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
        """Return a token's current rights by its id. None stands for root."""
        return ROOT if token_id is None else await self._account.grant_of(token_id)

    async def allow(
        self,
        request: Request,
        operation: Right,
        basin: str | None = None,
        stream: str | None = None,
        token_id: str | None = None,
    ) -> Grant:
        """Raise unless the caller may do this. Returns all its rights."""
        grant = await self.grant(request)
        if grant is ROOT:
            return grant
        if stream is not None:
            stream = grant.full_stream_name(stream)
        grant.require(operation, basin, stream, token_id)
        return grant

    async def allow_some(
        self, request: Request, operation: Right, basin: str | None = None
    ) -> Grant:
        """Raise unless the caller may do this to some resource. Call before reading a body."""
        grant = await self.grant(request)
        if not grant.allows_somewhere(operation, basin):
            grant.require(operation, basin)
        return grant

    @asynccontextmanager
    async def active_grant(self, request: Request, grant: Grant) -> AsyncIterator[ActiveGrant]:
        """Watch a session's token while the context lasts."""
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
        """Wait until a token becomes invalid, and return the reason."""
        while True:
            try:
                await self._grant_of(header)
            except UnauthenticatedError as error:
                return error
            except StreamfoldError as error:
                # The session itself notices a failing store.
                logger.debug("an access token cannot be looked up: %s", error)
            await asyncio.sleep(_LOOK_INTERVAL)


class ActiveGrant:
    """A session's rights, rechecked because tokens expire and are revoked."""

    def __init__(
        self,
        lapse: asyncio.Task[UnauthenticatedError] | None,
        look_up: Callable[[], Awaitable[Grant]] | None,
    ) -> None:
        self._lapse = lapse
        self._look_up = look_up

    @property
    def certain(self) -> bool:
        """Whether the rights cannot be lost because no issued token grants them."""
        return self._lapse is None

    async def require(self) -> None:
        """Raise UnauthenticatedError if the token has become invalid."""
        if self._look_up is not None:
            await self._look_up()

    async def lost(self) -> UnauthenticatedError:
        """Wait until the token becomes invalid. Return the reason."""
        if self._lapse is None:
            await asyncio.Event().wait()
            raise AssertionError("this event is never set")
        return await asyncio.shield(self._lapse)

    async def during(self, work: Coroutine[object, object, Result]) -> Result:
        """Return the result of `work`. Raises UnauthenticatedError if the token lapses first."""
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
    """The shared watch of all sessions with one token."""

    task: asyncio.Task[UnauthenticatedError]
    sessions: int = 0


class AppendRights:
    """A caller's append rights to one stream, looked up once per request."""

    __slots__ = ("_allowed", "_grant", "_ref")

    def __init__(self, grant: Grant, ref: StreamRef) -> None:
        """Raise if the caller may append nothing at all. Call before reading a body."""
        self._grant = grant
        self._ref = ref
        self._allowed = frozenset(op for op in _APPENDING if grant.allows(op, *ref))
        if not self._allowed:
            grant.require(Right.APPEND, *ref)

    @classmethod
    def of(cls, grant: Grant, ref: StreamRef) -> AppendRights:
        """Return the rights of `grant`. All callers with all rights share one object."""
        return _ALL_RIGHTS if grant is ROOT else cls(grant, ref)

    def check(self, batch: RecordBatch) -> None:
        """Raise unless the caller may append the batch's records and each kind of its commands."""
        if len(batch.commands) < batch.count:
            self._require(Right.APPEND)
        for command in batch.commands:
            self._require(Right.FENCE if isinstance(command, Fence) else Right.TRIM)

    def _require(self, operation: Right) -> None:
        if operation not in self._allowed:
            self._grant.require(operation, *self._ref)


class _AllRights(AppendRights):
    """The append rights of a caller with all rights."""

    __slots__ = ()

    def __init__(self) -> None:
        """Skip the lookup, because everything is allowed."""

    def check(self, batch: RecordBatch) -> None:
        """Allow everything."""


_ALL_RIGHTS: Final = _AllRights()
