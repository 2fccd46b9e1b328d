"""The console's other pages: changes, rejections, access and small screens."""

from __future__ import annotations

import base64
import random
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from urllib.parse import quote

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.ports import free_port
from tests.server.console.conftest import BASIN, STREAM, ConsoleServer

ROOT_TOKEN = "the-root-token-of-this-test"
#: Addresses of all pages.
PAGES = ("", "basins", f"basins/{BASIN}", f"basins/{BASIN}?tab=usage", f"basins/{BASIN}/{STREAM}",
         f"basins/{BASIN}/{STREAM}?seq=0", f"basins/{BASIN}/{STREAM}?tab=snapshots",
         f"basins/{BASIN}/{STREAM}?tab=forks", f"basins/{BASIN}/{STREAM}?tab=producers",
         f"basins/{BASIN}/{STREAM}?tab=usage", "servers", "tokens", "no-such-page")  # fmt: skip
#: The background in each theme, as style/base.css has it.
LIGHT, DARK = "rgb(246, 247, 249)", "rgb(14, 17, 22)"
#: Controls whose name a screen reader could not say.
NAMELESS = """() => [...document.querySelectorAll("button, a, input, select, textarea, [role=listbox]")]
  .filter((control) => !(control.ariaLabel || control.labels?.length || control.textContent.trim()))
  .map((control) => control.outerHTML)"""


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleServer]:
    folder = tmp_path_factory.mktemp("guarded")
    with ConsoleServer(folder, ["--auth", "--console-read-only"], ROOT_TOKEN) as running:
        running.create(BASIN, STREAM)
        yield running


def test_a_basin_and_a_stream_are_created_configured_and_deleted(
    server: ConsoleServer, page: Page
) -> None:
    page.goto(f"{server.url}/")
    expect(page.get_by_role("heading", name="Everything works")).to_be_visible()
    page.get_by_role("link", name="Basins", exact=True).click()
    page.get_by_role("button", name="Create basin").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name").fill("short")
    dialog.get_by_role("button", name="Create").click()
    expect(dialog.get_by_role("alert")).to_contain_text("it must have 8 to 48")
    dialog.get_by_label("Name").fill("from-the-console")
    expect(dialog).to_contain_text(
        "Records are removed 7 d after they arrive. To keep them, choose"
    )
    dialog.get_by_role("button", name="Create").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("from-the-console")
    page.get_by_role("button", name="Create stream").click()
    dialog.get_by_label("Name").fill("a/b c")
    expect(dialog).to_contain_text(
        "Records are removed 7 d after they arrive. To keep them, choose"
    )
    dialog.get_by_role("button", name="Create").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("a/b c")
    expect(page.get_by_text("kept for 7 d, then removed")).to_be_visible()
    page.get_by_role("button", name="Configure").click()
    dialog.get_by_label("Records are kept").select_option("age")
    dialog.locator("[name=age]").fill("36h")
    dialog.get_by_role("button", name="Save").click()
    expect(page.get_by_text("kept for 1 d 12 h")).to_be_visible()
    page.get_by_role("button", name="Delete stream").click()
    expect(dialog.get_by_role("button", name="Delete stream")).to_be_disabled()
    dialog.get_by_label("to confirm").fill("a/b c")
    dialog.get_by_role("button", name="Delete stream").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("from-the-console")


def test_a_new_stream_inherits_the_retention_that_its_dialog_shows(
    server: ConsoleServer, page: Page
) -> None:
    page.goto(server.page("basins"))
    page.get_by_role("button", name="Create basin").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name").fill("for-good-basin")
    dialog.get_by_text("Defaults of its streams", exact=True).click()
    dialog.get_by_label("Records are kept").select_option("infinite")
    expect(dialog).to_contain_text("Records are kept until they are trimmed.")
    dialog.get_by_role("button", name="Create").click()
    expect(page.get_by_text("kept until trimmed")).to_be_visible()
    page.get_by_role("button", name="Create stream").click()
    dialog.get_by_label("Name").fill("ledger")
    expect(dialog).to_contain_text("Records are kept until they are trimmed.")
    dialog.get_by_text("Configuration", exact=True).click()
    dialog.get_by_label("Records are kept").select_option("age")
    dialog.locator("[name=age]").fill("2h")
    expect(dialog).to_contain_text("Records are removed 2h after they arrive.")
    dialog.get_by_label("Records are kept").select_option("")
    dialog.get_by_role("button", name="Create").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("ledger")
    expect(page.get_by_text("kept until trimmed")).to_be_visible()


