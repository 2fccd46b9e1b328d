"""Tables in the console: found below configured locations, drawn as a chain, read at any position."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pytest
from playwright.sync_api import Page, expect

from streamfold.archive import ArchiveWriter, TableSchema
from streamfold.archive.destinations.destination import Destination
from streamfold.archive.formats import Format, JsonlFormat, ParquetFormat, parquet
from streamfold.archive.formats.admission import PieceLimits
from streamfold.archive.formats.format import FileCompression
from streamfold.archive.manifest.model import Source
from streamfold.archive.preview import ReadLimits
from streamfold.errors import ConflictError, InvalidError
from streamfold.model.access_tokens import AccessToken, ResourceSet, Right, Scope, Secret
from streamfold.server.console import ConsoleSettings
from streamfold.server.main import Server, running_server
from streamfold.snapshotter.status.http_server import StatusServer
from streamfold.snapshotter.status.table_status import (
    ArtifactStatus,
    DeadLetterStatus,
    SparkCounts,
    State,
    TableFailure,
    TableStatus,
)
from tests.archive.tables import SCHEMA, changes, open_writer, rows
from tests.folder_size import stored_bytes
from tests.ports import free_port
from tests.server.conftest import configuration, until
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
    source = Source(name="basin/users", dead_letters=100_002)
    await writer.rebase(
        rows({2: HOSTILE, 3: "three"}), closing, "30", reason="max_interval", source=source
    )
    return f"{uri}/"


async def publish_incomplete(folder: Path) -> None:
    """A table whose stream had lost its beginning."""
    writer = await ArchiveWriter.open(
        "public.orders",
        SCHEMA,
        [Destination.open(f"{folder.as_uri()}/orders")],
        formats=[JsonlFormat()],
        writer_id="writer-1",
    )
    await writer.write_base(rows({1: "one"}), "10", reason="first", incomplete_before="7")


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


async def test_changes_are_those_between_two_positions(guarded: tuple[Server, str]) -> None:
    server, uri = guarded
    path = f"/console/tables/{quote(uri, safe='')}/changes?since=10&until=30"
    shown = json.loads((await get(server, path)).body)
    assert [(one["position"], one["action"]) for one in shown["changes"]] == [
        ("20", "DELETE"), ("30", "INSERT"),
    ]  # fmt: skip
    assert '"three"' in shown["changes"][1]["after"]
    assert (await get(server, path.replace("since=10", "since=nonsense"))).status == 422


async def test_days_and_instants_outside_the_years_of_python_are_shown(tmp_path: Path) -> None:
    columns = [("id", pa.int64()), ("day", pa.date32()), ("at", pa.timestamp("us", "UTC"))]
    schema = TableSchema.of(pa.schema(columns), ["id"])
    days = pa.array([2**31 - 1, 0], pa.int32()).cast(pa.date32())
    moments = pa.array([0, -(2**63)]).cast(pa.timestamp("us", "UTC"))
    given = pa.RecordBatch.from_arrays([[1, 2], days, moments], schema=schema.arrow)
    uri = f"{tmp_path.as_uri()}/users"
    writer = await open_writer(Destination.open(uri), schema=schema)
    await writer.write_base([given], "10", reason="first")
    parts = [
        pa.array(["INSERT"] * 2),
        pa.StructArray.from_arrays(
            given.columns[:1], fields=list(schema.changes.field("key").type)
        ),
        pa.nulls(2, schema.changes.field("before").type),
        pa.StructArray.from_arrays(given.columns, fields=list(schema.arrow)),
    ]
    change = pa.RecordBatch.from_arrays(parts, schema=schema.changes)
    await writer.write_diff([change], "10", "20")
    console = ConsoleSettings(tables=(str(tmp_path),))
    async with running_server(configuration(console=console, root_token=Secret(ROOT))) as server:
        path = f"/console/tables/{quote(uri + '/', safe='')}"
        shown = json.loads((await get(server, f"{path}/rows?position=10")).body)
        assert shown["rows"] == [
            ["1", "2147483647", "1970-01-01T00:00:00.000000Z"],
            ["2", "1970-01-01", "-9223372036854775808"],
        ]
        shown = json.loads((await get(server, f"{path}/changes?since=10&until=20")).body)
        assert '"day":"2147483647"' in shown["changes"][0]["after"]


async def test_a_check_reports_each_file_and_finds_a_changed_one(
    guarded: tuple[Server, str], tmp_path: Path
) -> None:
    server, uri = guarded
    path = f"/console/tables/{quote(uri, safe='')}/check"
    events = (await get(server, path)).body.decode().split("\n\n")
    assert events[0].startswith('event: progress\ndata: {"checked":1,"files":4}')
    assert events[-2].startswith("event: result")
    assert '"problems":[]' in events[-2]
    damaged = damage_a_file(tmp_path / "users" / "epoch=1")
    result = (await get(server, path)).body.decode().split("\n\n")[-2]
    assert damaged in result


def damage_a_file(folder: Path) -> str:
    """Change the last byte of a file; returns its name."""
    file = max(path for path in folder.rglob("*") if path.is_file())
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    return file.name


#: Limits that a few megabytes reach.
LITTLE_DECODED, LITTLE_MEMORY = ReadLimits(decoded_bytes=8 << 20), ReadLimits(memory=48 << 20)


async def publish_hostile(folder: Path, form: Format, count: int) -> str:
    """A table of a few kilobytes whose diff has `count` MiB once it is decoded; its URI."""
    uri = f"{folder.as_uri()}/hostile"
    writer = await open_writer(Destination.open(uri), formats=[form])
    await writer.write_base(rows({0: "one"}), "10", reason="first")
    same = "a" * (1 << 20)
    diff = changes(*(("INSERT", one, same) for one in range(1, count)))
    await writer.write_diff(diff, "10", "20")
    assert stored_bytes(folder) < 100_000
    return f"{uri}/"


@pytest.mark.parametrize("form", [ParquetFormat(), JsonlFormat(FileCompression.ZSTD)])
async def test_a_preview_ends_where_small_files_decode_to_too_much(
    tmp_path: Path, form: Format
) -> None:
    uri = await publish_hostile(tmp_path, form, 24)
    console = ConsoleSettings(tables=(str(tmp_path),), table_limits=LITTLE_DECODED)
    async with running_server(configuration(console=console)) as server:
        answer = await get(server, f"/console/tables/{quote(uri, safe='')}/rows")
        assert answer.status == 422
        message = json.loads(answer.body)["message"]
        assert message.startswith("the files decode to more than 8388608 bytes or 5000000 rows")
        assert message.endswith(f"run 'streamfold archive restore {uri}'")


async def test_a_preview_ends_where_one_page_of_a_file_decodes_to_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All rows in one group, with one value in its dictionary: they are decoded in one step.
    monkeypatch.setattr(parquet, "ROW_GROUP", PieceLimits(rows=1 << 20, size=1 << 30))
    uri = await publish_hostile(tmp_path, ParquetFormat(), 96)
    console = ConsoleSettings(tables=(str(tmp_path),), table_limits=LITTLE_MEMORY)
    async with running_server(configuration(console=console)) as server:
        for read in ("rows", "changes?since=10"):
            answer = await get(server, f"/console/tables/{quote(uri, safe='')}/{read}")
            assert answer.status == 422
            message = json.loads(answer.body)["message"]
            assert "more than 50331648 bytes of memory" in message
        assert (await get(server, "/health")).status == 200


def block_first_base(folder: Path) -> None:
    """Whatever opens the base of the first epoch waits until another process writes to it."""
    manifest = json.loads((folder / "users" / "manifest.json").read_bytes())
    [part] = manifest["artifacts"][0]["formats"]["jsonl"]["parts"]
    file = folder / "users" / part["path"]
    file.unlink()
    os.mkfifo(file)


async def test_a_check_delays_no_preview_and_gets_no_secret_of_the_server(
    guarded: tuple[Server, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGPASSWORD", "the-password")
    monkeypatch.setenv("STREAMFOLD_POSTGRES_DSN", "postgresql://user:the-password@host/db")
    server, uri = guarded
    block_first_base(tmp_path)
    table = f"/console/tables/{quote(uri, safe='')}"
    async with h2_client(server.port) as client:
        client.open("GET", f"{table}/check", (("authorization", f"Bearer {ROOT}"),), end=True)
        await until(lambda: bool(readers()))
        assert b"the-password" not in environment(*readers())
        assert (await get(server, f"{table}/rows")).status == 200


async def test_callers_that_wait_for_previews_are_few(
    guarded: tuple[Server, str], tmp_path: Path
) -> None:
    server, uri = guarded
    block_first_base(tmp_path)
    path = f"/console/tables/{quote(uri, safe='')}/rows?position=10"
    headers = (("authorization", f"Bearer {ROOT}"),)
    async with h2_client(server.port) as client:
        for _ in range(32):
            client.open("GET", path, headers, end=True)
        answer = await client.exchange("GET", path, headers)
        assert (answer.status, json.loads(answer.body)["code"]) == (503, "server_busy")
    await until(lambda: not readers())


async def test_a_check_ends_with_its_client_and_is_not_a_follower(
    guarded: tuple[Server, str], tmp_path: Path
) -> None:
    server, uri = guarded
    block_first_base(tmp_path)
    path = f"/console/tables/{quote(uri, safe='')}/check"
    async with h2_client(server.port) as client:
        client.open("GET", path, (("authorization", f"Bearer {ROOT}"),), end=True)
        await until(lambda: bool(readers()))
        metrics = (await get(server, "/metrics")).body.decode()
        assert "\nstreamfold_followers 0.0\n" in metrics
    await until(lambda: not readers())


def readers() -> list[str]:
    """Processes of this one that read tables."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = entry.read_text().rpartition(")")[2].split()[1]
            command = (entry.parent / "cmdline").read_bytes()
            if int(parent) == os.getpid() and b"archive.preview" in command:
                found.append(entry.parent.name)
    return found


