"""Access tokens: issued once, known by their hash, worthless when revoked or expired."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest

from streamfold.errors import (
    AccessTokenNotFoundError,
    AlreadyExistsError,
    InvalidError,
    OutcomeUnknownError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from streamfold.model.access_tokens import (
    EVERYTHING,
    AccessToken,
    OperationGroups,
    Permission,
    ResourceSet,
    Right,
    Scope,
    Secret,
)
from streamfold.model.grants import ROOT, Grant
from streamfold.store.store import StreamStore
from streamfold.testing.engine_faults import CommitFault
from tests.store.conftest import EPOCH, Bench, Clock

SCOPE = Scope(
    ResourceSet.exact("test-basin"),
    ResourceSet.prefix("s/"),
    op_groups=OperationGroups(stream=Permission(read=True)),
    ops=frozenset({Right.APPEND}),
)


def token(token_id: str = "token", expires_at: int | None = None) -> AccessToken:
    return AccessToken(token_id, SCOPE, True, expires_at)


async def stored_bytes(bench: Bench) -> bytes:
    scan = bench.engine.scan(b"\x00", b"\xff")
    return b"".join(key + value for page in [page async for page in scan] for key, value in page)


async def listed(store: StreamStore, **query: str | int) -> tuple[list[str], bool]:
    page = await store.account.list_access_tokens(**query)  # type: ignore[arg-type]
    return [item.id for item in page.items], page.has_more


async def test_a_secret_proves_its_token(store: StreamStore) -> None:
    secret = await store.account.issue_access_token(token(expires_at=EPOCH + 1000))
    assert secret.text.startswith("sf_")
    assert len(secret.text) >= 40
    grant = await store.account.authenticate(Secret(secret.text))
    assert grant == Grant.of(token(expires_at=EPOCH + 1000))
    assert grant.full_stream_name("a") == "s/a"


async def test_every_token_has_another_secret(store: StreamStore) -> None:
    secrets = {(await store.account.issue_access_token(token(f"t{n}"))).text for n in range(10)}
    assert len(secrets) == 10


@pytest.mark.parametrize(
    "text", ["", "sf_", "sf_unknown", "unknown", "sf_" + "x" * 10_000, "sf_\ud800é"]
)
async def test_what_was_never_issued_proves_nothing(store: StreamStore, text: str) -> None:
    await store.account.issue_access_token(token())
    with pytest.raises(UnauthenticatedError) as caught:
        await store.account.authenticate(Secret(text))
    assert len(text) < 4 or text not in caught.value.message


async def test_the_secret_is_in_no_row_message_or_log(
    store: StreamStore, bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = await store.account.issue_access_token(token())
    await store.account.authenticate(secret)
    await store.account.revoke_access_token("token")
    with pytest.raises(UnauthenticatedError) as caught:
        await store.account.authenticate(secret)
    hidden = secret.text.removeprefix("sf_")
    assert hidden.encode() not in await stored_bytes(bench)
    assert hidden not in caplog.text
    assert hidden not in repr((secret, caught.value, vars(caught.value)))


async def test_the_caller_chooses_how_the_secret_is_made(store: StreamStore) -> None:
    secret = Secret("sf_given")
    assert await store.account.issue_access_token(token(), make_secret=lambda: secret) is secret
    assert await store.account.authenticate(Secret("sf_given"))


async def test_an_id_is_taken_until_it_is_revoked(store: StreamStore) -> None:
    first = await store.account.issue_access_token(token())
    with pytest.raises(AlreadyExistsError, match="token"):
        await store.account.issue_access_token(token())
    await store.account.authenticate(first)
    await store.account.revoke_access_token("token")
    second = await store.account.issue_access_token(token())
    await store.account.authenticate(second)
    with pytest.raises(UnauthenticatedError):
        await store.account.authenticate(first)


async def test_of_many_that_ask_for_one_id_one_gets_it(store: StreamStore) -> None:
    asked = [store.account.issue_access_token(token()) for _ in range(10)]
    results = await asyncio.gather(*asked, return_exceptions=True)
    [secret] = [result for result in results if isinstance(result, Secret)]
    assert sum(isinstance(result, AlreadyExistsError) for result in results) == 9
    await store.account.authenticate(secret)


async def test_revoking_what_is_not_there_is_an_error(store: StreamStore) -> None:
    with pytest.raises(AccessTokenNotFoundError):
        await store.account.revoke_access_token("token")
    with pytest.raises(InvalidError):
        await store.account.revoke_access_token("")


async def test_a_caller_cannot_issue_what_it_may_not_do(store: StreamStore) -> None:
    caller = replace(ROOT, operations=ROOT.operations - {Right.APPEND})
    with pytest.raises(PermissionDeniedError):
        await store.account.issue_access_token(token(), caller)
    assert await listed(store) == ([], False)


async def test_a_token_made_by_a_token_expires_with_it(store: StreamStore) -> None:
    maker = AccessToken(
        "maker",
        Scope(EVERYTHING, EVERYTHING, EVERYTHING, ops=frozenset(Right)),
        expires_at=EPOCH + 5000,
    )
    secret = await store.account.issue_access_token(maker)
    grant = await store.account.authenticate(secret)
    await store.account.issue_access_token(token(), grant)
    page = await store.account.list_access_tokens(prefix="token")
    assert [item.expires_at for item in page.items] == [EPOCH + 5000]


async def test_tokens_are_listed_in_byte_order_page_by_page(store: StreamStore) -> None:
    names = ["b", "a", "é", "a/2", "a/1", "Z"]
    for name in names:
        await store.account.issue_access_token(token(name))
    assert await listed(store) == (["Z", "a", "a/1", "a/2", "b", "é"], False)
    assert await listed(store, limit=2) == (["Z", "a"], True)
    assert await listed(store, limit=4, start_after="a") == (["a/1", "a/2", "b", "é"], False)
    assert await listed(store, prefix="a/") == (["a/1", "a/2"], False)
    assert await listed(store, prefix="a/", limit=1) == (["a/1"], True)
    assert await listed(store, prefix="a/", start_after="a/1") == (["a/2"], False)
    assert await listed(store, prefix="a/", start_after="Z") == (["a/1", "a/2"], False)
    assert await listed(store, prefix="c") == ([], False)


async def test_a_listing_has_what_was_asked_for(store: StreamStore) -> None:
    await store.account.issue_access_token(token(expires_at=EPOCH + 1))
    page = await store.account.list_access_tokens()
    assert page.items == (token(expires_at=EPOCH + 1),)


async def test_tokens_survive_a_restart(bench: Bench) -> None:
    async with bench.store() as store:
        kept = await store.account.issue_access_token(token("kept"))
        revoked = await store.account.issue_access_token(token("revoked"))
        await store.account.revoke_access_token("revoked")
    async with bench.store() as store:
        assert await store.account.authenticate(kept) == Grant.of(token("kept"))
        assert await listed(store) == (["kept"], False)
        with pytest.raises(UnauthenticatedError):
            await store.account.authenticate(revoked)


async def test_an_expired_token_proves_nothing_known_or_not(bench: Bench, clock: Clock) -> None:
    async with bench.store() as store:
        known = await store.account.issue_access_token(token("known", EPOCH + 1000))
        unknown = await store.account.issue_access_token(token("unknown", EPOCH + 1000))
        await store.account.authenticate(known)
        bench.engine.hold()  # or the first pass of upkeep may remove them, if it comes late
        clock.pass_seconds(1)
        for secret in (known, unknown):
            with pytest.raises(UnauthenticatedError, match="expired"):
                await store.account.authenticate(secret)
        bench.engine.resume()


async def test_a_token_that_would_be_expired_from_the_start_is_refused(store: StreamStore) -> None:
    with pytest.raises(InvalidError, match="expired"):
        await store.account.issue_access_token(token(expires_at=EPOCH))


async def test_the_id_of_an_expired_token_is_free(store: StreamStore, clock: Clock) -> None:
    old = await store.account.issue_access_token(token(expires_at=EPOCH + 1000))
    clock.pass_seconds(1)
    new = await store.account.issue_access_token(token())
    await store.account.authenticate(new)
    with pytest.raises(UnauthenticatedError, match="does not exist"):
        await store.account.authenticate(old)


async def test_upkeep_removes_expired_tokens_whole(
    store: StreamStore, bench: Bench, clock: Clock
) -> None:
    before = await stored_bytes(bench)
    for n in range(3):
        await store.account.issue_access_token(token(f"short-{n}", EPOCH + 1000))
    secret = await store.account.issue_access_token(token("long", EPOCH + 10_000))
    clock.pass_seconds(1)
    await store.upkeep()
    assert await listed(store) == (["long"], False)
    await store.account.authenticate(secret)
    await store.account.revoke_access_token("long")
    assert b"short-" not in await stored_bytes(bench)
    assert b"short-" not in before


@pytest.mark.parametrize(
    ("fault", "exists"), [(CommitFault.BEFORE, False), (CommitFault.AFTER, True)]
)
async def test_a_failed_issue_is_unknown_and_the_token_is_whole_or_not_there(
    store: StreamStore, bench: Bench, fault: CommitFault, exists: bool
) -> None:
    bench.engine.fail_next(fault)
    with pytest.raises(OutcomeUnknownError) as caught:
        await store.account.issue_access_token(token(), make_secret=lambda: Secret("sf_lost"))
    assert "lost" not in caught.value.message
    assert await listed(store) == (["token"] if exists else [], False)
    if exists:
        await store.account.authenticate(Secret("sf_lost"))
        await store.account.revoke_access_token("token")
    with pytest.raises(UnauthenticatedError):
        await store.account.authenticate(Secret("sf_lost"))
