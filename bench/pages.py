"""Turns bench/results/ into pages of docs/benchmarks/: `python -m bench.pages`.

`make bench` ends with this. A page has the measures that people compare; the JSON files in
bench/results/ have all of them.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.machine import kept_conditions
from bench.report import Benchmark, Curve, Row, Sample, publish

RESULTS = Path(__file__).parent / "results"
OURS = "Streamfold"


def pair(measure: str, unit: str, ours: float, other: Mapping[str, float], *, more: bool) -> Row:
    """One value of ours beside one of each other subject."""
    samples = [Sample(name, [float(value)]) for name, value in other.items()]
    return Row(measure, unit, [Sample(OURS, [float(ours)]), *samples], more=more)


def store(found: Sequence[dict[str, Any]]) -> list[Row]:
    """Acks of the store in one process, beside a bare write that is synced."""
    (synced,) = (one for one in found if one["backend"] == "local+fsync")
    bare = {"bare write + fsync": synced["bare"]["p50_ms"]}
    alone = synced["acks"]["1 writers, 1 streams"]["p50_ms"]
    rows = [pair("one writer, ack p50", "ms", alone, bare, more=False)]
    for case, acks in synced["acks"].items():
        rows.append(pair(f"256 B appends, {case}", "acks/s", acks["acks_per_s"], {}, more=True))
    rows.append(pair("bulk append", "MiB/s", synced["append_mib_per_s"], {}, more=True))
    rows.append(pair("catch-up", "MiB/s", synced["catch_up_mib_per_s"], {}, more=True))
    rows.append(pair("restart", "s", synced["restart_s"], {}, more=False))
    return rows


def archive(found: Sequence[dict[str, Any]]) -> list[Row]:
    """Formats of an archive beside plain pyarrow."""
    plain = next(one for one in found if one["subject"] == "pyarrow.parquet")
    rows = []
    for one in found:
        for key, what in (("write_rows_per_s", "write"), ("read_rows_per_s", "read")):
            if one is not plain:
                beside = {"pyarrow.parquet": plain[key]}
                rows.append(
                    pair(f"{one['subject']}, {what}", "rows/s", one[key], beside, more=True)
                )
    return rows


def follow(found: dict[str, Any]) -> list[Row]:
    """A restore with a snapshot beside a replay from the start."""
    rows = []
    for point in found["points"]:
        beside = {"replay from the start": point["replay_s"]} if "replay_s" in point else {}
        name = f"restore of {found['keys']:,} keys after {point['history']:,} changes"
        ours = Sample(OURS, [float(value) for value in point["restore_all_s"]])
        others = [Sample(subject, [value]) for subject, value in beside.items()]
        rows.append(Row(name, "s", [ours, *others], more=False))
    return rows


def hostile(found: dict[str, Any]) -> list[Row]:
    """One client beside hostile ones, and alone."""
    alone = {"alone": min(found["alone"]["p99_ms"], found["after"]["p99_ms"])}
    beside = found["beside"]["p99_ms"]
    return [
        pair("append p99 beside hostile clients", "ms", beside, alone, more=False),
        pair("memory that they take", "MiB", found["growth_mib"], {}, more=False),
    ]


def fold(found: Sequence[dict[str, Any]]) -> list[Row]:
    """A re-base beside polars and DuckDB."""
    rows = []
    for count in dict.fromkeys(one["changes"] for one in found):
        by = {one["subject"]: one for one in found if one["changes"] == count}
        ours = by.pop(next(name for name in by if name not in ("polars", "duckdb", "DuckDB")))
        for key, unit in (("seconds", "s"), ("peak_mib", "MiB")):
            beside = {name: one[key] for name, one in by.items()}
            rows.append(pair(f"re-base of {count:,} changes", unit, ours[key], beside, more=False))
    return rows


def spark_source(found: dict[str, Any]) -> list[Row]:
    """The stream source beside Spark's own Parquet source and the SDK's loop."""
    figures = found["full" if "full" in found else "quick"]["figures"]
    loop = figures["loop with the S2 client"]["per_second"]
    rows = []
    for name, one in figures.items():
        if not name.startswith(("source", "store")) or "one record" in name:
            continue
        beside = {"S2 SDK loop": loop}
        twin = name.replace("source", "Spark's Parquet")
        if twin != name and twin in figures:
            beside["Spark on Parquet"] = figures[twin]["per_second"]
        rows.append(pair(name, "records/s", one["per_second"], beside, more=True))
    return rows


def rebase(found: dict[str, Any]) -> list[Row]:
    """What a re-base writes, beside a rewrite of the whole table."""
    rows = []
    for one in found["few_changes"]:
        whole = {"rewrite of all": one["bytes_of_a_full_rewrite"]}
        name = f"bytes written after {one['keys_changed']:,} changed keys"
        rows.append(pair(name, "B", one["bytes_written"], whole, more=False))
    return rows


def freshness(found: dict[str, Any]) -> list[Row]:
    """How long a change of a stream takes to a committed diff, beside half an interval of waiting."""
    half = {"half an interval": found["half_an_interval_s"]}
    return [
        pair("change to committed diff, p50", "s", found["p50_s"], half, more=False),
        pair("change to committed diff, p99", "s", found["p99_s"], half, more=False),
    ]


def many_streams(found: Sequence[dict[str, Any]]) -> list[Row]:
    """A store with many streams beside one with 500: processor time, restart and memory.

    Every stream is created by its first append. Then appends go to streams in turn, so that with many
    of them most have left memory; and again after a restart, when all have.
    """
    rows = []
    for result in found:
        number, few = f"{result['streams']:,} streams", {"500 streams": result["few"]["cpu_us"]}
        for what, name in (
            ("create", "create a stream by an append"),
            ("append", "append to each in turn"),
            ("append again", "append to each in turn after a restart"),
        ):
            rows.append(pair(f"{number}: {name}", "µs", result[what]["cpu_us"], few, more=False))
        for key, name, unit in (
            ("restart_s", "restart until the first answer", "s"),
            ("rss_after_mib", "memory after all that", "MiB"),
        ):
            rows.append(pair(f"{number}: {name}", unit, result[key], {}, more=False))
        rows.append(pair(f"{number}: list all", "/s", result["list"]["per_s"], {}, more=True))
    return rows


def disk_space(found: dict[str, Any]) -> list[Row]:
    """What a store takes of its disk, beside the bytes of the records that it holds."""
    rows = []
    for kind, run in found.items():
        for phase, figures in run["phases"].items():
            if figures["last"]:
                name = f"{phase} at 20 MiB/s: bytes on disk per live byte"
                rows.append(pair(f"{name}, at most", "x", figures["worst"], {}, more=False))
                rows.append(pair(f"{name}, at the end", "x", figures["last"], {}, more=False))
        rows += [
            pair(f"{kind} at 20 MiB/s: ack {part}", "ms", run[f"{part}_ms"], {}, more=False)
            for part in ("p50", "p99", "p100")
        ]
    return rows


def aged(found: dict[str, Any]) -> list[Row]:
    """A store after an hour of appends, trims and deletions, beside a new one, in turns."""
    rows = []
    for what in found["new"][0]:
        name, _, unit = what.rpartition(", ")
        samples = [
            Sample(subject, [one[what] for one in found[kind]])
            for subject, kind in ((OURS, "aged"), ("new store", "new"))
        ]
        rows.append(Row(name, unit, samples, more=False))
    after = found["after"]
    rows += [
        pair("appended before", "MiB", after["appended_mib"], {}, more=True),
        pair("bytes on disk per live byte", "x", after["disk_per_live_byte"], {}, more=False),
        pair("files", "", after["files"], {}, more=False),
    ]
    return rows


def over_http(found: dict[str, Any]) -> list[Row]:
    """The server beside the same store in the process that measures, by their processor time."""
    rows = []
    for backend, results in found.items():
        for one in results["rows"]:
            if one["http"] is None:
                continue
            name, each = f"{one['name']}, {backend}", f"µs of processor per {one['unit']}"
            beside = {"in process": one["in_process"]["cpu_us"]}
            rows.append(pair(name, each, one["http"]["cpu_us"], beside, more=False))
    return rows


def snapshotter_weight(found: Sequence[dict[str, Any]]) -> list[Row]:
    """A snapshotter from its start until all tables are published, with Spark in it."""
    rows = []
    for one in found:
        name = f"{one['tables']} x {one['rows']:,} rows"
        for key, what, unit in (
            ("ready_s", "time until ready", "s"),
            ("peak_mib", "memory at most", "MiB"),
            ("resting_mib", "memory at rest", "MiB"),
        ):
            rows.append(pair(f"{name}: {what}", unit, one[key], {}, more=False))
    return rows


def postgres(found: dict[str, dict[str, float]]) -> list[Row]:
    """Tables of PostgreSQL into streams, beside PostgreSQL's own programs on the same machine."""
    copied, load, backlog = found["first_copy"], found["pgbench"], found["backlog"]
    plain = {
        "COPY to a file": copied["copy_to_file_per_s"],
        "COPY to a client": copied["copy_to_client_per_s"],
    }
    alone = {"without ingest": load["alone_per_s"]}
    received = {"pg_recvlogical": backlog["pg_recvlogical_s"]}
    name = f"first copy of {copied['rows']:,.0f} rows"
    late = pair("ingest behind pgbench at its end", "s", load["behind_s"], {}, more=False)
    return [
        pair(name, "rows/s", copied["rows_per_s"], plain, more=True),
        pair("pgbench beside ingest", "transactions/s", load["beside_per_s"], alone, more=True),
        late,
        pair("reading a backlog", "s", backlog["ingest_s"], received, more=False),
    ]


