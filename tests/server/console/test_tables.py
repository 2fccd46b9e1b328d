"""Tables in the console: found below configured locations, drawn as a chain, read at any position."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from playwright.sync_api import Page, expect

from streamfold.archive.destinations.destination import Destination
from streamfold.model.access_tokens import AccessToken, Operation, ResourceSet, Scope, Secret
from streamfold.server.console import ConsoleSettings
from streamfold.server.main import Server, running_server
from tests.archive.tables import changes, open_writer, rows
from tests.server.conftest import configuration
from tests.server.console.conftest import ConsoleServer
from tests.server.raw_h2 import Answer, h2_client

HOSTILE = "<img src=x onerror=alert(1)>"
ROOT = "the-root-token-of-this-test"


async def publish(folder: Path) -> str:
    """A table with two epochs; its URI."""
    uri = f"{folder.as_uri()}/users"
    writer = await open_writer(Destination.open(uri))
    await writer.write_base(rows({1: "one", 2: HOSTILE}), "10", reason="first")
    await writer.write_diff(changes(("DELETE", 1, None)), "10", "20")
    closing = changes(("INSERT", 3, "three"))
    await writer.rebase(rows({2: HOSTILE, 3: "three"}), closing, "30", reason="max_interval")
    return f"{uri}/"


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[tuple[Server, str]]:
    uri = await publish(tmp_path)
    console = ConsoleSettings(tables=(str(tmp_path), str(tmp_path / "not-there-yet")))
    async with running_server(configuration(console=console, root_token=Secret(ROOT))) as server:
        yield server, uri


async def get(server: Server, path: str, token: str = ROOT) -> Answer:
    async with h2_client(server.port) as client:
        return await client.exchange("GET", path, (("authorization", f"Bearer {token}"),))


async def test_tables_are_listed_with_head_and_size(guarded: tuple[Server, str]) -> None:
    server, uri = guarded
    (table,) = json.loads((await get(server, "/console/tables")).body)["tables"]
    assert (table["uri"], table["table"]) == (uri, "public.users")
    assert (table["head_position"], table["epoch"], table["artifacts"]) == ("30", 2, 4)
    assert table["size_bytes"] > 0


async def test_the_chain_has_positions_reasons_and_ranks(guarded: tuple[Server, str]) -> None:
    server, uri = guarded
    answer = await get(server, f"/console/tables/{quote(uri, safe='')}")
    chain = json.loads(answer.body)["chain"]
    assert [(one["kind"], one["epoch"], one["to_position"], one["to_rank"]) for one in chain] == [
        ("base", 1, "10", 10), ("diff", 1, "20", 20), ("diff", 1, "30", 30), ("base", 2, "30", 30),
    ]  # fmt: skip
    assert chain[3]["reason"] == "max_interval"


@pytest.mark.parametrize(
    ("position", "names"), [("10", {"one", HOSTILE}), ("20", {HOSTILE}), ("30", {HOSTILE, "three"})]
)
async def test_rows_are_those_of_the_position(
    guarded: tuple[Server, str], position: str, names: set[str]
) -> None:
    server, uri = guarded
    path = f"/console/tables/{quote(uri, safe='')}/rows?position={position}"
    shown = json.loads((await get(server, path)).body)
    assert (shown["columns"], shown["position"], shown["more"]) == (["id", "name"], position, False)
    assert {name for _, name in shown["rows"]} == names


async def test_only_tables_that_were_found_are_read(guarded: tuple[Server, str]) -> None:
    server, _ = guarded
    for uri in ("file:///etc/", "", "s3://elsewhere/users/"):
        answer = await get(server, f"/console/tables/{quote(uri, safe='')}")
        assert answer.status == 404


async def test_a_caller_needs_the_right_to_read_all_streams(guarded: tuple[Server, str]) -> None:
    server, uri = guarded
    everything, some = ResourceSet.prefix(""), ResourceSet.prefix("tenant/")
    reading = frozenset((Operation.READ,))
    for name, streams, prefixed, status in (
        ("all", everything, False, 200), ("some", some, False, 403), ("tenant", some, True, 403),
    ):  # fmt: skip
        scope = Scope(basins=everything, streams=streams, ops=reading)
        token = await server.store.account.issue_access_token(AccessToken(name, scope, prefixed))
        for path in ("", f"/{quote(uri, safe='')}", f"/{quote(uri, safe='')}/rows"):
            assert (await get(server, f"/console/tables{path}", token.text)).status == status
    assert (await get(server, "/console/tables", "nonsense")).status == 401


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleServer]:
    folder = tmp_path_factory.mktemp("tables")
    asyncio.run(publish(folder))
    with ConsoleServer(tmp_path_factory.mktemp("data"), ["--tables", str(folder)]) as running:
        yield running


def test_a_table_is_shown_as_a_chain_and_at_an_older_position(
    tables: ConsoleServer, page: Page
) -> None:
    page.goto(tables.page("tables"))
    page.get_by_role("link", name="public.users").click()
    expect(page.get_by_role("img", name="2 epochs of bases and diffs, 10 to 30")).to_be_visible()
    expect(page.get_by_role("cell", name="three", exact=True)).to_be_visible()
    page.get_by_role("slider").press("Home")
    expect(page.get_by_role("heading", name="Rows at 10")).to_be_visible()
    expect(page.get_by_role("cell", name="one", exact=True)).to_be_visible()
    expect(page.get_by_role("cell", name=HOSTILE)).to_be_visible()
    assert page.locator("main img").count() == 0