def environment(process: str) -> bytes:
    return Path(f"/proc/{process}/environ").read_bytes()


async def test_only_tables_that_were_found_are_read(guarded: tuple[Server, str]) -> None:
    server, _ = guarded
    for uri in ("file:///etc/", "", "s3://elsewhere/users/"):
        answer = await get(server, f"/console/tables/{quote(uri, safe='')}")
        assert answer.status == 404


async def test_a_caller_needs_the_right_to_read_all_streams(guarded: tuple[Server, str]) -> None:
    server, uri = guarded
    everything, some = ResourceSet.prefix(""), ResourceSet.prefix("tenant/")
    reading = frozenset((Right.READ,))
    for name, streams, prefixed, status in (
        ("all", everything, False, 200), ("some", some, False, 403), ("tenant", some, True, 403),
    ):  # fmt: skip
        scope = Scope(basins=everything, streams=streams, ops=reading)
        token = await server.store.account.issue_access_token(AccessToken(name, scope, prefixed))
        one = f"/{quote(uri, safe='')}"
        for path in ("", one, f"{one}/rows", f"{one}/changes?since=10", f"{one}/check"):
            assert (await get(server, f"/console/tables{path}", token.text)).status == status
    assert (await get(server, "/console/tables", "nonsense")).status == 401