def published(found: dict[str, float]) -> list[Row]:
    """How long a commit in PostgreSQL takes to a committed diff, beside half an interval of waiting."""
    half = {"half an interval": found["half_an_interval_s"]}
    return [
        pair(f"commit to committed diff, {part}", "s", found[f"{part}_s"], half, more=False)
        for part in ("p50", "p99")
    ]


def growth(found: dict[str, list[tuple[int, dict[str, float]]]]) -> list[Row]:
    """Ten and a hundred times as many records, followers, snapshots and rows of a table."""
    rows = []
    for case, sizes in found.items():
        _, first = sizes[0]
        for size, values in sizes:
            for measure, value in values.items():
                name, _, unit = measure.rpartition(", ")
                beside = {} if values is first else {"the first number": first[measure]}
                rows.append(pair(f"{size:,} {case}: {name}", unit, value, beside, more=False))
    return rows


def growth_curves(found: dict[str, list[tuple[int, dict[str, float]]]]) -> list[Curve]:
    """A curve for each measure."""
    return [
        Curve(measure, case, [(float(size), values[measure]) for size, values in sizes])
        for case, sizes in found.items()
        for measure in sizes[0][1]
    ]


def stream_curves(found: Sequence[dict[str, Any]]) -> list[Curve]:
    """What an append, a restart and memory cost as there are more streams."""

    def curve(measure: str, value: Callable[[dict[str, Any]], float]) -> Curve:
        return Curve(measure, "streams", [(one["streams"], value(one)) for one in found])

    return [
        curve("create a stream, µs of processor", lambda one: one["create"]["cpu_us"]),
        curve("append in turn, µs of processor", lambda one: one["append"]["cpu_us"]),
        curve("restart, s", lambda one: one["restart_s"]),
        curve("memory, MiB", lambda one: one["rss_after_mib"]),
    ]


