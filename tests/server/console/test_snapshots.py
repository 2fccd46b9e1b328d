"""The Snapshots tab: snapshots on the server, in the stream, and elsewhere."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from streamfold.follow import SnapshotTaker, external, in_stream
from tests.sdk import sdk_client
from tests.server.console.conftest import BASIN, ConsoleServer

NOT_HERE = (
    "Snapshots that applications store elsewhere, in a folder or a bucket, are not visible here."
)


def take_snapshot(server: ConsoleServer, stream: str, snapshots: Any, size: int = 10) -> None:
    """Have an application take a snapshot of a state of so many bytes."""

    async def take() -> None:
        async with sdk_client(server.url) as s2:
            fold, handle = (lambda state, record: state), s2.basin(BASIN).stream(stream)
            async with SnapshotTaker(
                handle, fold=fold, initial=lambda: "x" * size, snapshots=snapshots
            ) as taker:
                await taker.take()

    with ThreadPoolExecutor(1) as thread:  # the browser's loop runs in this one
        thread.submit(asyncio.run, take()).result()


def inside(page: Page) -> Locator:
    return page.locator("section.card").filter(has_text="Stored in the stream")


@pytest.mark.parametrize(
    ("shape", "size", "codec", "shown"),
    [
        ("streamfold", 10, "json", "12 B"),
        ("plain", 10, "json", "B"),
        ("streamfold", 3 << 20, "json", "3.0 MiB"),
    ],
    ids=["one record", "plain", "framed"],
)
def test_a_snapshot_in_the_stream_is_shown(
    server: ConsoleServer, page: Page, shape: str, size: int, codec: str, shown: str
) -> None:
    stream = f"inside-{shape}-{size}"
    server.create(BASIN, stream)
    server.append([b"change"] * 40, stream)
    take_snapshot(server, stream, in_stream(shape=shape, trim=False), size)
    server.append([b"change"] * 3, stream)
    page.goto(server.page("basins", BASIN, stream, query="?tab=snapshots"))
    row = inside(page).locator("tbody tr")
    expect(row).to_have_count(1)
    expect(row.locator("td").nth(1)).to_have_text("40")
    expect(row).to_contain_text(codec)
    expect(row).to_contain_text(shown)
    expect(row).not_to_contain_text("incomplete")
    expect(page.get_by_text("No snapshot is stored with this stream. The newest")).to_be_visible()
    expect(page.get_by_text("There is no snapshot")).to_have_count(0)
    row.get_by_role("button", name="Show snapshot at").click()
    expect(page.get_by_role("dialog")).to_contain_text("xxxxxxxxxx")
    page.get_by_role("button", name="Close").click()
    with page.expect_download() as download:
        row.get_by_role("button", name="Download snapshot at").click()
    assert (b"x" * size) in Path(download.value.path()).read_bytes()
    row.get_by_role("link").click()
    expect(
        page.get_by_text("codec json" if shape != "plain" else "covers_before").first
    ).to_be_visible()


def test_the_tab_does_not_claim_that_there_is_no_snapshot_elsewhere(
    server: ConsoleServer, page: Page, tmp_path: Path
) -> None:
    server.create(BASIN, "outside")
    server.append([b"change"] * 5, "outside")
    take_snapshot(server, "outside", external(tmp_path.as_uri()))
    assert list(tmp_path.rglob("*")), "the application has a snapshot"
    page.goto(server.page("basins", BASIN, "outside", query="?tab=snapshots"))
    expect(inside(page)).to_contain_text("No snapshot among all records.")
    expect(page.get_by_text(NOT_HERE)).to_be_visible()
    expect(page.get_by_text("a reader without one gets all records, up to 5")).to_be_visible()


def test_a_snapshot_far_from_the_tail_is_found_by_looking_further_back(
    server: ConsoleServer, page: Page
) -> None:
    server.create(BASIN, "deep")
    server.append([b"change"] * 5, "deep")
    take_snapshot(server, "deep", in_stream(trim=False))
    for _ in range(12):
        server.append([b"change"] * 1000, "deep")
    page.goto(server.page("basins", BASIN, "deep", query="?tab=snapshots"))
    expect(inside(page)).to_contain_text("No snapshot among the newest 9,282 records.")
    further = inside(page).get_by_role("button", name="Look further back")
    further.click()
    expect(inside(page).locator("tbody tr")).to_have_count(1)
    expect(further).to_have_count(0)


def test_a_snapshot_that_is_being_written_or_was_cut_off_is_incomplete(
    server: ConsoleServer, page: Page
) -> None:
    server.create(BASIN, "cut")
    first = [(b"streamfold-snapshot", b"s1"), (b"streamfold-version", b"1"),
             (b"streamfold-index", b"0"), (b"streamfold-covers-before", b"here"),
             (b"streamfold-codec", b"json")]  # fmt: skip
    server.append([b"part"], "cut", headers=first)
    page.goto(server.page("basins", BASIN, "cut", query="?tab=snapshots"))
    expect(inside(page).locator("tbody tr")).to_contain_text("incomplete")
    expect(page.get_by_text("a reader without one gets all records")).to_be_visible()