async def test_an_address_that_is_no_snapshotters_is_refused_at_the_start() -> None:
    for url in ("ftp://localhost", "http://user:secret@localhost", "localhost:8081"):
        console = ConsoleSettings(snapshotters=(url,))
        with pytest.raises(InvalidError, match="must be an address"):
            async with running_server(configuration(console=console)):
                pass


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleServer]:
    folder = tmp_path_factory.mktemp("tables")
    asyncio.run(publish(folder))
    asyncio.run(publish_incomplete(folder))
    with ConsoleServer(tmp_path_factory.mktemp("data"), ["--tables", str(folder)]) as running:
        yield running


def test_a_table_is_shown_as_a_chain_and_at_an_older_position(
    tables: ConsoleServer, page: Page
) -> None:
    page.goto(tables.page("tables"))
    page.get_by_role("link", name="public.users").click()
    expect(page.get_by_text("100,002 dead letters")).to_be_visible()
    expect(page.get_by_role("img", name="2 epochs of bases and diffs, 10 to 30")).to_be_visible()
    expect(page.get_by_role("cell", name="three", exact=True)).to_be_visible()
    page.get_by_role("slider").press("Home")
    expect(page.get_by_role("heading", name="Rows at 10")).to_be_visible()
    expect(page.get_by_role("cell", name="one", exact=True)).to_be_visible()
    expect(page.get_by_role("cell", name=HOSTILE)).to_be_visible()
    assert page.locator("main img").count() == 0


