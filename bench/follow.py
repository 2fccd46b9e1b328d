"""Restore time with a snapshot, against a replay, as history grows.

    python -m bench.follow            100,000 keys, 1 million deltas, then ten times that
    python -m bench.follow --quick    a tenth of everything

Writes bench/results/follow.json and docs/guides/restore-time.svg.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
from s2_sdk import S2, Endpoints, S2Stream

from bench.store import PathNotTakenError
from streamfold.follow import Snapshots, external, follow
from streamfold.follow.clients.client import StreamRecord
from streamfold.follow.encoding.container import Description, pack
from streamfold.follow.restore.progress import Progress
from streamfold.model.records import Record
from streamfold.records import RecordBatch
from streamfold.server.config import Configuration
from streamfold.server.main import loop_factory, running_server, tune_collector
from streamfold.store import StoreSettings, StreamStore

BASIN, STREAM = "bench-basin", "deltas"
#: Sizes of the history, in multiples of the first.
STEPS = (1, 2, 5, 10)
#: Those at which a replay is measured too: larger ones take as much longer as they are larger.
REPLAYED = (1, 2)
#: Deltas that come after the newest snapshot: what a restore has to replay.
AFTER = 5_000
#: Restores per point, and seconds between them. The best is plotted, because storage goes on tidying up
#: after a large append for a while, and machines have other work too.
#: The ratio to a replay, which is measured once, is that of the median.
REPEATS, PAUSE = 15, 0.3
State = dict[str, int]
_decode = msgspec.json.Decoder(tuple[str, int]).decode


def fold(state: State, record: StreamRecord) -> State:
    key, value = _decode(record.body)
    state[key] = value
    return state


def make_deltas(keys: int, deltas: int) -> list[bytes]:
    """Every key once, then keys by chance."""
    rng = random.Random(1)
    chosen = [*range(keys), *(rng.randrange(keys) for _ in range(deltas - keys))]
    return [b'["key-%06d",%d]' % (key, number) for number, key in enumerate(chosen)]


def make_batches(bodies: list[bytes]) -> list[RecordBatch]:
    return [
        RecordBatch.of([Record(body) for body in bodies[at : at + 1000]])
        for at in range(0, len(bodies), 1000)
    ]


async def append(store: StreamStore, batches: list[RecordBatch]) -> None:
    waiting: list[asyncio.Future[Any]] = []
    for batch in batches:
        submission = store.stream(BASIN, STREAM).append(batch)
        waiting.append(submission.ack)
        await submission.decided()
        if len(waiting) > 50:
            await waiting.pop(0)
    for ack in waiting:
        await ack


async def restore(stream: S2Stream, snapshots: Snapshots[Any] | None) -> tuple[float, State]:
    """Seconds to the state of this moment, and the state; fails if no snapshot was loaded."""
    steps: list[Progress] = []
    began = time.perf_counter()
    async with follow(
        stream, fold=fold, initial=dict, snapshots=snapshots, progress=steps.append
    ) as state:
        seconds, found = time.perf_counter() - began, state.value
    replayed = max((step.done for step in steps if step.phase == "replay"), default=0)
    loaded = any(step.phase == "load" for step in steps)
    if snapshots is not None and (not loaded or replayed > AFTER):
        raise PathNotTakenError(f"the restore loaded {loaded=} and replayed {replayed} records")
    return seconds, found


async def measure(folder: Path, keys: int, deltas: int) -> dict[str, Any]:
    """Against a server in this process, read over HTTP by the SDK as any client would."""
    configuration = Configuration(
        location=(folder / "store").as_uri(),
        store=StoreSettings(fsync=False),
        host="127.0.0.1",
        port=0,
        access_log=False,
    )
    async with running_server(configuration) as server:
        await server.store.create_basin(BASIN)
        await server.store.create_stream(BASIN, STREAM)
        url = f"http://127.0.0.1:{server.port}"
        async with S2("ignored", endpoints=Endpoints(url, url)) as s2:
            stream = s2.basin(BASIN).stream(STREAM)
            points = await grow(server.store, stream, folder, make_deltas(keys, deltas))
    return {"keys": keys, "deltas": deltas, "replayed_after_snapshot": AFTER, "points": points}


async def grow(
    store: StreamStore, stream: S2Stream, folder: Path, bodies: list[bytes]
) -> list[dict[str, Any]]:
    """Lengthen the history, keep a snapshot near its end, and measure at every step.

    The same deltas are appended again and again, so the state to save is known without reading it
    all; the replays prove it right.
    """
    snapshots, batches = external((folder / "snapshots").as_uri()), make_batches(bodies)
    state = dict(_decode(body) for body in bodies)
    points, history = [], 0
    for step in STEPS:
        for _ in range(history, step):
            await append(store, batches)
        history = step
        await save(store, snapshots, state)
        await append(store, batches[: AFTER // 1000])
        point = {"history": step * len(bodies), **await measure_point(stream, snapshots, step)}
        print(point, flush=True)
        points.append(point)
    return points


async def save(store: StreamStore, snapshots: Snapshots[Any], state: State) -> None:
    cursor = (await store.check_tail(BASIN, STREAM)).seq_num
    pieces = snapshots.codec.encode(state)
    blob = pack(pieces, Description.of(f"bench-{cursor}", cursor, "json", 0))
    assert snapshots.store is not None
    await snapshots.store.save(cursor, "json", blob)


async def measure_point(stream: S2Stream, snapshots: Snapshots[Any], step: int) -> dict[str, Any]:
    restores = []
    for _ in range(REPEATS):
        await asyncio.sleep(PAUSE)
        seconds, state = await restore(stream, snapshots)
        restores.append(seconds)
    best, median = min(restores), statistics.median(restores)
    point: dict[str, Any] = {"restore_s": round(best, 4), "restore_median_s": round(median, 4)}
    point["restore_all_s"] = [round(seconds, 4) for seconds in restores]
    if step in REPLAYED:
        replay, replayed = await restore(stream, None)
        assert replayed == state, "a replay and a restore must agree"
        point["replay_s"] = round(replay, 3)
        point["times_faster"] = round(replay / median, 1)
    return point


def plot(results: dict[str, Any], target: Path) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "streamfold"
    from matplotlib import pyplot

    points = results["points"]
    history = [point["history"] / 1e6 for point in points]
    figure, axes = pyplot.subplots(figsize=(7, 4))
    replayed = [point for point in points if "replay_s" in point]
    axes.plot(
        [point["history"] / 1e6 for point in replayed],
        [point["replay_s"] for point in replayed],
        "o-",
        label="replay from the start",
    )
    axes.plot(
        history, [point["restore_s"] for point in points], "s-", label="restore with a snapshot"
    )
    axes.set_yscale("log")
    axes.set_xlabel("deltas in the stream, millions")
    axes.set_ylabel("seconds to the current state")
    axes.set_title(f"{results['keys']:,} keys")
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(target, format="svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of everything, no files")
    options = parser.parse_args()
    keys, deltas = (10_000, 100_000) if options.quick else (100_000, 1_000_000)
    folder = Path(tempfile.mkdtemp(prefix="streamfold-bench-"))
    try:
        tune_collector()
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            results = runner.run(measure(folder, keys, deltas))
    finally:
        shutil.rmtree(folder)
    first, last = results["points"][0], results["points"][-1]
    print(
        f"{first['times_faster']:.0f}x faster than a replay of {first['history']:,} deltas; "
        f"{last['history'] // first['history']}x the history takes "
        f"{last['restore_s'] / first['restore_s']:.2f}x the time"
    )
    if not options.quick:
        root = Path(__file__).parent.parent
        (root / "bench/results").mkdir(exist_ok=True)
        (root / "bench/results/follow.json").write_text(json.dumps(results, indent=2) + "\n")
        (root / "docs/guides").mkdir(exist_ok=True)
        plot(results, root / "docs/guides/restore-time.svg")


if __name__ == "__main__":
    main()
