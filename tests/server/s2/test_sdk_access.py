"""Access tokens through the official client, on a server that asks for them."""

from __future__ import annotations

import json
from collections.abc import Awaitable
from datetime import UTC, datetime, timedelta

import pytest
from s2_sdk import (
    S2,
    AccessTokenScope,
    AppendInput,
    CommandRecord,
    ExactMatch,
    Operation,
    OperationGroupPermissions,
    Permission,
    PrefixMatch,
    Record,
    S2ServerError,
    SeqNum,
)

from streamfold.model.access_tokens import Secret
from streamfold.server.main import Server, running_server
from tests.sdk import sdk_client
from tests.server.conftest import BASIN, ROOT, STREAM, configuration
from tests.server.curl import curl
from tests.server.raw_h2 import h2_client

EVERYWHERE = PrefixMatch("")
READER = AccessTokenScope(
    basins=EVERYWHERE,
    streams=EVERYWHERE,
    op_groups=OperationGroupPermissions(basin=Permission.READ, stream=Permission.READ),
)


def client(server: Server, token: str) -> S2:
    endpoint = f"http://127.0.0.1:{server.port}"
    return sdk_client(endpoint, token)


async def refusal(call: Awaitable[object]) -> tuple[int, str]:
    with pytest.raises(S2ServerError) as refused:
        await call
    return refused.value.status_code, refused.value.code


async def test_without_a_good_token_nothing_is_possible(guarded: Server) -> None:
    async with client(guarded, "not-a-token") as s2:
        assert await refusal(s2.list_basins()) == (401, "authn")
        stream = s2.basin(BASIN).stream(STREAM)
        assert await refusal(stream.check_tail()) == (401, "authn")
        assert await refusal(stream.append(AppendInput([Record(b"x")]))) == (401, "authn")


async def test_a_token_allows_what_it_was_issued_for_and_no_more(guarded: Server) -> None:
    async with client(guarded, ROOT) as root:
        secret = await root.issue_access_token("reader", scope=READER)
        await root.basin(BASIN).stream(STREAM).append(AppendInput([Record(b"x")]))
    async with client(guarded, secret) as reader:
        stream = reader.basin(BASIN).stream(STREAM)
        batch = await stream.read(start=SeqNum(0))
        assert [record.body for record in batch.records] == [b"x"]
        denied = (403, "permission_denied")
        assert await refusal(stream.append(AppendInput([Record(b"y")]))) == denied
        assert await refusal(reader.create_basin("other-basin")) == denied
        assert await refusal(reader.issue_access_token("another", scope=READER)) == denied


async def test_commands_need_their_own_permission(guarded: Server) -> None:
    scope = AccessTokenScope(
        basins=ExactMatch(BASIN), streams=ExactMatch(STREAM), ops=[Operation.APPEND]
    )
    async with client(guarded, ROOT) as root:
        secret = await root.issue_access_token("appender", scope=scope)
    async with client(guarded, secret) as appender:
        stream = appender.basin(BASIN).stream(STREAM)
        await stream.append(AppendInput([Record(b"x")]))
        denied = (403, "permission_denied")
        trim = AppendInput([Record(b"y"), CommandRecord.trim(1)])
        assert await refusal(stream.append(trim)) == denied
        other = appender.basin(BASIN).stream("other")
        assert await refusal(other.append(AppendInput([Record(b"x")]))) == denied


async def test_a_revoked_token_is_worth_nothing_and_an_expired_one_is_not_issued(
    guarded: Server,
) -> None:
    async with client(guarded, ROOT) as root:
        secret = await root.issue_access_token("brief", scope=READER)
        async with client(guarded, secret) as brief:
            await brief.basin(BASIN).stream(STREAM).check_tail()
            await root.revoke_access_token("brief")
            tail = brief.basin(BASIN).stream(STREAM).check_tail()
            assert await refusal(tail) == (401, "authn")
        assert await refusal(root.revoke_access_token("brief")) == (
            404,
            "access_token_not_found",
        )
        past = datetime.now(UTC) - timedelta(seconds=5)
        late = root.issue_access_token("late", scope=READER, expires_at=past)
        assert await refusal(late) == (422, "invalid")