def test_a_stream_is_fenced_and_trimmed(server: ConsoleServer, page: Page) -> None:
    server.create(BASIN, "guarded")
    server.append([b"first", b"second"], "guarded")
    page.goto(server.page("basins", BASIN, "guarded"))
    page.get_by_role("button", name="Fence").click()
    page.get_by_role("dialog").get_by_label("Token").fill("writer-7")
    page.get_by_role("button", name="Set token").click()
    rows = page.get_by_role("listbox").get_by_role("option")
    expect(rows.filter(has_text="writer-7")).to_contain_text("fence")
    page.get_by_role("button", name="Trim").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("button", name="Trim")).to_be_disabled()
    dialog.get_by_label("Oldest seq_num to keep").fill("3")
    expect(dialog).to_contain_text("This removes every record stored now")
    dialog.get_by_label("Oldest seq_num to keep").fill("2")
    expect(dialog).not_to_contain_text("This removes every record stored now")
    dialog.get_by_role("button", name="Trim").click()
    expect(rows.filter(has_text="trim")).to_contain_text("2")


def test_a_snapshot_is_published_listed_and_downloaded(
    server: ConsoleServer, page: Page, tmp_path: Path
) -> None:
    server.create(BASIN, "folded")
    server.append([b"1", b"2", b"3"], "folded")
    page.goto(server.page("basins", BASIN, "folded", query="?tab=snapshots"))
    expect(page.get_by_text("No snapshot is stored with this stream")).to_be_visible()
    page.get_by_role("button", name="Publish snapshot").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Position").fill("2")
    dialog.get_by_label("or text").fill("<script>alert(1)</script>")
    dialog.get_by_role("button", name="Publish").click()
    expect(page.get_by_text("and then 1 record.")).to_be_visible()
    with page.expect_download() as download:
        page.get_by_role("button", name="Download snapshot at 2").click()
    download.value.save_as(tmp_path / "snapshot")
    assert (tmp_path / "snapshot").read_text() == "<script>alert(1)</script>"


def test_the_content_of_a_snapshot_is_shown(server: ConsoleServer, page: Page) -> None:
    server.create(BASIN, "shown-state")
    server.append([b"1"], "shown-state")
    path, kind = "/v1/streams/shown-state/snapshot/1", {"content-type": "application/json"}
    content = b'{"colour": "<b>red</b>"}'
    named = kind | {"s2-basin": BASIN}
    server.http.put(path, headers=named, content=content).raise_for_status()
    page.goto(server.page("basins", BASIN, "shown-state", query="?tab=snapshots"))
    page.get_by_role("button", name="Show snapshot at 1", exact=True).click()
    dialog = page.get_by_role("dialog", name="Snapshot at 1")
    expect(dialog.locator(".json")).to_contain_text('colour: "<b>red</b>"')


def test_a_fork_is_created_at_a_position(server: ConsoleServer, page: Page) -> None:
    server.create(BASIN, "forked/here")
    server.append([b"zero", b"one", b"two"], "forked/here")
    page.goto(server.page("basins", BASIN, "forked/here", query="?tab=forks"))
    page.get_by_role("button", name="Create fork").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name").fill("branch/new")
    dialog.get_by_label("Position").fill("2")
    dialog.get_by_role("button", name="Create").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("branch/new")
    expect(page.get_by_text("Forked from forked/here at 2")).to_be_visible()
    assert server.tail("branch/new") == 2


def test_streams_are_listed_with_their_tails_and_in_groups(
    server: ConsoleServer, page: Page
) -> None:
    server.http.put("/v1/basins/grouped-basin").raise_for_status()
    named = {"s2-basin": "grouped-basin"}
    for stream in ("a/x/1", "a/x/2", "a/y", "b"):
        path = f"/v1/streams/{quote(stream, safe='')}"
        server.http.put(path, headers=named).raise_for_status()
        records = {"records": [{"body": "x"}] * 3}
        server.http.post(f"{path}/records", json=records, headers=named).raise_for_status()
    page.goto(server.page("basins", "grouped-basin"))
    row = page.get_by_role("row").filter(has_text="a/x/1")
    expect(row.get_by_role("cell").nth(1)).to_have_text("3")
    expect(row.get_by_role("cell").nth(2)).to_have_text("27 B")
    expect(row.get_by_role("cell").nth(3)).to_have_text("0")
    expect(row.get_by_role("cell").nth(4)).to_contain_text(re.compile("just now|ago"))
    server.http.post(
        "/v1/streams/b/records", json={"records": [{"body": "x"}] * 900}, headers=named
    )
    rate = page.get_by_role("row").filter(has_text=re.compile(r"^b")).get_by_role("cell").nth(3)
    expect(rate).not_to_have_text("0")
    page.get_by_role("button", name="Groups").click()
    expect(page.get_by_role("row", name="a/ 3 streams")).to_be_visible()
    expect(page.get_by_role("link", name="b", exact=True)).to_be_visible()
    page.get_by_role("link", name="a/", exact=True).click()
    expect(page.get_by_role("row", name="a/x/ 2 streams")).to_be_visible()
    expect(page.get_by_role("row").filter(has_text="a/y")).to_contain_text("3")
    page.get_by_role("link", name="all groups").click()
    expect(page.get_by_role("link", name="b", exact=True)).to_be_visible()


