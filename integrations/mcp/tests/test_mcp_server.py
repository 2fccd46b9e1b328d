"""MCP assistants on a real server, through the MCP SDK's own client."""

from __future__ import annotations

import os
import subprocess
import sys
from base64 import b64decode
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters
from mcp_types import TextContent
from s2_sdk import S2, AccessTokenScope, ExactMatch, Operation, PrefixMatch
from tests.archive.reading import HISTORY, write_history
from tests.ports import free_port
from tests.sdk import sdk_client
from tests.server.conftest import ROOT, configuration

from streamfold import Record
from streamfold.follow import as_client
from streamfold.model.access_tokens import Secret
from streamfold.model.records import Header, fence_record
from streamfold.server.main import Server, running_server
from streamfold_mcp import make_server

BASIN = "test-basin"


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with running_server(configuration(root_token=Secret(ROOT))) as server:
        await server.store.create_basin(BASIN)
        for name in ("orders/1", "orders/2", "secrets/1"):
            await server.store.create_stream(BASIN, name)
        yield server


@pytest.fixture
async def s2(server: Server) -> AsyncIterator[S2]:
    async with sdk_client(f"http://127.0.0.1:{server.port}", ROOT) as client:
        yield client


def stdio(server: Server, *options: str, token: str = ROOT) -> StdioServerParameters:
    """Return an assistant's server configuration."""
    url = f"http://127.0.0.1:{server.port}"
    return StdioServerParameters(
        command=sys.executable,
        args=["-m", "streamfold", "mcp", *options],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "S2_ACCOUNT_ENDPOINT": url,
            "S2_BASIN_ENDPOINT": url,
            "S2_ACCESS_TOKEN": token,
        },
    )


async def call(client: Client, tool: str, **arguments: Any) -> Mapping[str, Any]:
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.content
    content = result.structured_content
    assert isinstance(content, dict)
    return content


async def refusal(client: Client, tool: str, **arguments: Any) -> str:
    result = await client.call_tool(tool, arguments)
    assert result.is_error, result.content
    [content] = result.content
    assert isinstance(content, TextContent)
    return content.text


async def test_an_assistant_lists_reads_and_cannot_append(server: Server, s2: S2) -> None:
    stream = as_client(s2.basin(BASIN).stream("orders/1"))
    await stream.append([Record(f"order {number}".encode()) for number in range(5)])
    async with Client(stdio(server)) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert tools.keys() == {"list_basins", "list_streams", "read", "tail"}
        assert all(tool.annotations and tool.annotations.read_only_hint for tool in tools.values())
        assert await call(client, "list_basins") == {"basins": [BASIN], "has_more": False}
        listed = await call(client, "list_streams", basin=BASIN, prefix="orders/", limit=1)
        assert listed == {"streams": ["orders/1"], "has_more": True}
        place = {"basin": BASIN, "stream": "orders/1"}
        last = await call(client, "tail", **place, count=2)
        assert [record["body"] for record in last["records"]] == ["order 3", "order 4"]
        assert (last["next_seq_num"], last["tail"]) == (5, 5)
        some = await call(client, "read", **place, seq_num=1, count=2)
        assert [record["seq_num"] for record in some["records"]] == [1, 2]
        assert some["next_seq_num"] == 3
        rest = await call(client, "read", **place, seq_num=5)
        assert (rest["records"], rest["next_seq_num"]) == ([], 5)
        assert "Unknown tool" in await refusal(client, "append", **place, bodies=["x"])
    assert (await stream.check_tail()).seq_num == 5


async def test_an_assistant_appends_where_that_is_allowed(server: Server) -> None:
    place = {"basin": BASIN, "stream": "orders/1"}
    async with Client(stdio(server, "--allow-append")) as client:
        done = await call(client, "append", **place, bodies=["one", "two"], match_seq_num=0)
        assert done == {"first_seq_num": 0, "next_seq_num": 2}
        late = await refusal(client, "append", **place, bodies=["three"], match_seq_num=0)
        assert "the next seq_num is 2" in late
        found = await call(client, "read", **place)
        assert [record["body"] for record in found["records"]] == ["one", "two"]


async def test_bodies_that_are_no_text_arrive_without_loss_and_large_ones_in_part(s2: S2) -> None:
    binary, long = bytes(range(256)), "é" * 100_000
    stream = as_client(s2.basin(BASIN).stream("orders/1"))
    await stream.append(
        [
            Record(binary, (Header(b"\xffname", b"value\n"),)),
            Record(long.encode()),
            fence_record("worker-1"),
            Record(b"", (Header(b"short", b"1"), Header(b"long", b"x" * 100_000))),
        ]
    )
    async with Client(make_server(s2)) as client:
        found = await call(client, "read", basin=BASIN, stream="orders/1", body_bytes=1001)
        first, second, third, fourth = found["records"]
        assert b64decode(first["body_base64"]) == binary
        assert first["headers"] == [["\\xffname", "value\n"]]
        assert second["body"] == "é" * 500
        assert second["bytes_not_shown"] == 200_000 - 1001
        assert (third["command"], third["body"]) == ("fence", "worker-1")
        assert fourth["body"] == ""
        assert (fourth["headers"], fourth["headers_not_shown"]) == ([["short", "1"]], 1)