@pytest.mark.parametrize(
    "given",
    ["2099-01-02T03:04:05.123456789Z", "2099-01-02T05:04:05.5+02:00", "2099-01-02T03:04:05Z"],
)
async def test_the_expiry_of_a_token_is_listed_as_it_was_given(guarded: Server, given: str) -> None:
    where = f"http://127.0.0.1:{guarded.port}/v1/access-tokens"
    root = ("-H", f"authorization: Bearer {ROOT}", "-H", "content-type: application/json")
    scope = {"basins": {"prefix": ""}, "ops": ["list-basins"]}
    body = json.dumps({"id": "exact", "scope": scope, "expires_at": given})
    assert (await curl(where, *root, "-d", body)).status == 201
    (listed,) = (await curl(where, *root)).json()["access_tokens"]
    assert listed["expires_at"] == given


async def test_tokens_are_listed_without_their_secrets(guarded: Server) -> None:
    async with client(guarded, ROOT) as root:
        for name in ("b", "a", "c"):
            await root.issue_access_token(name, scope=READER)
        page = await root.list_access_tokens(limit=2)
        assert ([token.id for token in page.items], page.has_more) == (["a", "b"], True)
        assert page.items[0].scope.basins == EVERYWHERE
        assert await refusal(root.issue_access_token("a", scope=READER)) == (
            409,
            "resource_already_exists",
        )


async def test_an_auto_prefixed_caller_lives_in_streams_of_its_own(guarded: Server) -> None:
    scope = AccessTokenScope(
        basins=EVERYWHERE,
        streams=PrefixMatch("tenant-1/"),
        op_groups=OperationGroupPermissions(
            basin=Permission.READ_WRITE, stream=Permission.READ_WRITE
        ),
    )
    async with client(guarded, ROOT) as root:
        secret = await root.issue_access_token("tenant", scope=scope, auto_prefix_streams=True)
        async with client(guarded, secret) as tenant:
            info = await tenant.basin(BASIN).create_stream("mine")
            assert info.name == "mine"
            await tenant.basin(BASIN).stream("mine").append(AppendInput([Record(b"x")]))
            listed = await tenant.basin(BASIN).list_streams()
            assert [stream.name for stream in listed.items] == ["mine"]
        full = await root.basin(BASIN).list_streams(prefix="tenant-1/")
        assert [stream.name for stream in full.items] == ["tenant-1/mine"]


async def test_health_needs_no_token(guarded: Server) -> None:
    async with h2_client(guarded.port) as h2:
        for path in ("/health", "/ping", "/ready"):
            assert (await h2.exchange("GET", path)).status == 200


async def test_metrics_are_for_root_and_for_tokens_that_may_see_the_accounts(
    guarded: Server,
) -> None:
    async with client(guarded, ROOT) as root, h2_client(guarded.port) as h2:
        watcher = AccessTokenScope(ops=[Operation.ACCOUNT_METRICS])
        reader = AccessTokenScope(
            basins=PrefixMatch(""), streams=PrefixMatch(""), ops=[Operation.READ]
        )
        good = await root.issue_access_token("watcher", scope=watcher)
        poor = await root.issue_access_token("reader", scope=reader)
        for token, status in ((None, 401), ("x", 401), (poor, 403), (good, 200), (ROOT, 200)):
            headers = [("authorization", f"Bearer {token}")] if token else []
            assert (await h2.exchange("GET", "/metrics", headers)).status == status


async def test_active_basins_are_those_that_the_token_covers(guarded: Server) -> None:
    await guarded.store.create_basin("others-basin")
    await guarded.store.create_stream("others-basin", STREAM)
    now = int(datetime.now(UTC).timestamp())
    path = f"/v1/metrics?set=active-basins&start={now - 60}&end={now + 30}"
    cases: list[tuple[ExactMatch | PrefixMatch | None, list[str]]] = [
        (ExactMatch(BASIN), [BASIN]),
        (PrefixMatch("others-"), ["others-basin"]),
        (EVERYWHERE, sorted((BASIN, "others-basin"))),
        (None, []),
    ]
    async with client(guarded, ROOT) as root, h2_client(guarded.port) as h2:
        for index, (basins, names) in enumerate(cases):
            scope = AccessTokenScope(basins=basins, ops=[Operation.ACCOUNT_METRICS])
            token = await root.issue_access_token(f"watcher-{index}", scope=scope)
            answer = await h2.exchange("GET", path, [("authorization", f"Bearer {token}")])
            [metric] = json.loads(answer.body)["values"]
            assert metric["label"]["values"] == names


async def test_metrics_can_be_opened_to_all_callers() -> None:
    settings = configuration(root_token=Secret(ROOT), open_metrics=True)
    async with running_server(settings) as server, h2_client(server.port) as h2:
        assert (await h2.exchange("GET", "/metrics")).status == 200
        assert (await h2.exchange("GET", "/v1/metrics")).status == 401
