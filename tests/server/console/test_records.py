"""The record browser in a real browser: live, safe with hostile records, and fast."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect

from tests.proving import PROVING
from tests.server.console.conftest import BASIN, STREAM, ConsoleServer


def rows(page: Page) -> Locator:
    """The records that are drawn."""
    return page.get_by_role("listbox", name="Records").get_by_role("option")


def test_a_new_record_appears_without_a_reload(server: ConsoleServer, page: Page) -> None:
    page.goto(server.page("basins", BASIN, STREAM))
    expect(page.get_by_role("button", name="Live")).to_be_enabled()
    server.append([b"hello from afar"])
    expect(rows(page).filter(has_text="hello from afar")).to_be_visible()


def test_a_record_is_appended_from_the_page(server: ConsoleServer, page: Page) -> None:
    page.goto(server.page("basins", BASIN, STREAM))
    page.get_by_role("button", name="Append", exact=True).click()
    dialog = page.get_by_role("dialog", name="Append")
    dialog.get_by_label("Body").fill('{"id": 12345678901234567890}')
    dialog.get_by_role("button", name="Add header").click()
    dialog.get_by_label("Header name").fill("trace")
    dialog.get_by_label("Header value").fill("t-1")
    dialog.get_by_role("button", name="Append").click()
    expect(dialog).to_be_hidden()
    rows(page).filter(has_text="12345678901234567890").click()
    detail = page.get_by_role("complementary")
    expect(detail.get_by_role("row", name="trace t-1")).to_be_visible()
    expect(detail.locator(".json-number")).to_have_text("12345678901234567890")


def test_bytes_and_files_are_appended_from_the_page(
    server: ConsoleServer, page: Page, tmp_path: Path
) -> None:
    server.create(BASIN, "bytes")
    page.goto(server.page("basins", BASIN, "bytes"))
    dialog = page.get_by_role("dialog", name="Append")
    page.get_by_role("button", name="Append", exact=True).click()
    dialog.get_by_role("button", name="Hex").click()
    dialog.get_by_label("Body", exact=True).fill("00 f")
    dialog.get_by_role("button", name="Append").click()
    expect(dialog.get_by_role("alert")).to_contain_text("is not hexadecimal")
    dialog.get_by_label("Body", exact=True).fill("00 ff\nFE")
    dialog.get_by_role("button", name="Append").click()
    expect(dialog).to_be_hidden()
    expect(rows(page)).to_contain_text("00 ff fe")
    (tmp_path / "one").write_bytes(b"\x01\xff")
    (tmp_path / "two").write_bytes(b"first\nsecond\n")
    page.get_by_role("button", name="Append", exact=True).click()
    dialog.get_by_label("or files").set_input_files([tmp_path / "one", tmp_path / "two"])
    dialog.get_by_role("button", name="Append").click()
    expect(rows(page)).to_have_count(3)
    path, named = "/v1/streams/bytes/records?seq_num=0", {"s2-basin": BASIN, "s2-format": "base64"}
    read = server.http.get(path, headers=named).json()["records"]
    bodies = [base64.b64decode(record["body"]) for record in read]
    assert bodies == [b"\x00\xff\xfe", b"\x01\xff", b"first\nsecond\n"]


def test_a_filter_is_in_the_link_begins_where_it_is_told_and_its_matches_are_saved(
    server: ConsoleServer, page: Page, tmp_path: Path
) -> None:
    server.create(BASIN, "searched")
    server.append([b"pear %d" % number for number in range(20)], "searched", [(b"k", b"v")])
    server.append([b"pear \xff"], "searched")
    page.goto(server.page("basins", BASIN, "searched"))
    page.get_by_label("Filter records").fill("pear")
    expect(page.get_by_role("status").filter(has_text="21 matches")).to_be_visible()
    jump = page.get_by_role("form", name="Go to")
    jump.get_by_label("seq_num", exact=True).fill("18")
    jump.get_by_role("button", name="Search from").click()
    found = page.get_by_role("status").filter(has_text="3 of 3 read, from 18")
    expect(found).to_be_visible()
    page.goto("about:blank")
    page.go_back()
    expect(page.get_by_label("Filter records")).to_have_value("pear")
    expect(found).to_contain_text("3 matches")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download matches").click()
    download.value.save_as(tmp_path / "matches.jsonl")
    lines = (tmp_path / "matches.jsonl").read_text().splitlines()
    first, _, last = map(json.loads, lines)
    assert (first["seq_num"], first["body"], first["headers"]) == (18, "pear 18", [["k", "v"]])
    assert (last["encoding"], base64.b64decode(last["body"])) == ("base64", b"pear \xff")
    rows(page).last.click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Download", exact=True).click()
    assert download.value.suggested_filename == "searched-20.bin"
    download.value.save_as(tmp_path / "body")
    assert (tmp_path / "body").read_bytes() == b"pear \xff"


def test_the_latest_record_of_each_key_is_shown_and_stays_current(
    server: ConsoleServer, page: Page
) -> None:
    server.create(BASIN, "prices")
    prices = [("pear", 5), ("apple", 3), ("pear", 7)]
    server.append([b'{"item": "%s", "cents": %d}' % (name.encode(), cents) for name, cents in prices],
                  "prices")  # fmt: skip
    page.goto(server.page("basins", BASIN, "prices", query="?tab=latest"))
    page.get_by_label("Key").fill("item")
    page.get_by_role("button", name="Show latest records").click()
    expect(page.get_by_role("alert")).to_contain_text('"item" is not a key')
    page.get_by_label("Key").fill("$.item")
    page.get_by_role("button", name="Show latest records").click()
    table = page.get_by_role("row")
    expect(table.nth(1)).to_contain_text("apple")
    expect(table.nth(2)).to_contain_text('"cents": 7')
    expect(page.get_by_role("status").filter(has_text="3 of 3 read")).to_be_visible()
    server.append([b'{"item": "apple", "cents": 4}'], "prices")
    expect(table.nth(1)).to_contain_text('"cents": 4')
    page.reload()
    expect(page.get_by_role("heading", name="2 keys")).to_be_visible()
    page.get_by_role("link", name="3", exact=True).click()
    expect(page.get_by_role("complementary", name="Record 3")).to_be_visible()


def test_what_records_hold_is_shown_as_text(server: ConsoleServer, page: Page) -> None:
    hostile = b"<img src=x onerror=alert(1)><script>alert(2)</script>"
    stream = "<b>bold</b>\"'&%2F/../x"
    server.create(BASIN, stream)
    server.append([hostile, json.dumps({hostile.decode(): hostile.decode()}).encode()], stream,
                  [(hostile, hostile)])  # fmt: skip
    page.goto(server.page("basins", BASIN))
    page.get_by_role("link", name=stream, exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(stream)
    for row in range(2):
        rows(page).nth(row).click()
        detail = page.get_by_role("complementary")
        expect(detail.get_by_role("row")).to_contain_text(hostile.decode())
        expect(detail.locator("pre, .json")).to_contain_text("onerror=alert(1)")
    expect(page.locator("main :is(img, script, b):not(.facts b)")).to_have_count(0)
    expect(page).to_have_title(f"{stream} · Streamfold")


def test_a_stream_that_calls_itself_a_page_runs_nothing(server: ConsoleServer, page: Page) -> None:
    script = b"<p>stored</p><script>document.title = 'ran'; alert(1)</script>"
    address = f"/{BASIN}/page"
    server.http.put(address, content=script, headers={"content-type": "text/html"})
    with page.expect_console_message(lambda message: "sandboxed" in message.text):
        page.goto(server.url + address)
    expect(page.get_by_text("stored")).to_be_visible()
    assert page.title() != "ran"


def test_a_link_opens_the_record_that_it_names(server: ConsoleServer, page: Page) -> None:
    stream = filled(server, "linked", 500)
    page.goto(server.page("basins", BASIN, stream, query="?seq=250"))
    expect(page.get_by_role("complementary", name="Record 250")).to_be_visible()
    expect(rows(page).filter(has_text="number 250.")).to_be_visible()


def test_a_link_to_a_trimmed_record_says_so_and_shows_the_oldest(
    tmp_path: Path, page: Page
) -> None:
    with ConsoleServer(tmp_path, ["--trim-grace", "0"]) as server:
        server.create(BASIN)
        stream = filled(server, "trimmed", 30)
        trim = {"headers": [["", "trim"]], "body": "\x00" * 7 + "\x14"}
        path, named = f"/v1/streams/{stream}/records", {"s2-basin": BASIN}
        server.http.post(path, json={"records": [trim]}, headers=named).raise_for_status()
        page.goto(server.page("basins", BASIN, stream, query="?seq=5"))
        expect(page.get_by_role("alert")).to_have_text(
            "Record 5 was trimmed: the oldest record is 20."
        )
        expect(rows(page).first).to_contain_text("number 20.")
        page.get_by_label("Filter records").fill("number")
        expect(page.get_by_role("status").filter(has_text="11 of 11 read")).to_be_visible()
        expect(page.get_by_role("button", name="Live", exact=True)).to_be_visible()


def test_the_list_goes_to_a_seq_num_a_time_and_back_from_the_tail(
    server: ConsoleServer, page: Page
) -> None:
    stream = filled(server, "sought", 900)
    page.goto(server.page("basins", BASIN, stream))
    expect(rows(page).filter(has_text="number 899.")).to_be_visible()
    jump = page.get_by_role("form", name="Go to")
    for kind, what, text, shown in (
        ("seq_num", "seq_num", "100", 100),
        ("back", "Records from the tail", "400", 500),
        ("time", "Time", "2026-01-01T00:00:00.300", 300),
    ):
        jump.get_by_role("combobox").select_option(kind)
        jump.get_by_label(what, exact=True).fill(text)
        jump.get_by_role("button", name="Go").click()
        expect(rows(page).filter(has_text=f"number {shown}.")).to_be_in_viewport()
    page.get_by_role("button", name="To the tail").click()
    expect(rows(page).filter(has_text="number 899.")).to_be_in_viewport()


def test_a_list_that_was_scrolled_up_is_not_called_live(server: ConsoleServer, page: Page) -> None:
    stream = filled(server, "scrolled", 300)
    page.goto(server.page("basins", BASIN, stream))
    live = page.get_by_role("button", name="Live", exact=True)
    expect(live).to_have_attribute("aria-pressed", "true")
    expect(rows(page).filter(has_text="number 299.")).to_be_visible()
    page.get_by_role("listbox").hover()
    page.mouse.wheel(0, -3000)
    follow = page.get_by_role("button", name="Follow", exact=True)
    expect(follow).to_have_attribute("aria-pressed", "false")
    server.append([b"below the view"], stream)
    expect(page.get_by_role("status").filter(has_text="tail 301")).to_be_visible()
    expect(follow).to_be_visible()
    follow.click()
    expect(live).to_have_attribute("aria-pressed", "true")
    expect(rows(page).filter(has_text="below the view")).to_be_in_viewport()


def test_a_seq_num_without_a_record_is_reported(server: ConsoleServer, page: Page) -> None:
    stream = filled(server, "short", 30)
    page.goto(server.page("basins", BASIN, stream))
    jump = page.get_by_role("form", name="Go to")
    jump.get_by_label("seq_num", exact=True).fill("99999")
    jump.get_by_role("button", name="Go").click()
    expect(page.get_by_role("alert")).to_have_text("There is no record 99,999 yet: the tail is 30.")
    jump.get_by_label("seq_num", exact=True).fill("3")
    jump.get_by_role("button", name="Go").click()
    expect(page.get_by_role("alert")).to_have_count(0)


def test_columns_have_headings_and_times_their_zone(
    browser: Browser, server: ConsoleServer
) -> None:
    server.create(BASIN, "zoned")
    server.append([b"x" * 100], "zoned", timestamps=[1_767_225_600_000])
    context = browser.new_context(timezone_id="Asia/Kolkata")
    shown = context.new_page()
    shown.goto(server.page("basins", BASIN, "zoned"))
    headings = shown.locator(".headings")
    for heading in ("seq_num", "Time, UTC+05:30", "Record", "Body"):
        expect(headings).to_contain_text(heading)
    row = rows(shown).first
    expect(row).to_contain_text("2026-01-01 05:30:00.000")
    expect(row.locator(".size")).to_have_text("100 B")
    row.click()
    detail = shown.get_by_role("complementary")
    expect(detail).to_contain_text("2026-01-01 05:30:00.000 UTC+05:30")
    expect(detail).to_contain_text("100 B body, 108 B metered with headers")
    context.close()


def test_a_time_to_go_to_fits_its_field(server: ConsoleServer, page: Page) -> None:
    stream = filled(server, "timed", 3)
    page.goto(server.page("basins", BASIN, stream))
    jump = page.get_by_role("form", name="Go to")
    jump.get_by_role("combobox").select_option("time")
    field = jump.get_by_label("Time", exact=True)
    field.fill("2026-12-31T22:58:58.888")
    # As wide as the browser draws it when nothing limits it, with its own button.
    natural = field.evaluate(
        """(field) => {
          const copy = field.cloneNode();
          copy.value = field.value;
          copy.style.setProperty("width", "max-content", "important");
          field.after(copy);
          const { width } = copy.getBoundingClientRect();
          copy.remove();
          return width;
        }"""
    )
    box = field.bounding_box()
    assert box is not None
    assert box["width"] >= natural


def test_a_press_selects_the_record_below_it_though_the_list_moves_before_the_release(
    server: ConsoleServer, page: Page
) -> None:
    stream = filled(server, "moving", 40)
    page.goto(server.page("basins", BASIN, stream))
    expect(rows(page).filter(has_text="number 39.")).to_be_in_viewport()
    rows(page).filter(has_text="number 35.").hover()
    page.mouse.down()
    expect(page.get_by_role("complementary", name="Record 35")).to_be_visible()
    server.append([b"number %d." % number for number in range(40, 60)], stream)
    expect(rows(page).filter(has_text="number 40.")).to_be_attached()
    page.mouse.up()
    expect(page.get_by_role("complementary", name="Record 35")).to_be_visible()


def test_a_record_that_is_pressed_before_it_is_loaded_is_shown_once_it_is(
    server: ConsoleServer, page: Page
) -> None:
    server.create(BASIN, "slow")
    server.append([b"zero", b"one", b"two"], "slow")
    held: list[Route] = []
    holding = True

    def hold(route: Route) -> None:
        if holding:
            held.append(route)
        else:
            route.continue_()

    page.route(re.compile("/streams/slow/records.*count=(?!1$)"), hold)
    page.goto(server.page("basins", BASIN, "slow"))
    rows(page).nth(1).click()
    expect(rows(page).nth(1)).to_have_attribute("aria-selected", "true")
    holding = False
    for route in held:
        route.continue_()
    expect(page.get_by_role("complementary")).to_contain_text("one")


def test_a_paused_list_continues_where_it_stopped(server: ConsoleServer, page: Page) -> None:
    stream = filled(server, "paused", 5)
    page.goto(server.page("basins", BASIN, stream))
    page.get_by_role("button", name="Live").click()
    expect(page.get_by_role("button", name="Paused")).to_be_visible()
    server.append([b"while it was paused"], stream)
    page.get_by_role("button", name="Paused").click()
    expect(rows(page).filter(has_text="while it was paused")).to_be_visible()
    expect(rows(page)).to_have_count(6)


@pytest.mark.parametrize(
    ("term", "matches"),
    [
        ("PEAR", ["pear"]),
        ("header:kind=fru", ["apple", "pear"]),
        ("$.price>3", ["pear"]),
        ("$.price>=3 $.price<=3", ["apple"]),
        ("$.name==pear", ["pear"]),
        ("$.tags[0]=new $.name", ["apple"]),
        ('"no such text"', []),
    ],
)
def test_a_filter_keeps_what_matches(
    server: ConsoleServer, page: Page, term: str, matches: list[str]
) -> None:
    stream = "filtered"
    server.create(BASIN, stream)
    if server.tail(stream) == 0:
        apple, pear = {"name": "apple", "price": 3, "tags": ["new"]}, {"name": "pear", "price": 4}
        server.append([json.dumps(apple).encode(), json.dumps(pear).encode()], stream,
                      [(b"kind", b"fruit")])  # fmt: skip
        server.append([b"plain text"], stream)
    page.goto(server.page("basins", BASIN, stream))
    expect(rows(page)).to_have_count(3)
    page.keyboard.press("/")
    page.keyboard.type(term)
    expect(page.get_by_role("status").filter(has_text="3 of 3 read")).to_be_visible()
    expect(rows(page)).to_have_count(len(matches))
    for row, name in enumerate(matches):
        expect(rows(page).nth(row)).to_contain_text(name)


def test_a_malformed_filter_is_explained_and_can_be_corrected(
    server: ConsoleServer, page: Page
) -> None:
    stream = filled(server, "corrected", 3)
    page.goto(server.page("basins", BASIN, stream))
    page.get_by_label("Filter records").fill("$.[")
    expect(page.get_by_role("alert")).to_contain_text("is not a JSON path")
    expect(page.get_by_text("Opening")).to_have_count(0)
    page.get_by_label("Filter records").fill("")
    expect(page.get_by_role("alert")).to_be_hidden()
    expect(rows(page)).to_have_count(3)


def test_many_records_are_scrolled_with_few_rows_drawn(server: ConsoleServer, page: Page) -> None:
    count = 100_000 if PROVING else 20_000
    stream = filled(server, "many", count)
    page.goto(server.page("basins", BASIN, stream))
    expect(rows(page).filter(has_text=f"number {count - 1}.")).to_be_visible()
    records = page.get_by_role("listbox", name="Records")
    for part in (0.75, 0.5, 0.25, 0.0):
        records.evaluate("(list, part) => { list.scrollTop = part * list.scrollHeight }", part)
        first = int(part * count)
        expect(rows(page).filter(has_text=f"number {first}.")).to_be_in_viewport()
        assert rows(page).count() < 100
    records.press("ArrowDown")
    records.press("PageDown")
    expect(page.get_by_role("complementary")).to_be_visible()
    records.press("Escape")
    expect(page.get_by_role("complementary")).to_be_hidden()


@pytest.mark.parametrize("kind", ["text", "json", "binary"])
def test_a_record_of_a_mebibyte_is_shown_in_part(
    server: ConsoleServer, page: Page, kind: str
) -> None:
    size = 1_000_000
    bodies = {"text": b"x" * size, "json": b"[%s1]" % (b"1," * (size // 2)), "binary": bytes(size)}
    stream = f"large-{kind}"
    server.create(BASIN, stream)
    server.append([bodies[kind]], stream)
    page.goto(server.page("basins", BASIN, stream, query="?seq=0"))
    detail = page.get_by_role("complementary")
    expect(detail.get_by_role("button", name="Show more")).to_be_visible()
    assert page.locator("*").count() < 2_000
    detail.get_by_role("button", name="Hex").click()
    hexadecimal = detail.locator("pre.hex")
    expect(hexadecimal).to_contain_text("000010")
    assert hexadecimal.evaluate("(shown) => shown.scrollWidth <= shown.clientWidth")


def test_a_server_that_goes_away_and_returns_is_shown_and_survived(
    server: ConsoleServer, page: Page
) -> None:
    stream = filled(server, "survivor", 3)
    page.goto(server.page("basins", BASIN, stream))
    expect(rows(page)).to_have_count(3)
    expect(page.get_by_text("Size ")).to_be_visible()
    before = rows(page).first.bounding_box()
    server.stop()
    away = page.get_by_role("status").filter(has_text="cannot be reached")
    expect(away).to_be_visible()
    assert rows(page).first.bounding_box() == before
    server.start()
    expect(away).to_be_hidden()
    server.append([b"after the restart"], stream)
    expect(rows(page).filter(has_text="after the restart")).to_be_visible()


@pytest.mark.parametrize("form", ["curl", "CLI", "Python"])
def test_a_copied_command_reads_the_record(server: ConsoleServer, page: Page, form: str) -> None:
    stream = 'it\'s a "name"'
    server.create(BASIN, stream)
    server.append([b"found by a command"], stream)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto(server.page("basins", BASIN, stream, query="?seq=0"))
    page.get_by_role("complementary").get_by_role("button", name=form).click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    text = page.evaluate("navigator.clipboard.readText()")
    command = ["sh", "-c", text.replace("streamfold ", f"{sys.executable} -m streamfold.cli.main ")]
    if form == "Python":
        command = [sys.executable, "-c", text]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "found by a command" in done.stdout, done.stderr


def filled(server: ConsoleServer, stream: str, count: int) -> str:
    """A stream of so many numbered records, a millisecond apart from the beginning of 2026."""
    server.create(BASIN, stream)
    start = int(datetime(2026, 1, 1).astimezone().timestamp() * 1000)
    for first in range(server.tail(stream), count, 1000):
        numbers = range(first, min(first + 1000, count))
        bodies = [f"number {number}.".encode() for number in numbers]
        server.append(bodies, stream, timestamps=[start + number for number in numbers])
    return stream


def test_a_protobuf_body_and_a_frame_of_a_snapshot_are_decoded(
    server: ConsoleServer, page: Page
) -> None:
    # Field 1: 300; field 2: text; field 3: a message with field 1: 2**63, and bytes that are no text.
    large = b"\x08\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01\x12\x02\x00\xff"
    body = b"\x08\xac\x02\x12\x06<b>hi\x00\x1a" + bytes([len(large)]) + large
    frame = [(b"streamfold-snapshot", b"s1"), (b"streamfold-index", b"0"),
             (b"streamfold-covers-before", b"7"), (b"streamfold-codec", b"json")]  # fmt: skip
    server.create(BASIN, "protobuf")
    server.append([body], "protobuf", frame)
    page.goto(server.page("basins", BASIN, "protobuf", query="?seq=0"))
    detail = page.get_by_role("complementary")
    expect(detail).to_contain_text(
        "record 0 of snapshot s1, covers everything before 7, codec json"
    )
    detail.get_by_role("button", name="Protobuf").click()
    expect(detail.locator(".json")).to_contain_text("1: 300")
    expect(detail.locator(".json")).to_contain_text("9223372036854775808")
    expect(detail.locator(".json")).to_contain_text("00 ff")
