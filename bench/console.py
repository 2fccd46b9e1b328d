"""Measures the console in Chromium: `python -m bench.console --help`.

The first paint of the overview, beside that of a page with one word; how soon a record is visible in a
page that follows its stream, beside the time to its ack; the longest frame while a stream is scrolled
from end to end, beside that of the same page at rest; and while a record of 1 MiB is opened, beside a
small one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import Browser, Page, sync_playwright

from bench.serving import Served, serving
from bench.store import BASIN, percentile, plain_python

MANY, LIVE, LARGE = "many", "live", "large"
#: Records of one append, and bytes of the large record: the most that one may have, with its metering.
APPEND, LARGE_BYTES = 1000, (1 << 20) - 100
#: Milliseconds that a page may take on a busy machine.
TIMEOUT = 120_000
#: Milliseconds of frames at rest, and of those after a record is opened.
WATCHED = 1500
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update")  # fmt: skip
PAINT = """() => new Promise((done) => new PerformanceObserver((list) => {
  const paint = list.getEntriesByName("first-contentful-paint")[0];
  if (paint) done(paint.startTime);
}).observe({ type: "paint", buffered: true }))"""
#: Notes when a row with each text is drawn, in milliseconds since 1970.
WATCH_ROWS = """() => {
  window.seen = {};
  const look = () => {
    for (const row of document.querySelectorAll("[role=option]")) {
      const text = row.textContent.match(/record-\\d+-/)?.[0];
      if (text) window.seen[text] ??= performance.timeOrigin + performance.now();
    }
    requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
}"""
#: Milliseconds of every frame while `step` returns true; it is called once in each.
FRAMES = """async ({ steps, watched }) => {
  const list = document.querySelector("[role=listbox]");
  const frame = () => new Promise((done) => requestAnimationFrame(done));
  const gaps = [];
  let last = await frame();
  const until = last + watched;
  for (let at = 0; at < steps || (!steps && last < until); at += 1) {
    if (steps) list.scrollTop = (at / (steps - 1)) * list.scrollHeight;
    const now = await frame();
    gaps.push(now - last);
    last = now;
  }
  return gaps;
}"""


@contextmanager
def browsing() -> Iterator[Browser]:
    chromium = Path(sys.executable).parent / "chromium"  # installed by `make`
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(FLAGS))
        yield browser
        browser.close()


def append(http: httpx.Client, stream: str, bodies: list[str]) -> None:
    records = {"records": [{"body": body} for body in bodies]}
    path, named = f"/v1/streams/{stream}/records", {"s2-basin": BASIN}
    http.post(path, json=records, headers=named).raise_for_status()


def fill(http: httpx.Client, count: int) -> None:
    for first in range(0, count, APPEND):
        append(http, MANY, [f"number {first + n}." for n in range(APPEND)])
    append(http, LARGE, ["small", json.dumps("x" * LARGE_BYTES)])


def opened(browser: Browser, address: str) -> Page:
    """A page without a cache."""
    page = browser.new_context(viewport={"width": 1280, "height": 800}).new_page()
    page.set_default_timeout(TIMEOUT)
    page.goto(address)
    return page


def first_paints(browser: Browser, address: str, times: int) -> list[float]:
    """Milliseconds from the request to the first content, each in a fresh profile."""
    found = []
    for _ in range(times):
        page = opened(browser, address)
        found.append(float(page.evaluate(PAINT)))
        page.context.close()
    return found


def visibility(browser: Browser, server: Served, http: httpx.Client, times: int) -> dict[str, Any]:
    """Milliseconds from sending a record until it is acknowledged, and until it is drawn."""
    page = opened(browser, stream_page(server, LIVE))
    page.get_by_role("button", name="Live").wait_for()
    page.evaluate(WATCH_ROWS)
    sent: dict[str, float] = {}
    acked = []
    for number in range(times):
        text = f"record-{number}-"
        sent[text] = time.time() * 1000
        append(http, LIVE, [text])
        acked.append(time.time() * 1000 - sent[text])
        page.wait_for_function("(text) => text in window.seen", arg=text)
    seen = page.evaluate("() => window.seen")
    page.context.close()
    waits = [seen[text] - moment for text, moment in sent.items()]
    return {"p50_ms": percentile(waits, 0.5), "largest_ms": max(waits),
            "ack_p50_ms": percentile(acked, 0.5)}  # fmt: skip


def stream_page(server: Served, stream: str) -> str:
    return f"{server.url}/console/#/basins/{BASIN}/{stream}"


def frames(page: Page, steps: int = 0) -> list[float]:
    """Milliseconds of the frames of so many steps through the list, or at rest."""
    found: list[float] = page.evaluate(FRAMES, {"steps": steps, "watched": WATCHED})
    return found


def scrolling(browser: Browser, server: Served, count: int, steps: int) -> dict[str, Any]:
    page = opened(browser, stream_page(server, MANY))
    page.get_by_text(f"number {count - 1}.").wait_for()
    resting, moving = frames(page), frames(page, steps)
    page.get_by_text(f"number {count - 1}.").wait_for()
    page.context.close()
    return {
        "records": count,
        "steps": steps,
        "p99_ms": percentile(moving, 0.99),
        "longest_ms": max(moving),
        "rest_longest_ms": max(resting),
    }


def opening(browser: Browser, server: Served) -> dict[str, Any]:
    """The longest frame while a large record is opened, and while a small one is."""
    page = opened(browser, stream_page(server, LARGE))
    rows = page.get_by_role("listbox", name="Records").get_by_role("option")
    rows.nth(1).wait_for()
    found = {}
    for name, row in (("small_longest_ms", 0), ("longest_ms", 1)):
        page.evaluate(
            "([row]) => setTimeout(() => document.querySelectorAll('[role=option]')[row].click(), 200)",
            [row],
        )
        found[name] = max(frames(page))
        page.get_by_role("complementary", name=f"Record {row}").wait_for()
    page.context.close()
    return found


def run(folder: Path, *, quick: bool) -> dict[str, Any]:
    count, times, steps = (10_000, 3, 60) if quick else (100_000, 20, 600)
    with (
        serving("local+fsync", [MANY, LIVE, LARGE], folder) as server,
        browsing() as browser,
        httpx.Client(base_url=server.url, timeout=120) as http,
    ):
        fill(http, count)
        first_paints(browser, f"{server.url}/health", 1)  # the browser's own start
        return {
            "paint_ms": first_paints(browser, f"{server.url}/console/", times),
            "bare_paint_ms": first_paints(browser, f"{server.url}/health", times),
            "visible": visibility(browser, server, http, times * 3),
            "scroll": scrolling(browser, server, count, steps),
            "large": opening(browser, server),
            "plain_python_us": plain_python(),
            "load": os.getloadavg()[0],
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer records and repetitions")
    parser.add_argument("--results", type=Path, default=Path("bench/results/console.json"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-console-") as folder:
        found = run(Path(folder), quick=given.quick)
    given.results.parent.mkdir(parents=True, exist_ok=True)
    given.results.write_text(json.dumps(found, indent=2) + "\n")
    paints, bare = (percentile(found[name], 0.5) for name in ("paint_ms", "bare_paint_ms"))
    visible, scroll, large = found["visible"], found["scroll"], found["large"]
    print("| measure | wanted | ms | beside it, ms |")
    print("|---|---|---|---|")
    print(f"| first paint, p50 | < 1000 | {paints:.0f} | {bare:.0f}, a page with one word |")
    print(
        f"| record visible, p50 | < 500 | {visible['p50_ms']:.0f} | {visible['ack_p50_ms']:.0f}, ack |"
    )
    print(f"| longest frame, {scroll['records']:,} records scrolled | no stall | "
          f"{scroll['longest_ms']:.0f} | {scroll['rest_longest_ms']:.0f}, at rest |")  # fmt: skip
    print(f"| longest frame, record of 1 MiB opened | no freeze | {large['longest_ms']:.0f} | "
          f"{large['small_longest_ms']:.0f}, a small one |")  # fmt: skip
    print(f"load {os.getloadavg()[1]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
