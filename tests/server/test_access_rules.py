"""Every route declares the right that it needs, and its handler asks for exactly that right."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from streamfold.model.access_tokens import AccessToken, ResourceSet, Right, Scope, Secret
from streamfold.server.console import ConsoleSettings
from streamfold.server.http.router import PUBLIC, OtherRule, Route
from streamfold.server.main import Server, running_server
from tests.server.conftest import BASIN, configuration
from tests.server.raw_h2 import h2_client

ROOT = "the-root-token-of-this-test"
UNAUTHENTICATED, DENIED = 401, 403
ALL = ResourceSet.prefix("")
#: A PUT reconfigures what exists already, and creates the bucket of a stream if that is missing.
BESIDES = {
    Right.CREATE_BASIN: {Right.RECONFIGURE_BASIN},
    Right.CREATE_STREAM: {Right.RECONFIGURE_STREAM, Right.CREATE_BASIN},
}


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Server]:
    console = ConsoleSettings(tables=(str(tmp_path),))
    async with running_server(configuration(root_token=Secret(ROOT), console=console)) as server:
        await server.store.create_basin(BASIN)
        await server.store.create_stream(BASIN, BASIN)
        yield server


async def statuses(server: Server, tokens: dict[Right, str] | None) -> dict[Route, int]:
    """What each route answers to a caller with its token; deletions come last."""
    found = {}
    async with h2_client(server.port) as client:
        for route in sorted(server.routes, key=lambda route: route.method == "DELETE"):
            headers = [("s2-basin", BASIN), ("content-type", "application/json")]
            if tokens is not None and isinstance(route.needs, Right):
                headers.append(("authorization", f"Bearer {tokens[route.needs]}"))
            path = route.path.replace("{}", BASIN).replace("{...}", BASIN)
            answer = await client.exchange(route.method, path, tuple(headers), b"")
            challenge = "Bearer" if answer.status == UNAUTHENTICATED else None
            assert answer.headers.get("www-authenticate") == challenge
            found[route] = answer.status
    return found


async def issue(server: Server, name: str, *operations: Right) -> str:
    scope = Scope(basins=ALL, streams=ALL, access_tokens=ALL, ops=frozenset(operations))
    return (await server.store.account.issue_access_token(AccessToken(name, scope))).text


async def test_only_public_routes_answer_a_stranger(guarded: Server) -> None:
    answered = await statuses(guarded, None)
    assert {route for route, status in answered.items() if status != UNAUTHENTICATED} == {
        route for route in guarded.routes if route.needs is PUBLIC
    }


async def test_only_operators_routes_the_files_of_the_console_and_the_keys_of_webhooks_are_public(
    guarded: Server,
) -> None:
    public = {route.path for route in guarded.routes if route.needs is PUBLIC}
    console = {"/console", "/console/{...}"}
    assert public == {"/", "/health", "/ping", "/ready", "/v1/stream/__ds/jwks.json"} | console


async def test_a_caller_with_another_right_is_denied(guarded: Server) -> None:
    basins = await issue(guarded, "basins", Right.LIST_BASINS)
    streams = await issue(guarded, "streams", Right.LIST_STREAMS)
    tokens = dict.fromkeys(Right, basins) | {Right.LIST_BASINS: streams}
    answered = await statuses(guarded, tokens)
    assert {route for route, status in answered.items() if status != DENIED} == {
        route for route in guarded.routes if isinstance(route.needs, OtherRule)
    }


async def test_the_declared_right_is_enough(guarded: Server) -> None:
    tokens = {
        needed: await issue(guarded, needed, needed, *BESIDES.get(needed, ())) for needed in Right
    }
    answered = await statuses(guarded, tokens)
    refused = {r for r, s in answered.items() if s in (UNAUTHENTICATED, DENIED)}
    assert not [route for route in refused if isinstance(route.needs, Right)]


async def test_a_caller_without_the_right_cannot_tell_what_exists(guarded: Server) -> None:
    basins = await issue(guarded, "basins", Right.LIST_BASINS)
    streams = await issue(guarded, "streams", Right.LIST_STREAMS)
    tokens = dict.fromkeys(Right, basins) | {Right.LIST_BASINS: streams}
    async with h2_client(guarded.port) as client:
        for route in guarded.routes:
            if not isinstance(route.needs, Right):
                continue
            answers = set()
            for name in (BASIN, "miss-basin"):
                headers = (
                    ("s2-basin", name),
                    ("content-type", "application/json"),
                    ("authorization", f"Bearer {tokens[route.needs]}"),
                )
                path = route.path.replace("{}", name).replace("{...}", name)
                answer = await client.exchange(route.method, path, headers, b"")
                answers.add((answer.status, bytes(answer.body).replace(name.encode(), b"...")))
            assert len(answers) == 1, (route, answers)