def test_an_open_table_shows_new_diffs_and_stays_at_a_chosen_position(
    tmp_path: Path, page: Page
) -> None:
    def write(changed: Callable[[ArchiveWriter], Awaitable[object]]) -> None:
        async def run() -> None:
            await changed(await open_writer(Destination.open(tmp_path / "users")))

        with ThreadPoolExecutor(1) as thread:  # the browser's driver runs a loop in this one
            thread.submit(asyncio.run, run()).result()

    with ConsoleServer(tmp_path / "data", ["--tables", str(tmp_path)]) as server:
        # A link by name, such as the demo's, works before the table is there.
        page.goto(server.page("tables", "public.users"))
        expect(page.get_by_text("No table of this name is published yet.")).to_be_visible()
        write(lambda writer: writer.write_base(rows({1: "one"}), "10", reason="first"))
        expect(page.get_by_text("the first base of the table").first).to_be_attached()
        expect(page.get_by_role("heading", name="Rows at 10")).to_be_visible()
        write(lambda writer: writer.write_diff(changes(("INSERT", 2, "two")), "10", "20"))
        expect(page.get_by_text("Head 20")).to_be_visible()
        expect(page.get_by_role("heading", name="Rows at 20")).to_be_visible()
        since = page.get_by_label("Since").get_by_role("option")
        expect(since).to_have_text(re.compile(r"\d{4}-\d\d-\d\d .* UTC.*, position 10"))
        page.get_by_role("slider").press("Home")
        expect(page.get_by_role("heading", name="Rows at 10")).to_be_visible()
        write(lambda writer: writer.write_diff(changes(("INSERT", 3, "three")), "20", "30"))
        expect(page.get_by_text("Head 30")).to_be_visible()
        expect(page.get_by_role("heading", name="Rows at 10")).to_be_visible()


def test_a_slider_that_moves_on_gives_up_the_previews_that_it_passed(
    tables: ConsoleServer, page: Page
) -> None:
    page.goto(tables.page("tables"))
    page.get_by_role("link", name="public.users").click()
    expect(page.get_by_role("cell", name="three", exact=True)).to_be_visible()
    page.route("**/rows?position=20", lambda _: None)  # an answer that takes its time
    passed = "/rows?position=20"
    with page.expect_event("requestfailed", lambda request: request.url.endswith(passed)):
        page.get_by_role("slider").press("ArrowLeft")
        page.get_by_role("slider").press("ArrowLeft")
        page.get_by_role("slider").press("Home")
    expect(page.get_by_role("heading", name="Rows at 10")).to_be_visible()
    expect(page.get_by_role("cell", name="one", exact=True)).to_be_visible()