def test_a_stream_shows_its_forks_its_origin_and_its_producers(
    server: ConsoleServer, page: Page
) -> None:
    kind = {"content-type": "application/json"}
    server.http.put(f"/{BASIN}/trunk", headers=kind, content=b"[0,1,2]").raise_for_status()
    fork = {"stream-forked-from": f"/{BASIN}/trunk", "stream-fork-offset": f"{2:016d}_{0:016d}"}
    server.http.put(f"/{BASIN}/branch", headers=kind | fork).raise_for_status()
    named = {"producer-id": "<b>loader</b>", "producer-epoch": "4", "producer-seq": "0"}
    server.http.post(f"/{BASIN}/trunk", headers=kind | named, content=b"[3]").raise_for_status()
    page.goto(server.page("basins", BASIN, "trunk"))
    page.get_by_role("link", name="Forks", exact=True).click()
    expect(page.get_by_role("row", name="branch")).to_contain_text("trunk at 2")
    page.get_by_role("link", name="Producers", exact=True).click()
    producer = page.get_by_role("row").filter(has_text="<b>loader</b>")
    expect(producer.get_by_role("cell").nth(1)).to_have_text("4")
    expect(producer.get_by_role("cell").nth(2)).to_have_text("1")
    page.goto(server.page("basins", BASIN, "branch", query="?tab=forks"))
    expect(page.get_by_text("Forked from trunk at 2")).to_be_visible()
    expect(page.get_by_text("This stream has no forks")).to_be_visible()
    page.get_by_role("link", name="Producers", exact=True).click()
    expect(page.get_by_text("No producer has appended to this stream")).to_be_visible()


def test_a_token_is_issued_shown_once_and_revoked(server: ConsoleServer, page: Page) -> None:
    page.goto(server.page("tokens"))
    page.get_by_role("button", name="Issue token").click()
    dialog = page.get_by_role("dialog")
    dialog.locator("[name=id]").fill("<i>reader</i>")
    dialog.get_by_label("Valid for").fill("1d")
    dialog.get_by_role("button", name="Issue").click()
    expect(page.get_by_text("It is not shown again")).to_be_visible()
    page.get_by_role("button", name="Done").click()
    row = page.get_by_role("row").filter(has_text="<i>reader</i>")
    expect(row).to_contain_text("stream read, basin read")
    row.get_by_role("button", name="Revoke").click()
    dialog.get_by_role("button", name="Revoke").click()
    expect(row).to_be_hidden()


def test_a_server_with_tokens_asks_for_one_and_says_why_it_is_refused(
    guarded: ConsoleServer, page: Page
) -> None:
    page.goto(guarded.page("basins"))
    page.get_by_label("Access token").fill("not-a-token")
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("alert")).to_contain_text("token")
    page.get_by_label("Access token").fill(ROOT_TOKEN)
    page.get_by_role("button", name="Log in").click()
    page.get_by_role("link", name=BASIN).click()
    page.get_by_role("link", name=STREAM).click()
    guarded.append([b"for those with a token"])
    rows = page.get_by_role("listbox").get_by_role("option")
    expect(rows.filter(has_text="for those with a token")).to_be_visible()
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_label("Access token")).to_be_visible()
    assert page.evaluate("JSON.stringify([localStorage, sessionStorage])") == "[{},{}]"


def test_a_read_only_console_offers_no_changes(guarded: ConsoleServer, page: Page) -> None:
    page.goto(guarded.page("basins", BASIN, STREAM))
    page.get_by_label("Access token").fill(ROOT_TOKEN)
    page.get_by_role("button", name="Log in").click()
    for name in ("Append", "Trim", "Fence", "Configure", "Delete stream"):
        expect(page.get_by_role("button", name=name, exact=True)).to_be_disabled()


