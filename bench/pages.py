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
from bench.report import FOLDER, Benchmark, Curve, Row, Sample, publish, write_index
from streamfold.wording import noun

RESULTS = Path(__file__).parent / "results"
OURS = "Streamfold"


def pair(measure: str, unit: str, ours: float, other: Mapping[str, float], *, more: bool) -> Row:
    """One value of ours beside one of each other subject."""
    samples = [Sample(name, [float(value)]) for name, value in other.items()]
    return Row(measure, unit, [Sample(OURS, [float(ours)]), *samples], more=more)


def store(found: Sequence[dict[str, Any]]) -> list[Row]:
    """Acks of the store in one process, compared with a bare synced write."""
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
    """Archive formats, compared with plain pyarrow."""
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
    """A restore from a snapshot, compared with a replay from the start."""
    rows = []
    for point in found["points"]:
        beside = {"replay from the start": point["replay_s"]} if "replay_s" in point else {}
        name = f"restore of {found['keys']:,} keys after {point['history']:,} changes"
        ours = Sample(OURS, [float(value) for value in point["restore_all_s"]])
        others = [Sample(subject, [value]) for subject, value in beside.items()]
        rows.append(Row(name, "s", [ours, *others], more=False))
    return rows


def hostile(found: dict[str, Any]) -> list[Row]:
    """One client's latency among hostile clients, compared with the same client alone."""
    alone = {"alone": min(found["alone"]["p99_ms"], found["after"]["p99_ms"])}
    beside = found["beside"]["p99_ms"]
    return [
        pair("append p99 beside hostile clients", "ms", beside, alone, more=False),
        pair("memory that they take", "MiB", found["growth_mib"], {}, more=False),
    ]


def fold(found: Sequence[dict[str, Any]]) -> list[Row]:
    """A re-base, compared with polars and DuckDB."""
    rows = []
    for count in dict.fromkeys(one["changes"] for one in found):
        by = {one["subject"]: one for one in found if one["changes"] == count}
        ours = by.pop(next(name for name in by if name not in ("polars", "duckdb", "DuckDB")))
        for key, unit in (("seconds", "s"), ("peak_mib", "MiB")):
            beside = {name: one[key] for name, one in by.items()}
            rows.append(pair(f"re-base of {count:,} changes", unit, ours[key], beside, more=False))
    return rows


def spark_source(found: dict[str, Any]) -> list[Row]:
    """The stream source, compared with Spark's own Parquet source and a loop over the SDK."""
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
    """Bytes that a re-base writes, compared with a rewrite of the whole table."""
    rows = []
    for one in found["few_changes"]:
        whole = {"rewrite of all": one["bytes_of_a_full_rewrite"]}
        name = f"bytes written after {one['keys_changed']:,} changed keys"
        rows.append(pair(name, "B", one["bytes_written"], whole, more=False))
    return rows


def freshness(found: Sequence[dict[str, Any]]) -> list[Row]:
    """Latency from a stream change to a committed diff. On average, half an interval of it is waiting.

    100 changes a second in all, spread over the tables; every change passes through Spark.
    """
    rows = []
    for one in found:
        half = {"half an interval": one["half_an_interval_s"]}
        tables = noun(one["tables"], "table")
        for share in ("p50", "p95", "p99"):
            name = f"{one['tables']} {tables}: change to committed diff, {share}"
            rows.append(pair(name, "s", one[f"{share}_s"], half, more=False))
        for what in ("busy", "idle"):
            name = f"{one['tables']} {tables}: cores of the snapshotter, {what}"
            # Processes that end take their time with them: little may look like less than none.
            rows.append(pair(name, "cores", max(one[f"cores_{what}"], 0.0), {}, more=False))
    return rows


def many_streams(found: Sequence[dict[str, Any]]) -> list[Row]:
    """CPU time, restart time and memory of a store with many streams, compared with 500 streams.

    Every stream is created by its first append. Then appends go to the streams in turn, so that of
    many streams most have left memory, and again after a restart, when all have.
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
    """Disk use of a store, compared with the bytes of its records."""
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
    """A store after an hour of appends, trims and deletions, compared with a new one, in turns."""
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
    """CPU time of the server, compared with the same store inside the measuring process."""
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
    """Time and memory of a snapshotter with Spark, from its start until all tables are published."""
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
    """PostgreSQL tables into streams, compared with PostgreSQL's own programs on the same machine."""
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
    """Latency from a PostgreSQL commit to a committed diff. On average, half an interval is waiting."""
    half = {"half an interval": found["half_an_interval_s"]}
    return [
        pair(f"commit to committed diff, {part}", "s", found[f"{part}_s"], half, more=False)
        for part in ("p50", "p99")
    ]


def growth(found: dict[str, list[tuple[int, dict[str, float]]]]) -> list[Row]:
    """Cost at ten and a hundred times as many records, followers, snapshots and table rows."""
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
    """How long a person waits for the console in Chromium, compared with a trivial page."""
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
    "hostile": ("Under hostile clients", hostile),
    "archive": ("Archives: formats and rebuilding", archive),
    "fold": ("Folding changes into a base", fold),
    "rebase": ("Re-base write volume", rebase),
    "freshness": ("From a change to a committed diff", freshness),
    "streams": ("Many streams", many_streams),
    "growth": ("Growth", growth),
    "postgres": ("PostgreSQL ingest", postgres),
    "publish": ("From a PostgreSQL commit to a committed diff", published),
    "space": ("Space on disk", disk_space),
    "aged": ("An aged store", aged),
    "http": ("Server overhead", over_http),
    "weight": ("Snapshotter resource use", snapshotter_weight),
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
    write_index(FOLDER)


if __name__ == "__main__":
    main()