async def test_a_result_that_would_fill_the_conversation_ends_early(s2: S2) -> None:
    stream = as_client(s2.basin(BASIN).stream("orders/1"))
    for _ in range(3):
        await stream.append([Record(b"x" * 10_000) for _ in range(50)])
    async with Client(make_server(s2)) as client:
        position, seen = 0, 0
        while position < 150:
            found = await call(
                client, "read", basin=BASIN, stream="orders/1", seq_num=position, count=500,
                body_bytes=10_000,
            )  # fmt: skip
            assert sum(len(record["body"]) for record in found["records"]) <= 64 << 10
            seen += len(found["records"])
            position = found["next_seq_num"]
        assert (seen, found["tail"]) == (150, 150)


async def test_the_token_decides_what_an_assistant_sees(server: Server, s2: S2) -> None:
    scope = AccessTokenScope(
        basins=ExactMatch(BASIN),
        streams=PrefixMatch("orders/"),
        ops=[Operation.READ, Operation.CHECK_TAIL, Operation.LIST_STREAMS],
    )
    token = await s2.issue_access_token("assistant", scope=scope)
    async with (
        sdk_client(f"http://127.0.0.1:{server.port}", token) as limited,
        Client(make_server(limited, allow_append=True)) as client,
    ):
        assert (await call(client, "tail", basin=BASIN, stream="orders/1"))["records"] == []
        place = {"basin": BASIN, "stream": "orders/1"}
        for failed in (
            await refusal(client, "tail", basin=BASIN, stream="secrets/1"),
            await refusal(client, "list_basins"),
            await refusal(client, "append", **place, bodies=["x"]),
        ):
            assert "permission_denied" in failed
        await s2.revoke_access_token("assistant")  # a revoked token behaves like an expired one
        assert "authn" in await refusal(client, "tail", basin=BASIN, stream="orders/1")


async def test_mistakes_and_a_server_that_is_away_are_explained(s2: S2) -> None:
    async with Client(make_server(s2)) as client:
        assert "not_found" in await refusal(client, "tail", basin=BASIN, stream="nothing")
        assert "not_found" in await refusal(client, "tail", basin="no-such-basin", stream="x")
        assert "invalid" in await refusal(client, "tail", basin="?", stream="x")
        assert "invalid" in await refusal(client, "tail", basin=BASIN, stream="x" * 600)
        both = {"basin": BASIN, "stream": "orders/1", "seq_num": 1, "timestamp": 1}
        assert "not both" in await refusal(client, "read", **both)
        beyond = await refusal(client, "read", basin=BASIN, stream="orders/1", seq_num=9)
        assert "position_unwritten" in beyond
        assert "count" in await refusal(client, "tail", basin=BASIN, stream="x", count=0)
    async with (
        sdk_client(f"http://127.0.0.1:{free_port()}") as away,
        Client(make_server(away)) as client,
    ):
        assert "cannot be reached" in await refusal(client, "list_basins")


async def test_sql_reads_the_named_archives_and_nothing_else(s2: S2, tmp_path: Path) -> None:
    await write_history(tmp_path / "users")
    (tmp_path / "private.csv").write_text("secret\n1\n")
    archives = {"users": str(tmp_path / "users"), "gone": str(tmp_path / "gone")}
    async with Client(make_server(s2, archives={"users": archives["users"]})) as client:
        [listed] = (await call(client, "list_archives"))["archives"]
        assert listed == {"name": "users", "table": "public.users"}
        query = {"archive": "users", "statement": "select id, name from users order by id"}
        found = await call(client, "archive_sql", **query)
        assert {row[0]: row[1] for row in found["rows"]} == HISTORY["31"]
        assert (found["columns"], found["has_more"]) == (["id", "name"], False)
        long = query | {"statement": "select repeat('x', 100_000) from users limit 1"}
        assert "too_large: row 0 has 100,0" in await refusal(client, "archive_sql", **long)
        before = await call(client, "archive_sql", **query, position="14", limit=1)
        assert len(before["rows"]) == 1
        assert before["has_more"] is (len(HISTORY["14"]) > 1)
        for statement in (
            "delete from users",
            f"select * from '{tmp_path}/private.csv'",
            "select 1; select 2",
            "nonsense",
        ):
            assert await refusal(client, "archive_sql", archive="users", statement=statement)
        assert "not_found" in await refusal(
            client, "archive_sql", archive="x", statement="select 1"
        )
    async with Client(make_server(s2, archives=archives)) as client:
        gone = await refusal(client, "archive_sql", archive="gone", statement="select 1")
        assert "gone" in gone


def test_without_its_package_the_command_says_what_to_install() -> None:
    hidden = (
        "import sys; sys.modules['streamfold_mcp'] = None\n"
        "from streamfold.cli.main import main; main(['mcp', '--endpoint', 'localhost:1'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", hidden], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 1
    assert "run pip install streamfold-mcp" in done.stderr
    assert "Traceback" not in done.stderr
