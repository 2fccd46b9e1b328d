"""Measures what a store takes of its disk: `python -m bench.space --help`.

One run writes at a fixed rate, rests, trims half, rests, deletes the streams and rests again; or, with
`--churn`, trims as fast as it writes. A sample is printed every `--every` seconds.

Ratios travel, sizes and times do not: these machines are shared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.bodies import noise
from streamfold.model.records import Record, trim_record
from streamfold.server.main import loop_factory, tune_collector
from streamfold.store import StoreSettings, StreamStore, open_store
from streamfold.store.engine.location import open_location
from streamfold.store.engine.slatedb import open_admin

BASIN = "bench-basin"
MIB = 1 << 20
RESULTS = Path(__file__).parent / "results" / "space.json"
#: Bytes of one record's body, and how many make a batch: 256 KiB.
BODY_BYTES, BATCH_RECORDS = 4096, 64


@dataclass
class Footprint:
    """Samples of what is live and what the folder takes."""

    folder: Path
    began: float = field(default_factory=time.monotonic)
    live: int = 0
    samples: list[tuple[str, float, int, int]] = field(default_factory=list)

    async def sample(self, phase: str) -> None:
        kinds = await self.by_kind()
        disk = sum(kinds.values())
        at = time.monotonic() - self.began
        self.samples.append((phase, at, self.live, disk))
        ratio = f"{disk / self.live:6.2f}" if self.live else "     -"
        parts = ", ".join(f"{kind} {size / MIB:.0f}" for kind, size in kinds.items())
        print(
            f"{phase:8} {at:6.0f} s  live {self.live / MIB:8.0f} MiB  disk {disk / MIB:8.0f} MiB  "
            f"x {ratio}  ({parts})",
            flush=True,
        )

    async def by_kind(self) -> dict[str, int]:
        """Bytes of the files by what needs them."""
        admin = open_admin(open_location(self.folder.as_uri()))
        newest = await admin.read_manifest()
        assert newest is not None
        young = {view.file for view in newest.young}
        runs = newest.files - young
        pinned = set()
        for checkpoint in newest.checkpoints:
            manifest = await admin.read_manifest(checkpoint.manifest_id)
            if manifest is not None:
                pinned |= manifest.files
        kinds = dict.fromkeys(("log", "young", "runs", "pinned", "unnamed", "other"), 0)
        for path, size in sizes(self.folder):
            kind = "other"
            if path.parent.name == "wal":
                kind = "log"
            elif path.parent.name == "compacted":
                named = {"young": young, "runs": runs, "pinned": pinned}
                kind = next(
                    (kind for kind, names in named.items() if path.name in names), "unnamed"
                )
            kinds[kind] += size
        return kinds

    def figures(self) -> dict[str, dict[str, float]]:
        """By phase: the worst ratio in it and the most MiB, and both at its end."""
        found: dict[str, dict[str, float]] = {}
        for phase, _, live, disk in self.samples:
            ratio = disk / live if live else 0.0
            before = found.get(phase, {"worst": 0.0, "most_mib": 0.0})
            found[phase] = {
                "worst": max(ratio, before["worst"]),
                "last": ratio,
                "most_mib": max(disk / MIB, before["most_mib"]),
                "last_mib": disk / MIB,
            }
        return {
            phase: {name: round(value, 2) for name, value in figures.items()}
            for phase, figures in found.items()
        }


def sizes(folder: Path) -> Iterator[tuple[Path, int]]:
    for path in folder.rglob("*"):
        try:
            if path.is_file():
                yield path, path.stat().st_size
        except FileNotFoundError:
            continue  # collected while we looked


class Run:
    """One store, written to by one task per stream."""

    def __init__(
        self, store: StreamStore, footprint: Footprint, options: argparse.Namespace
    ) -> None:
        self.store = store
        self.footprint = footprint
        self.options = options
        self.streams = [f"stream-{number}" for number in range(options.streams)]
        self.batch = [Record(noise(BODY_BYTES, number)) for number in range(BATCH_RECORDS)]
        self.batch_bytes = BODY_BYTES * BATCH_RECORDS
        self.written: dict[str, int] = dict.fromkeys(self.streams, 0)
        self.latencies: list[float] = []

    async def prepare(self) -> None:
        await self.store.create_basin(BASIN)
        for stream in self.streams:
            await self.store.create_stream(BASIN, stream)

    async def write(self, phase: str, seconds: float, *, keep_mib: float | None = None) -> None:
        """Write for so long; with `keep_mib`, trim each stream so that all hold that together."""
        keep = None
        if keep_mib is not None:
            keep = max(1, int(keep_mib * MIB / self.batch_bytes / len(self.streams)))
        async with asyncio.TaskGroup() as group:
            sampler = group.create_task(self._sample(phase, seconds))
            for stream in self.streams:
                group.create_task(self._write_stream(stream, seconds, keep))
        await sampler

    async def _write_stream(self, stream: str, seconds: float, keep: int | None) -> None:
        loop = asyncio.get_running_loop()
        pause = self.batch_bytes * len(self.streams) / (self.options.mib_per_second * MIB)
        began = loop.time()
        under_way: deque[asyncio.Task[None]] = deque()
        while (due := began + pause * self.written[stream]) < began + seconds:
            self.written[stream] += 1
            await asyncio.sleep(due - loop.time())
            under_way.append(asyncio.create_task(self._append(stream)))
            if len(under_way) >= 16:
                await under_way.popleft()
            if keep is not None and self.written[stream] % 64 == 0:
                await self._trim(stream, keep)
        for task in under_way:
            await task
        self.written[stream] = 0

    async def _append(self, stream: str) -> None:
        began = time.perf_counter()
        await self.store.append(BASIN, stream, self.batch)
        self.latencies.append(time.perf_counter() - began)
        self.footprint.live += self.batch_bytes

    async def _trim(self, stream: str, keep: int) -> None:
        tail = await self.store.check_tail(BASIN, stream)
        point = tail.seq_num - keep * BATCH_RECORDS
        if point > 0:
            await self.store.append(BASIN, stream, [trim_record(point)])
            self.footprint.live = keep * self.batch_bytes * len(self.streams)

    async def trim_half(self) -> None:
        for stream in self.streams:
            tail = await self.store.check_tail(BASIN, stream)
            await self.store.append(BASIN, stream, [trim_record(tail.seq_num // 2)])
        self.footprint.live //= 2

    async def delete(self) -> None:
        for stream in self.streams:
            await self.store.delete_stream(BASIN, stream)
        self.footprint.live = 0

    async def rest(self, phase: str) -> None:
        await self._sample(phase, self.options.rest)

    async def _sample(self, phase: str, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(left, self.options.every))
            await self.footprint.sample(phase)


async def measure(options: argparse.Namespace, folder: Path) -> None:
    tune_collector()
    footprint = Footprint(folder)
    async with open_store(folder.as_uri(), StoreSettings()) as store:
        run = Run(store, footprint, options)
        await run.prepare()
        if options.churn:
            await run.write("churn", options.seconds, keep_mib=options.keep_mib)
        else:
            await run.write("write", options.seconds)
            await run.rest("rest")
            await run.trim_half()
            await run.rest("trimmed")
        await run.delete()
        await run.rest("deleted")
    latencies = sorted(run.latencies)
    found: dict[str, Any] = {"phases": footprint.figures()}
    for part in (0.5, 0.99, 1.0):
        index = min(len(latencies) - 1, int(part * len(latencies)))
        found[f"p{part * 100:g}_ms"] = latencies[index] * 1000
    print(json.dumps(found, indent=1))
    keep("churn" if options.churn else "write", found)


def keep(kind: str, found: dict[str, Any]) -> None:
    """Write the results beside those of the other kind of run."""
    RESULTS.parent.mkdir(exist_ok=True)
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(kept | {kind: found}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="of writing")
    parser.add_argument("--rest", type=float, default=45, help="seconds of rest after each step")
    parser.add_argument("--every", type=float, default=10, help="seconds between samples")
    parser.add_argument("--mib-per-second", type=float, default=20)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--churn", action="store_true", help="trim as fast as is written")
    parser.add_argument("--keep-mib", type=float, default=200, help="what --churn leaves")
    parser.add_argument("--quick", action="store_true", help="a few seconds of each, to see it run")
    options = parser.parse_args()
    if options.quick:
        options.seconds, options.rest, options.every = 5, 5, 1
    with (
        tempfile.TemporaryDirectory(prefix="bench-space-") as folder,
        asyncio.Runner(loop_factory=loop_factory()) as runner,
    ):
        runner.run(measure(options, Path(folder)))


if __name__ == "__main__":
    main()
