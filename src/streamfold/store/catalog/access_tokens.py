"""Issues, looks up, lists and revokes access tokens. Their secrets are not stored.

Every result depends on durable rows only: a change holds the id's lock until its commit is durable.
Tokens are cached after a look-up, so that later requests read nothing. A revoked token leaves the
cache before its revocation is confirmed.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import TypeVar

from streamfold.errors import (
    AccessTokenNotFoundError,
    AlreadyExistsError,
    InvalidError,
    UnauthenticatedError,
)
from streamfold.model.access_tokens import SECRET_PREFIX, AccessToken, Secret
from streamfold.model.grants import NO_RIGHTS, ROOT, Grant
from streamfold.model.resources import Page
from streamfold.store import keys, rows
from streamfold.store.catalog import listing
from streamfold.store.catalog.catalog import NamedLocks
from streamfold.store.engine.engine import Op, readable_pages
from streamfold.store.mount import Mount
from streamfold.store.rows import TokenRow

#: Random bytes in a secret: as many as in its digest, so that neither is weaker.
_SECRET_BYTES = 32
#: Maximum characters of a secret of this store: longer ones are rejected without a read.
_SECRET_MAX = 128
#: Maximum tokens cached after a look-up, about 1 KiB each.
_KNOWN_TOKENS = 10_000
#: Maximum expired tokens that one upkeep pass removes, and number removed per commit.
_REMOVALS, _REMOVALS_AT_ONCE = 1000, 100

Result = TypeVar("Result")


def new_secret() -> Secret:
    return Secret(SECRET_PREFIX + secrets.token_urlsafe(_SECRET_BYTES))


class AccessTokens:
    """The access tokens of one mount."""

    def __init__(self, mount: Mount, now: Callable[[], int]) -> None:
        self._mount = mount
        self._now = now
        self._locks = NamedLocks()
        #: Grants by the digest of the secret, least recently used first.
        self._cached: OrderedDict[bytes, Grant] = OrderedDict()
        #: Number of removals: a look-up that overlaps one must not be cached.
        self._removals = 0
        self._changes: set[asyncio.Task[object]] = set()

    async def authenticate(self, secret: Secret) -> Grant:
        """Return the rights of a caller that presents `secret`.

        Raises UnauthenticatedError if it has none. The time this takes depends only on the digest
        of the presented secret. An attacker cannot choose digests, so timing reveals nothing about
        the stored secrets, and no constant-time comparison is needed.
        """
        if len(secret.text) > _SECRET_MAX or not secret.text.startswith(SECRET_PREFIX):
            raise UnauthenticatedError("this is not an access token of this server")
        digest = secret.digest
        grant = self._cached.get(digest)
        if grant is None:
            grant = await self._look_up(digest)
        else:
            self._cached.move_to_end(digest)
        if grant.expires_at is not None and grant.expires_at <= self._now():
            self._cached.pop(digest, None)
            raise UnauthenticatedError("this access token has expired: ask for another")
        return grant

    async def grant_of(self, token_id: str) -> Grant:
        """Return the current rights of the token, or NO_RIGHTS if it is unknown or expired."""
        row = await self._row(token_id)
        expired = row is None or row.token.expired(self._now())
        return NO_RIGHTS if row is None or expired else Grant.of(row.token)

    async def issue(
        self,
        token: AccessToken,
        issuer: Grant = ROOT,
        *,
        make_secret: Callable[[], Secret] = new_secret,
    ) -> Secret:
        """Issue a token with at most the rights of `issuer`. The secret is returned only here."""
        token = issuer.issue(token)
        if token.expired(self._now()):
            raise InvalidError(f"access token {token.id!r} would be expired from the start")
        return await self._finish(self._issue(token, make_secret()))

    async def revoke(self, token_id: str) -> None:
        """Revoke the token. Once this returns, its secret is rejected."""
        await self._finish(self._revoke(token_id))

    async def page(self, prefix: str, start_after: str, limit: int) -> Page[AccessToken]:
        """List tokens in byte order of their ids.

        An expired token is listed until upkeep removes it.
        """
        return await listing.list_access_tokens(self._mount.engine, prefix, start_after, limit)

    async def remove_expired(self) -> None:
        """Remove expired tokens, a limited number per call."""
        expired = await self._find_expired()
        for first in range(0, len(expired), _REMOVALS_AT_ONCE):
            some = expired[first : first + _REMOVALS_AT_ONCE]
            await asyncio.gather(*(self._remove_if_expired(token_id) for token_id in some))

    async def _look_up(self, digest: bytes) -> Grant:
        removals = self._removals
        value = await self._mount.engine.get(keys.token_digest(digest))
        if value is None:
            raise UnauthenticatedError("this access token does not exist, or was revoked")
        grant = Grant.of(rows.decode(value, TokenRow).token)
        if removals == self._removals:
            self._cached[digest] = grant
            if len(self._cached) > _KNOWN_TOKENS:
                self._cached.popitem(last=False)
        return grant

    async def _issue(self, token: AccessToken, secret: Secret) -> Secret:
        async with self._locks.hold(token.id):
            former = await self._row(token.id)
            if former is not None and not former.token.expired(self._now()):
                raise AlreadyExistsError("access token", token.id)
            row = rows.encode(TokenRow(token, secret.digest))
            ops: list[Op] = [] if former is None else [(keys.token_digest(former.digest), None)]
            ops += [(keys.token_digest(secret.digest), row), (keys.token(token.id), row)]
            await self._mount.committer.write(ops)
            return secret

    async def _revoke(self, token_id: str) -> None:
        async with self._locks.hold(token_id):
            row = await self._row(token_id)
            if row is None:
                raise AccessTokenNotFoundError(token_id)
            await self._remove(row)

    async def _remove_if_expired(self, token_id: str) -> None:
        async with self._locks.hold(token_id):
            row = await self._row(token_id)
            if row is not None and row.token.expired(self._now()):
                await self._remove(row)

    async def _remove(self, row: TokenRow) -> None:
        await self._mount.committer.write(
            [(keys.token_digest(row.digest), None), (keys.token(row.token.id), None)]
        )
        self._removals += 1
        self._cached.pop(row.digest, None)

    async def _find_expired(self) -> list[str]:
        now = self._now()
        expired: list[str] = []
        span = keys.tokens_from("", after=False), keys.TOKENS_END
        async with aclosing(readable_pages(self._mount.engine, *span, first=128)) as pages:
            async for page in pages:
                for key, value in page:
                    if rows.decode(value, TokenRow).token.expired(now):
                        expired.append(keys.token_id(key))
                        if len(expired) == _REMOVALS:
                            return expired
        return expired

    async def _row(self, token_id: str) -> TokenRow | None:
        value = await self._mount.engine.get(keys.token(token_id))
        return rows.decode(value, TokenRow) if value else None

    async def _finish(self, change: Coroutine[object, object, Result]) -> Result:
        """Finish `change` even if its caller is cancelled.

        A token removed from storage must leave the cache too, and one lock must cover both.
        """
        task = asyncio.ensure_future(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)
