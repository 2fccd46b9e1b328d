"""The record browser in a real browser: live, inert whatever records hold, and quick with many."""

from __future__ import annotations

import json

from playwright.sync_api import Locator, Page, expect

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
    assert (
        page.locator("main img, main script, main b").count()
        == page.locator("main .facts b").count()
    )
    assert page.title() == f"{stream} · Streamfold"
