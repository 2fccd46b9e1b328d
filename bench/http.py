"""Measures the S2 face over HTTP: `python -m bench.http --help`.

The server runs as `streamfold serve` runs it, in a process of its own. Right after each measurement the
same is done with a store in this process, on the same kind of storage: these machines are shared, and
only ratios travel. Steadier than any rate is the processor time per operation, which is given too.
"""
# ruff: noqa: A005 - nothing imports this by the name of the standard library's http

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from bench.fan_out import FOLLOWED, followers
from bench.figures import Figure, Row
from bench.h2load import Shape
from bench.rows import (
    BULK_STREAMS,
    FULL,
    QUICK,
    SMALL_STREAMS,
    Setup,
    bulk_appends,
    catch_up_by_requests,
    catch_up_by_session,
    small_appends,
)
from bench.serving import serving
from bench.store import (
    BASIN,
    bare_sync_loop,
    plain_python,
    processor_times,
    stolen_share,
)
from streamfold.server.main import loop_factory, tune_collector
from streamfold.store import StoreSettings, open_store

BACKENDS = ("memory", "local", "local-fsync")


async def run_backend(backend: str, folder: Path, quick: bool) -> dict[str, Any]:
    """Everything that is measured on one kind of storage."""
    since = processor_times()
    results: dict[str, Any] = {
        "backend": backend,
        "quick": quick,
        "bare": bare_sync_loop(folder),
        "plain_python_us": plain_python(),
    }
    url = "memory:" if backend == "memory" else (folder / "in-process").as_uri()
    settings = StoreSettings(fsync=backend == "local-fsync")
    streams = [*SMALL_STREAMS, *chain(*BULK_STREAMS.values()), *FOLLOWED.values()]
    with serving(backend, streams, folder) as server:
        async with open_store(url, settings) as store:
            await store.create_basin(BASIN)
            setup = Setup(server, store, QUICK if quick else FULL, folder)
            rows = [row async for row in measure(setup)]
    results["rows"] = [asdict(row) | {"ratios": row.ratios} for row in rows]
    results["stolen"] = stolen_share(since)
    print_table(rows, results)
    return results


async def measure(setup: Setup) -> AsyncIterator[Row]:
    """All rows, in an order in which none finds much left behind by those before it."""
    yield await small_appends(setup, "256 B append, one after the other", Shape(1, 1), 1)
    for shape in (Shape(4, 125), Shape(8, 64, processes=8), Shape(64, 8, processes=8)):
        count = len(SMALL_STREAMS)
        name = f"256 B appends, {shape.connections} connections x {shape.requests}"
        by = f"by {shape.processes} h2load" if shape.processes > 1 else "by h2load"
        yield await small_appends(setup, f"{name} {by}, {count} streams", shape, count)
    for form in FOLLOWED:
        yield await followers(setup, form)
    for sessions in BULK_STREAMS:
        yield await bulk_appends(setup, sessions)
    yield await catch_up_by_requests(setup)
    yield await catch_up_by_session(setup)


def print_table(rows: list[Row], results: dict[str, Any]) -> None:
    """Rates and latencies of both, processor time for each operation, and what HTTP costs."""
    columns = ["measure", "over HTTP", "server CPU", "client CPU", "in process", "its CPU"]
    columns += ["rate", "p50", "CPU", "stolen"]
    print("| " + " | ".join(columns) + " |")
    print("|---" * len(columns) + "|")
    for row in rows:
        print("| " + " | ".join(cells(row)) + " |")
    print(
        f"\n{results['backend']} on {os.cpu_count()} cores. Rate, p50 and CPU: over HTTP / in process. "
        f"CPU is for one ack, MiB or delivery.\nsum(range(1000)) in plain Python took "
        f"{results['plain_python_us']:.1f} us, a bare write+fsync {results['bare']['p50_ms']:.2f} ms; "
        f"{results['stolen']:.0%} of the processors' time went to others"
    )


def cells(row: Row) -> list[str]:
    http, beside = row.http, row.in_process
    over_http = [speed(http, row.unit), *processor(http)] if http else ["skipped", "-", "-"]
    return [
        f"{row.name} ({row.note})" if row.note else row.name,
        *over_http,
        speed(beside, row.unit),
        f"{beside.cpu_us:.0f} us",
        *(f"{ratio:.2f}x" if ratio else "-" for ratio in row.ratios.values()),
        ", ".join(f"{figure.spent.stolen:.0%}" for figure in (http, beside) if figure),
    ]


def processor(figure: Figure) -> tuple[str, str]:
    """Of the server and of its clients: for one operation, and for all."""
    return (
        f"{figure.cpu_us:.0f} us, {figure.spent.cpu:.1f} s",
        f"{figure.client_cpu_us:.0f} us, {figure.spent.client_cpu:.1f} s",
    )


def speed(figure: Figure, unit: str) -> str:
    """Rate, latency in milliseconds and memory, as far as they were measured."""
    parts = [f"{figure.per_second:.0f} {unit}/s"]
    latencies = {"p50": figure.p50_ms, "p99": figure.p99_ms, "max": figure.max_ms}
    parts += [f"{name} {value:.2f} ms" for name, value in latencies.items() if value is not None]
    if figure.rss_before_mib is not None:
        parts.append(f"resident {figure.rss_before_mib:.0f} to {figure.rss_after_mib:.0f} MiB")
    return ", ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--backend", choices=BACKENDS, default="memory", help="default: memory")
    parser.add_argument("--quick", action="store_true", help="less of everything: half a minute")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no server stays behind
    results = run_as_a_server_would(options.backend, options.folder, options.quick)
    keep(results)


def keep(results: dict[str, Any]) -> None:
    """Write the results beside those of other backends, which stay as they are."""
    target = Path(__file__).parent / "results" / "http.json"
    target.parent.mkdir(exist_ok=True)
    kept = json.loads(target.read_text()) if target.exists() else {}
    target.write_text(json.dumps(kept | {results["backend"]: results}, indent=2))


def run_as_a_server_would(backend: str, parent: Path, quick: bool) -> dict[str, Any]:
    """With the event loop and the garbage collection that `streamfold serve` has."""
    tune_collector()
    folder = Path(tempfile.mkdtemp(prefix="streamfold-bench-", dir=parent))
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(run_backend(backend, folder, quick))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