def test_no_page_is_wider_than_a_small_screen_and_every_control_has_a_name(
    server: ConsoleServer, page: Page
) -> None:
    server.append([b"a long line " * 50], STREAM, [(b"name" * 20, b"value" * 100)])
    page.set_viewport_size({"width": 380, "height": 780})
    for address in PAGES:
        page.goto(f"{server.url}/console/#/{address}")
        expect(page.locator("main h1, main .empty").first).to_be_visible()
        page.wait_for_load_state("networkidle") if "tab" in address else None
        assert page.evaluate("document.documentElement.scrollWidth") <= 380, address
        assert page.evaluate(NAMELESS) == [], address


def test_on_a_small_screen_all_tabs_and_actions_of_a_stream_are_in_view(
    server: ConsoleServer, page: Page
) -> None:
    page.set_viewport_size({"width": 380, "height": 780})
    page.goto(server.page("basins", BASIN, STREAM))
    tabs = page.get_by_role("navigation", name="Parts of the stream").get_by_role("link")
    buttons = page.locator(".page-head .actions button")
    expect(tabs).to_have_text(["Records", "Latest", "Snapshots", "Forks", "Producers", "Usage"])
    expect(buttons).to_have_count(5)
    for tab in tabs.all():
        expect(tab).to_be_in_viewport(ratio=0.9)  # its lower line is cut by design
    tops = {
        button.evaluate("(button) => button.getBoundingClientRect().top")
        for button in buttons.all()
    }
    assert len(tops) == 1


def test_on_a_small_screen_a_token_shows_its_scope(server: ConsoleServer, page: Page) -> None:
    scope = {"basins": {"prefix": ""}, "streams": {"prefix": "sessions/"}, "ops": ["read"]}
    issued = {"id": "narrow-reader", "scope": scope}
    server.http.post("/v1/access-tokens", json=issued).raise_for_status()
    page.set_viewport_size({"width": 380, "height": 780})
    page.goto(server.page("tokens"))
    row = page.get_by_role("row").filter(has_text="narrow-reader")
    expect(row.get_by_text("streams sessions/")).to_be_visible()
    expect(row.get_by_text("expires never")).to_be_visible()


def test_the_theme_follows_the_system_until_one_is_chosen(
    server: ConsoleServer, browser: Browser
) -> None:
    with browser.new_context(color_scheme="dark") as context:
        page = context.new_page()
        page.goto(server.page())
        body = page.locator("body")
        expect(body).to_have_css("background-color", DARK)
        page.get_by_role("button", name="System theme").click()
        expect(body).to_have_css("background-color", LIGHT)
        page.reload()
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        expect(body).to_have_css("background-color", LIGHT)
        page.get_by_role("button", name="Light theme").click()
        expect(body).to_have_css("background-color", DARK)


def test_an_encrypted_stream_is_read_with_the_key_that_is_typed_in(
    server: ConsoleServer, page: Page
) -> None:
    key = base64.b64encode(bytes(range(32))).decode()
    basin = {"config": {"stream_cipher": "aes-256-gcm"}}
    server.http.put("/v1/basins/sealed-basin", json=basin).raise_for_status()
    named = {"s2-basin": "sealed-basin"}
    server.http.put("/v1/streams/letters", headers=named).raise_for_status()
    headers = {**named, "s2-encryption-key": key}
    records = {"records": [{"body": "for your eyes"}]}
    server.http.post(
        "/v1/streams/letters/records", json=records, headers=headers
    ).raise_for_status()
    page.goto(server.page("basins", "sealed-basin", "letters"))
    expect(page.get_by_text("encrypted, aes-256-gcm")).to_be_visible()
    expect(page.get_by_role("alert")).to_contain_text("key")
    page.get_by_role("button", name="Key").click()
    page.get_by_role("dialog").get_by_label("Key").fill(key)
    page.get_by_role("button", name="Use key").click()
    expect(page.get_by_role("option", name="for your eyes")).to_be_visible()
    assert key not in page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}])")


@pytest.mark.parametrize("tab", ["records", "snapshots"])
def test_every_tab_of_a_stream_shows_its_tail_and_its_size(
    server: ConsoleServer, page: Page, tab: str
) -> None:
    server.create(BASIN, f"sized-{tab}")
    server.append([bytes(1016)] * 3, f"sized-{tab}")
    page.goto(server.page("basins", BASIN, f"sized-{tab}", query=f"?tab={tab}"))
    expect(page.get_by_text("Tail 3", exact=True)).to_be_visible()
    expect(page.get_by_text("Metered size 3.0 KiB", exact=True)).to_be_visible()


