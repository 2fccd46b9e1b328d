"""Takes the screenshots of the console in `docs/console`: `python docs/_site/screenshots.py [PAGE …]`.

A server of its own, filled with a small shop, is shown in Chromium: each page light and dark, wide and
as narrow as a phone.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
from PIL import Image
from playwright.sync_api import Page, ViewportSize, sync_playwright

from streamfold.archive import ArchiveWriter, Destination, TableSchema
from streamfold.archive.formats import ParquetFormat

FOLDER = Path(__file__).parents[1] / "console"
BASIN, STREAM, TOKEN = "shop-basin", "orders", "root-token-of-the-screenshots"
SIZES = {"wide": (1280, 800), "narrow": (380, 760)}
#: Pages that are longer than a screen, and shown whole.
LONG = ("overview", "table", "first-steps")
#: Milliseconds that a page may take on a busy machine.
TIMEOUT = 180_000
#: Milliseconds that a page takes to show a chart or a rate.
WAITS = {"overview": 8_000, "basin": 7_000, "groups": 7_000, "usage": 1_500}
STATES = ("new", "paid", "packed", "sent")


class Shop:
    """A server with streams, snapshots, tokens, and a table that is published."""

    def __init__(self, port: int, token: str = "") -> None:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self.url = f"http://127.0.0.1:{port}"
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=60)
        self._random = random.Random(7)  # noqa: S311 - the same orders every time
        self._orders = 0

    def fill(self) -> None:
        for basin in (BASIN, "agents-basin", "sensor-basin"):
            self._http.put(f"/v1/basins/{basin}").raise_for_status()
        for stream in (STREAM, "payments", "shipments", "sessions/42", "sessions/43"):
            path = f"/v1/streams/{stream.replace('/', '%2F')}"
            self._http.put(path, headers={"s2-basin": BASIN}).raise_for_status()
        for _ in range(40):
            self.append(5)
        for position in (100, 150):
            state = json.dumps({"open": position // 4, "sent": position // 2})
            path = f"/v1/streams/{STREAM}/snapshot/{position}"
            json_type = {"s2-basin": BASIN, "content-type": "application/json"}
            self._http.put(path, headers=json_type, content=state).raise_for_status()
        self.keep_snapshot()
        self.fill_invoices()
        everything = {"prefix": ""}
        for name, streams in (("reader", everything), ("agents", {"prefix": "sessions/"})):
            scope = {"basins": everything, "streams": streams, "ops": ["read", "check-tail"]}
            self._http.post("/v1/access-tokens", json={"id": name, "scope": scope})

    def keep_snapshot(self) -> None:
        """Keep a snapshot in the stream itself, as applications do."""
        body = json.dumps(dict.fromkeys(STATES, 50))
        headers = {
            "snapshot": "01JD", "version": "1", "index": "0", "covers-before": "here",
            "codec": "json", "final": "1", "bytes": str(len(body)),
        }  # fmt: skip
        named = [[f"streamfold-{name}", value] for name, value in headers.items()]
        records = {"records": [{"body": body, "headers": named}]}
        path = f"/v1/streams/{STREAM}/records"
        self._http.post(path, json=records, headers={"s2-basin": BASIN}).raise_for_status()

    def fill_invoices(self) -> None:
        """A stream with producers, and forks of it."""
        kind, path = {"content-type": "application/json"}, f"/{BASIN}/invoices"
        self._http.put(path, headers=kind).raise_for_status()
        for name, epoch, count in (("billing-eu", 3, 14), ("billing-us", 1, 9), ("refunds", 0, 4)):
            for seq in range(count):
                sent = {"producer-id": name, "producer-epoch": str(epoch), "producer-seq": str(seq)}
                body = json.dumps([{"invoice": seq, "from": name}])
                self._http.post(path, headers=kind | sent, content=body).raise_for_status()
        for name, source, at in (
            ("invoices-audit", "invoices", 14), ("invoices-test", "invoices", 23),
            ("invoices-test-2", "invoices-test", 20),
        ):  # fmt: skip
            offset = f"{at:016d}_{0:016d}"
            fork = {"stream-forked-from": f"/{BASIN}/{source}", "stream-fork-offset": offset}
            self._http.put(f"/{BASIN}/{name}", headers=kind | fork).raise_for_status()

    def append(self, count: int, stream: str = STREAM) -> None:
        """Append some changes of orders."""
        records = []
        for _ in range(count):
            order = self._random.randrange(60)
            body = {"id": order, "state": self._random.choice(STATES), "total": order * 7 % 90 + 5}
            headers = [["trace", f"{self._orders:06x}"]]
            records.append({"body": json.dumps(body), "headers": headers})
            self._orders += 1
        path, named = f"/v1/streams/{stream}/records", {"s2-basin": BASIN}
        self._http.post(path, json={"records": records}, headers=named).raise_for_status()


async def publish(folder: Path) -> None:
    """Write a table with two epochs."""
    schema = TableSchema.of(
        pa.schema([("id", pa.int64()), ("state", pa.string()), ("total", pa.int64())]), ["id"]
    )
    destination = Destination.open(f"{folder.as_uri()}/orders")
    writer = await ArchiveWriter.open(
        "public.orders", schema, [destination], formats=[ParquetFormat()], writer_id="shop"
    )
    orders: dict[int, dict[str, Any]] = {
        n: {"id": n, "state": "new", "total": n * 7 % 90 + 5} for n in range(40)
    }

    def table() -> list[pa.RecordBatch]:
        return [pa.RecordBatch.from_pylist(list(orders.values()), schema=schema.arrow)]

    await writer.write_base(table(), "100", reason="first")
    position = 100
    for part in range(8):
        changed = [orders[n] | {"state": STATES[part % 4]} for n in range(part, 40, 5)]
        orders |= {row["id"]: row for row in changed}
        changes = [
            {"action": "UPDATE", "key": {"id": row["id"]}, "before": None, "after": row}
            for row in changed
        ]
        batch = pa.RecordBatch.from_pylist(changes, schema=schema.changes)
        until = position + 40 + 15 * part
        if part == 4:
            await writer.rebase(table(), [batch], str(until), reason="max_diff_fraction")
        else:
            await writer.write_diff([batch], str(position), str(until))
        position = until


@contextmanager
def publishing() -> Iterator[str]:
    """A folder below which the table is."""
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(publish(Path(folder)))
        yield folder


@contextmanager
def serving(*options: str) -> Iterator[int]:
    """A server in a process of its own; its port."""
    command = [sys.executable, "-m", "streamfold.cli.main", "serve", "--json", "--port=0"]
    command += ["--host=127.0.0.1", "--no-access-log", *options]
    environment = {**os.environ, "STREAMFOLD_ROOT_TOKEN": TOKEN}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)  # noqa: S603
    with server:
        try:
            yield json.loads(server.stdout.readline())["port"] if server.stdout else 0
        finally:
            server.terminate()


def wait_for(text: str) -> Callable[[Page], None]:
    return lambda page: page.get_by_text(text).first.wait_for()


def show_record(page: Page) -> None:
    page.get_by_role("listbox", name="Records").get_by_role("option").nth(3).click()
    page.get_by_role("complementary").wait_for()


def open_append(page: Page) -> None:
    page.get_by_role("button", name="Append", exact=True).click()
    page.get_by_role("dialog").wait_for()


def show_table(page: Page) -> None:
    page.get_by_text("What changed").wait_for()
    page.get_by_text("reading …").first.wait_for(state="hidden")


def pages(tables: Path) -> dict[str, tuple[str, Callable[[Page], None]]]:
    """The address of each page, and how to wait until it has everything."""
    table = f"tables/{f'{tables.as_uri()}/orders/'.replace('/', '%2F').replace(':', '%3A')}"
    stream = f"basins/{BASIN}/{STREAM}"
    return {
        "overview": ("", wait_for("Everything works")),
        "basins": ("basins", wait_for(BASIN)),
        "basin": (f"basins/{BASIN}", wait_for("payments")),
        "records": (stream, show_record),
        "append": (stream, open_append),
        "latest": (f"{stream}?tab=latest&key=%24.id", wait_for("60 keys")),
        "snapshots": (f"{stream}?tab=snapshots", wait_for("Covers all before")),
        "forks": (f"basins/{BASIN}/invoices?tab=forks", wait_for("invoices-audit")),
        "producers": (f"basins/{BASIN}/invoices?tab=producers", wait_for("billing-eu")),
        "usage": (f"{stream}?tab=usage", wait_for("Records by time")),
        "filter": (f"{stream}?filter=%24.state%3Dpaid", wait_for("Download matches")),
        "groups": (f"basins/{BASIN}?view=groups", wait_for("sessions/")),
        "servers": ("servers", wait_for("It serves the store")),
        "tables": ("tables", wait_for("public.orders")),
        "table": (table, show_table),
        "tokens": ("tokens", wait_for("reader")),
    }


def main() -> None:
    """Take all screenshots."""
    chromium = os.environ.get("STREAMFOLD_CHROMIUM") or shutil.which("chromium")
    with (
        tempfile.TemporaryDirectory() as data,
        publishing() as published,
        serving("--local-root", data, "--tables", published) as port,
        serving("--auth") as guarded,
        serving() as empty,
        sync_playwright() as playwright,
    ):
        tables, shop, stop = Path(published), Shop(port), threading.Event()
        shop.fill()

        def feed() -> None:
            while not stop.wait(0.25):
                shop.append(shop._random.randrange(1, 8))
                shop.append(2, "payments")
                shop.append(1, "shipments")

        feeder = threading.Thread(target=feed)
        feeder.start()
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        shown = {
            name: (f"{shop.url}/console/#/{path}", wait)
            for name, (path, wait) in pages(tables).items()
        }
        shown["login"] = (f"http://127.0.0.1:{guarded}/console/", wait_for("Access token"))
        shown["first-steps"] = (f"http://127.0.0.1:{empty}/console/", wait_for("First steps"))
        for size, (width, height) in SIZES.items():
            for theme in ("light", "dark"):
                viewport = ViewportSize(width=width, height=height)
                context = browser.new_context(viewport=viewport, color_scheme=theme)
                context.set_default_timeout(TIMEOUT)
                for name in sys.argv[1:] or shown:
                    address, wait = shown[name]
                    page = context.new_page()
                    page.goto(address)
                    wait(page)
                    # Charts need some readings; everything else is there.
                    page.wait_for_timeout(WAITS.get(name, 300))
                    page.evaluate("scrollTo(0, 0)")
                    taken = Image.open(BytesIO(page.screenshot(full_page=name in LONG)))
                    # 256 colours are enough, in a third of the size, if rare ones are kept.
                    taken.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE).save(
                        FOLDER / f"{name}-{theme}-{size}.png", optimize=True
                    )
                    page.close()
                context.close()
        stop.set()
        feeder.join()
        browser.close()


if __name__ == "__main__":
    main()
