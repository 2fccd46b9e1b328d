"""Tokens that were looked up are remembered, and never longer than they are good."""

from __future__ import annotations

import asyncio

import pytest

from streamfold.errors import AccessTokenNotFoundError, StreamfoldError, UnauthenticatedError
from streamfold.model.access_tokens import EVERYTHING, AccessToken, Right, Scope, Secret
from streamfold.store import keys
from streamfold.store.catalog import access_tokens
from streamfold.store.engine.engine import Engine
from streamfold.store.store import StreamStore
from streamfold.testing.engine_faults import CommitFault, FaultyEngine
from tests.store.conftest import Bench, until


def token(token_id: str = "token") -> AccessToken:
    return AccessToken(token_id, Scope(EVERYTHING, EVERYTHING, ops=frozenset({Right.READ})))


class WatchedEngine(FaultyEngine):
    """Notes which secrets are looked up, and can hold back the answer."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self.read: list[bytes] = []
        self.found = asyncio.Event()
        self.answer = asyncio.Event()
        self.answer.set()

    async def get(self, key: bytes) -> bytes | None:
        value = await super().get(key)
        if not key.startswith(keys.token_digest(b"")):
            return value
        self.read.append(key)
        self.found.set()
        await self.answer.wait()
        return value


def watch(bench: Bench) -> WatchedEngine:
    """Watch what is read from storage from now on."""
    watched = bench.engine.inner = WatchedEngine(bench.engine.inner)
    return watched


async def test_a_request_with_a_known_token_reads_nothing(store: StreamStore, bench: Bench) -> None:
    secret = await store.account.issue_access_token(token())
    watched = watch(bench)
    for _ in range(5):
        await store.account.authenticate(Secret(secret.text))
    assert len(watched.read) == 1


async def test_only_so_many_tokens_are_remembered(
    store: StreamStore, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_tokens, "_KNOWN_TOKENS", 2)
    secrets = [await store.account.issue_access_token(token(f"t{n}")) for n in range(3)]
    for secret in (secrets[0], secrets[1], secrets[0], secrets[2]):
        await store.account.authenticate(secret)
    watched = watch(bench)
    await store.account.authenticate(secrets[0])  # used more recently than the second
    await store.account.authenticate(secrets[2])
    assert watched.read == []
    await store.account.authenticate(secrets[1])
    assert len(watched.read) == 1


async def test_a_revoked_token_is_worthless_although_it_was_known(store: StreamStore) -> None:
    secret = await store.account.issue_access_token(token())
    await store.account.authenticate(secret)
    await store.account.revoke_access_token("token")
    with pytest.raises(UnauthenticatedError):
        await store.account.authenticate(secret)


async def test_a_look_up_that_a_revocation_overtakes_is_not_remembered(
    store: StreamStore, bench: Bench
) -> None:
    secret = await store.account.issue_access_token(token())
    watched = watch(bench)
    watched.answer.clear()
    looking = asyncio.create_task(store.account.authenticate(secret))
    await watched.found.wait()
    bench.engine.inner = watched.inner  # the revocation's own look-up is not held back
    await store.account.revoke_access_token("token")
    watched.answer.set()
    await looking  # asked before the revocation, so that either answer is right
    with pytest.raises(UnauthenticatedError):
        await store.account.authenticate(secret)


async def test_a_revocation_goes_through_although_its_caller_went_away(
    store: StreamStore, bench: Bench
) -> None:
    secret = await store.account.issue_access_token(token())
    bench.engine.hold()
    revoking = asyncio.create_task(store.account.revoke_access_token("token"))
    await until(bench.engine._order.locked)
    await store.account.authenticate(secret)  # remembered while its rows are going
    revoking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await revoking
    bench.engine.resume()
    with pytest.raises(AccessTokenNotFoundError):
        await store.account.revoke_access_token("token")
    with pytest.raises(UnauthenticatedError):
        await store.account.authenticate(secret)


async def test_a_failed_revocation_forgets_what_was_known(store: StreamStore, bench: Bench) -> None:
    secret = await store.account.issue_access_token(token())
    await store.account.authenticate(secret)
    bench.engine.fail_next(CommitFault.AFTER)
    with pytest.raises(StreamfoldError):
        await store.account.revoke_access_token("token")
    with pytest.raises(UnauthenticatedError):
        await store.account.authenticate(secret)