def test_a_stream_that_is_missing_takes_appends_only_where_they_create_it(
    server: ConsoleServer, page: Page
) -> None:
    page.goto(server.page("basins", BASIN, "missing"))
    expect(page.get_by_role("alert")).to_contain_text("'missing' does not exist")
    for name in ("Configure", "Trim", "Fence", "Delete stream", "Append"):
        expect(page.get_by_role("button", name=name, exact=True)).to_be_disabled()
    expect(page.get_by_role("link", name="its basin")).to_be_visible()
    server.create("creating-basin")
    creating = {"create_stream_on_append": True}
    server.http.patch("/v1/basins/creating-basin", json=creating).raise_for_status()
    page.goto(server.page("basins", "creating-basin", "missing"))
    page.get_by_role("button", name="Create by append").click()
    page.get_by_role("dialog").get_by_label("Body").fill("the first record")
    page.get_by_role("dialog").get_by_role("button", name="Append").click()
    expect(page.get_by_role("listbox").get_by_role("option")).to_contain_text("the first record")
    expect(page.get_by_role("button", name="Append", exact=True)).to_be_enabled()


def test_a_server_without_tokens_offers_no_log_out(server: ConsoleServer, page: Page) -> None:
    page.goto(server.page())
    page.evaluate("sessionStorage.setItem('streamfold-token', 'left from another server')")
    page.reload()
    expect(page.get_by_role("heading", name="Everything works")).to_be_visible()
    expect(page.get_by_role("button", name="Log out")).to_have_count(0)


def test_charts_show_what_was_before_the_page_was_opened(server: ConsoleServer, page: Page) -> None:
    page.goto(server.page())
    # The server reads its metrics every 15 s. `wait_for_function` does not await a promise.
    count = "fetch('history').then(async (got) => (await got.json()).readings.length)"
    while page.evaluate(count) <= 3:
        page.wait_for_timeout(500)
    # The page gets one reading of its own: with some, it could draw as much after half a minute.
    asked: list[Route] = []

    def answer_once(route: Route) -> None:
        asked.append(route)
        if len(asked) == 1:
            route.continue_()

    page.goto("about:blank")  # so that no reading of this page counts
    page.route("**/metrics", answer_once)
    page.goto(server.page())
    line = page.get_by_role("img", name="Memory, last hour").locator("path").last
    expect(line).to_have_attribute("d", re.compile(r"^M(\d\d?|1[0-4]\d)\."))


def test_a_server_without_basins_shows_the_first_steps(tmp_path: Path, page: Page) -> None:
    with ConsoleServer(tmp_path) as empty:
        page.goto(empty.page())
        expect(page.get_by_role("heading", name="First steps")).to_be_visible()
        expect(page.get_by_text("streamfold create-basin my-basin")).to_contain_text(empty.url)
        empty.create(BASIN)
        expect(page.get_by_role("heading", name="First steps")).to_have_count(0)


def test_the_overview_says_where_records_are_stored(server: ConsoleServer, page: Page) -> None:
    page.goto(server.page())
    expect(page.get_by_text(f"Location file://{server.folder}", exact=True)).to_be_visible()


def test_the_overview_counts_followers(server: ConsoleServer, page: Page, browser: Browser) -> None:
    other = browser.new_page()
    other.goto(server.page("basins", BASIN, STREAM))
    page.goto(f"{server.url}/console/")
    figure = page.locator(".figure", has_text="Followers")
    expect(figure.locator(".value")).to_have_text("1")
    other.close()
    expect(figure.locator(".value")).to_have_text("0")


@contextmanager
def repeated(action: Callable[[], None]) -> Iterator[None]:
    """Do something every second, at once for the first time."""
    over = Event()

    def repeat() -> None:
        while not over.wait(1):
            action()

    action()
    with ThreadPoolExecutor(1) as thread:
        repeating = thread.submit(repeat)
        try:
            yield
        finally:
            over.set()
        repeating.result()


