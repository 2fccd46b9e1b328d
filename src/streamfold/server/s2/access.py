"""Who asks, and what they may do: every request of the S2 face comes by here."""

from __future__ import annotations

import hmac
from typing import Final

from streamfold.errors import UnauthenticatedError
from streamfold.model.access import Operation, Secret
from streamfold.model.grants import ROOT, Grant
from streamfold.records.batch import Fence, RecordBatch
from streamfold.server.http import Request
from streamfold.store.account import Account

_SCHEME: Final = "bearer "


class Access:
    """Tells a caller's rights by its access token; without a root token everybody has all."""

    def __init__(self, account: Account, root: Secret | None) -> None:
        self._account = account
        self._root = root

    async def grant(self, request: Request) -> Grant:
        """The rights of the caller; UnauthenticatedError if it cannot prove that it has any."""
        if self._root is None:
            return ROOT
        header = request.header("authorization") or ""
        if header[: len(_SCHEME)].lower() != _SCHEME:
            raise UnauthenticatedError(
                "no access token was shown: send the header 'authorization: Bearer <token>'"
            )
        secret = Secret(header[len(_SCHEME) :].strip())
        if hmac.compare_digest(secret.digest, self._root.digest):
            return ROOT
        return await self._account.authenticate(secret)

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
        if stream is not None:
            stream = grant.full_stream_name(stream)
        grant.require(operation, basin, stream, token_id)
        return grant


def require_append(grant: Grant, basin: str, stream: str, batch: RecordBatch) -> None:
    """Raise unless the caller may append this: records, and each kind of command among them."""
    if grant is ROOT:
        return
    if len(batch.commands) < batch.count:
        grant.require(Operation.APPEND, basin, stream)
    for command in batch.commands:
        needed = Operation.FENCE if isinstance(command, Fence) else Operation.TRIM
        grant.require(needed, basin, stream)


def require_append_session(grant: Grant, basin: str, stream: str) -> None:
    """Raise unless the caller may append something; what exactly is looked at batch by batch."""
    if not any(
        grant.allows(operation, basin, stream)
        for operation in (Operation.APPEND, Operation.FENCE, Operation.TRIM)
    ):
        grant.require(Operation.APPEND, basin, stream)