def test_a_table_can_be_compared_drawn_in_time_and_checked(
    tables: ConsoleServer, page: Page
) -> None:
    page.goto(tables.page("tables"))
    page.get_by_role("link", name="public.users").click()
    page.get_by_label("Since").select_option("10")
    expect(page.get_by_role("row", name="20 DELETE")).to_be_visible()
    expect(page.get_by_role("row", name="30 INSERT")).to_be_visible()
    page.get_by_role("button", name="Time", exact=True).click()
    expect(page.get_by_role("img", name="2 epochs of bases and diffs, 10 to 30")).to_be_visible()
    page.get_by_role("button", name="Check every file").click()
    expect(page.get_by_text("All 4 files are what the manifest says")).to_be_visible()


def test_a_table_that_lacks_changes_says_so(tables: ConsoleServer, page: Page) -> None:
    page.goto(tables.page("tables"))
    expect(page.get_by_role("row", name="public.users")).not_to_contain_text("incomplete")
    expect(page.get_by_role("row", name="public.orders")).to_contain_text("incomplete")
    page.get_by_role("link", name="public.orders").click()
    expect(page.get_by_text("changes before position 7 are missing")).to_be_visible()


class _Snapshotter:
    """A table that another writer took, and one of which little is known."""

    def statuses(self) -> dict[str, TableStatus]:
        failure = TableFailure(
            "fenced", f"another writer has the table {HOSTILE}", "2026-06-03T12:00:00Z"
        )
        status = TableStatus(
            table="public.users", stream="users", state=State.FENCED, lag_records=12,
            lag_seconds=3.5, manifest_head="30", last_error=failure,
            dead_letters=DeadLetterStatus(100_002, "s3://b/dead-letters/", 7, f"malformed {HOSTILE}"),
        )  # fmt: skip
        orders = TableStatus(
            table="public.orders", stream="orders", state=State.RETRYING, incomplete_before="7"
        )
        return {"users": status, "orders": orders}

    def spark(self) -> SparkCounts:
        return SparkCounts()

    def request_snapshot(self, table: str) -> Future[ArtifactStatus]:
        raise ConflictError(table)


def test_the_status_of_snapshotters_is_shown_and_those_that_are_away(
    tmp_path: Path, page: Page
) -> None:
    away = free_port()
    with StatusServer(_Snapshotter(), "127.0.0.1", 0) as status:
        urls = [f"http://127.0.0.1:{port}" for port in (status.port, away)]
        options = [option for url in urls for option in ("--snapshotter", url)]
        with ConsoleServer(tmp_path, options) as server:
            page.goto(server.page("tables"))
            row = page.get_by_role("row", name="public.users")
            expect(row).to_contain_text("fenced")
            expect(row).to_contain_text(HOSTILE)
            expect(row).to_contain_text("12 records, 3.5 s")
            expect(row).to_contain_text(re.compile(r"\d jobs?, \d+ tasks?"))
            expect(row).to_contain_text("100,002 dead letters")
            expect(row).to_contain_text("in s3://b/dead-letters/")
            other = page.get_by_role("row", name="public.orders")
            expect(other).to_contain_text("incomplete before 7")
            expect(other).to_contain_text("unknown")
            expect(page.get_by_text("it cannot be reached")).to_be_visible()


def test_a_snapshotter_whose_address_is_in_a_file_is_shown_once_it_has_started(
    tmp_path: Path, page: Page
) -> None:
    file = tmp_path / "snapshotter.url"
    with ConsoleServer(tmp_path / "data", ["--snapshotter", f"@{file}"]) as server:
        page.goto(server.page("tables"))
        expect(page.get_by_text("it has not started yet")).to_be_visible()
        with StatusServer(_Snapshotter(), "127.0.0.1", 0) as status:
            file.write_text(f"http://127.0.0.1:{status.port}\n")
            expect(page.get_by_role("row", name="public.users")).to_contain_text("fenced")