def test_the_overview_leads_to_the_busiest_streams(server: ConsoleServer, page: Page) -> None:
    named = {"s2-basin": BASIN}
    name = "busy <b>stream</b>"
    path = f"/v1/streams/{quote(name, safe='')}"
    server.http.put(path, headers=named).raise_for_status()
    records = {"records": [{"body": "x" * 1000}] * 100}

    def append() -> None:
        server.http.post(f"{path}/records", json=records, headers=named).raise_for_status()

    with repeated(append):  # the list is of the last seconds, and a page may take longer
        page.goto(f"{server.url}/console/")
        row = page.locator(".busiest tbody tr").first
        expect(row).to_contain_text(f"{BASIN}/{name}")
        row.get_by_role("link").click()
        expect(page.get_by_role("heading", level=1)).to_have_text(name)


def test_the_overview_names_records_that_cannot_be_read(tmp_path: Path, page: Page) -> None:
    with ConsoleServer(tmp_path) as server:
        server.create(BASIN, STREAM)
        server.append([random.Random(n).randbytes(10_000) for n in range(40)])
        [file] = [path for path in (tmp_path / "chunks").rglob("*") if path.is_file()]
        file.write_bytes(bytes(file.stat().st_size))
        server.stop()
        server.start()
        path, named = f"/v1/streams/{STREAM}/records?seq_num=0", {"s2-basin": BASIN}
        assert server.http.get(f"{server.url}{path}", headers=named).status_code == 500
        page.goto(f"{server.url}/console/")
        expect(page.locator(".state")).to_contain_text("Storage is damaged: 1 place")
        row = page.locator(".damage tbody tr").first
        expect(row).to_contain_text(f"of stream '{STREAM}' in basin '{BASIN}' cannot be read")
        expect(row).to_contain_text(file.relative_to(tmp_path).as_posix())


def test_the_overview_does_not_claim_that_a_server_works_which_is_away(
    tmp_path: Path, page: Page
) -> None:
    with ConsoleServer(tmp_path) as server:
        page.goto(f"{server.url}/console/")
        expect(page.get_by_role("heading", name="Everything works")).to_be_visible()
        server.stop()
        expect(page.get_by_role("heading", name="Something needs attention")).to_be_visible()
        expect(page.get_by_text("The server does not respond.")).to_be_visible()
        server.start()
        expect(page.get_by_role("heading", name="Everything works")).to_be_visible()


def test_what_does_not_exist_is_said_once(server: ConsoleServer, page: Page) -> None:
    for parts in ((BASIN, "not-there"), ("not-there-basin",)):
        page.goto(server.page("basins", *parts))
        expect(page.get_by_role("alert").first).to_contain_text("does not exist")
        page.wait_for_load_state("networkidle")
        expect(page.get_by_role("alert")).to_have_count(1)
        expect(page.get_by_text("Opening")).to_have_count(0)


def test_the_page_of_tables_says_how_to_see_some(server: ConsoleServer, page: Page) -> None:
    page.goto(server.page("tables"))
    expect(page.get_by_text("--tables FOLDER")).to_be_visible()


def test_records_of_a_stream_are_counted_by_their_time(server: ConsoleServer, page: Page) -> None:
    server.create(BASIN, "timed")
    now = int(time.time() * 1000)
    server.append([b"x"] * 3, "timed", timestamps=[now - 90 * 60_000] * 3)
    server.append([b"x"] * 40, "timed", timestamps=[now - 30 * 60_000] * 40)
    server.append([b"x"] * 2, "timed", timestamps=[now] * 2)
    page.goto(server.page("basins", BASIN, "timed", query="?tab=usage"))
    plot = page.locator("section.card").filter(has_text="Records by time")
    expect(plot).to_contain_text("42 in all")
    assert sorted(plot.locator("rect title").all_text_contents(), key=len)[0].endswith(": 2")
    page.get_by_role("button", name="1 day").click()
    expect(plot).to_contain_text("45 in all")


def test_servers_are_shown_with_their_states(tmp_path: Path, page: Page) -> None:
    away = f"http://127.0.0.1:{free_port()}"
    with (
        ConsoleServer(tmp_path / "other") as other,
        ConsoleServer(tmp_path / "data", ["--server", other.url, "--server", away]) as server,
    ):
        page.goto(server.page())
        page.get_by_role("link", name="Servers").click()
        expect(page.get_by_role("row").filter(has_text="this server")).to_contain_text("active")
        expect(page.get_by_role("row").filter(has_text=other.url)).to_contain_text("active, too")
        expect(page.get_by_role("row").filter(has_text=away)).to_contain_text(
            "it cannot be reached"
        )
        expect(page.get_by_text((tmp_path / "data").as_uri())).to_be_visible()