#: Curves by the name of the results.
CURVES: dict[str, Callable[[Any], list[Curve]]] = {
    "growth": growth_curves,
    "streams": stream_curves,
}


def console(found: dict[str, Any]) -> list[Row]:
    """The console in Chromium: what a person waits for, beside what the browser needs without it."""
    visible, scroll, large = found["visible"], found["scroll"], found["large"]
    paints = [Sample(OURS, found["paint_ms"]), Sample("page with one word", found["bare_paint_ms"])]
    ack, small = {"ack": visible["ack_p50_ms"]}, {"a small record": large["small_longest_ms"]}
    scrolled = f"longest frame, {scroll['records']:,} records scrolled"
    rest = {"at rest": scroll["rest_longest_ms"]}
    opened = large["longest_ms"]
    return [
        Row("first paint", "ms", paints, more=False),
        pair("appended record visible, p50", "ms", visible["p50_ms"], ack, more=False),
        pair(scrolled, "ms", scroll["longest_ms"], rest, more=False),
        pair("longest frame, record of 1 MiB opened", "ms", opened, small, more=False),
    ]


#: By the name of the results: the page's title, and what makes its rows.
PAGES: dict[str, tuple[str, Callable[[Any], list[Row]]]] = {
    "store": ("The store in one process", store),
    "follow": ("Restore from a snapshot", follow),
    "hostile": ("Beside hostile clients", hostile),
    "archive": ("Archives: formats and rebuilding", archive),
    "fold": ("Folding changes into a base", fold),
    "rebase": ("What a re-base writes", rebase),
    "freshness": ("From a change to a committed diff", freshness),
    "streams": ("Many streams", many_streams),
    "growth": ("Growth", growth),
    "postgres": ("From PostgreSQL", postgres),
    "publish": ("From a commit in PostgreSQL to a committed diff", published),
    "space": ("Space on disk", disk_space),
    "aged": ("A store after an hour of writing", aged),
    "http": ("What the server adds to the store", over_http),
    "weight": ("The snapshotter's weight", snapshotter_weight),
    "spark_source": ("Reading streams into Spark", spark_source),
    "console": ("The console in a browser", console),
}


def main() -> None:
    conditions = kept_conditions()
    for name, (title, rows) in PAGES.items():
        results = RESULTS / f"{name}.json"
        if not results.exists():
            continue
        about = inspect.cleandoc(rows.__doc__ or "")
        found = json.loads(results.read_text())
        curves = CURVES[name](found) if name in CURVES else []
        command = f"python -m bench.{name}"
        publish(Benchmark(name, title, about, command, conditions, rows(found), curves))
        print(f"docs/benchmarks/{name}.md")


if __name__ == "__main__":
    main()
