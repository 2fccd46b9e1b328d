"""The verdicts of `bench.soak`, from its samples and its books.

- *flat*: over the soak without its first third, resident memory, descriptors, files and the median
  latency do not rise. The rise is the Theil-Sen slope (the median of the slopes of all pairs of
  samples) times the duration; it fails if the lower end of its 95 % confidence interval is above the
  tolerance.
- *memory*: never above what docs/reference/limits.md allows for the connections that were open.
- *refusals*: every answer is a success, a position beyond the tail, or 429 or 503 with Retry-After.
- *recovery*: after the overload, without help, the median latency returns under the same load.
- *release*: once the load has ended, memory returns.
- *account*: no acknowledged record is lost, doubled, moved or changed, and no refused one is there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bench.soak_ledger import Ledger

#: MiB that a server may use beyond what it uses at rest, and for each connection over HTTP/1 with its
#: request: docs/reference/limits.md.
BEYOND_REST_MIB, CONNECTION_MIB = 1_249.0, (136 + 12 + 8) / 1024
#: MiB above what a new server uses that may remain once the load has ended: memtables, cached blocks,
#: recent records, and what allocators keep. After three overloads in a row with 14,000 connections it
#: was 400, 306 and 340: it does not add up.
REMAINS_MIB = 448.0
#: Times the median latency of the soak that the median latency may take after an overload.
RECOVERED = 2.0
#: What may rise over the soak: part of the median, and an amount that is noise.
TOLERANCES = {
    "memory": (0.05, 16.0),
    "descriptors": (0.05, 16.0),
    "files": (0.10, 32.0),
    "append p50": (0.25, 2.0),
}


@dataclass
class Moment:
    """One sample."""

    minute: float
    phase: str
    memory: float
    descriptors: int
    files: int
    stored_mib: float
    append_p50_ms: float | None
    append_p99_ms: float | None
    read_p99_ms: float | None
    #: Milliseconds: the longest time without an answer, and the most processor time in one step.
    waited_ms: float
    worked_ms: float
    held_ms: float
    offered_per_s: float
    answered_per_s: float
    left_out: int
    under_way: int
    connections: int
    #: Milliseconds that the generator itself was late at most.
    generator_ms: float
    load_average: float
    statuses: dict[int, int]
    mute: int


@dataclass(frozen=True)
class Verdict:
    """One judgement, with the figures that it rests on."""

    name: str
    holds: bool
    text: str
    #: Whether it is about time, which is not judged where others use the processors.
    timed: bool = False


def rise(minutes: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """The rise over all of `minutes` by Theil and Sen, and the lower end of its 95 % interval."""
    at, value = np.asarray(minutes), np.asarray(values, dtype=float)
    one, other = np.triu_indices(len(at), k=1)
    slopes = np.sort((value[other] - value[one]) / (at[other] - at[one]))
    n = len(at)
    width = 1.96 * float(np.sqrt(n * (n - 1) * (2 * n + 5) / 18))
    lowest = max(0, int((len(slopes) - width) / 2))
    span = float(at[-1] - at[0])
    return float(np.median(slopes)) * span, float(slopes[lowest]) * span


def judge(moments: Sequence[Moment], ledger: Ledger) -> list[Verdict]:
    """All verdicts."""
    return [
        *_flat(moments),
        _memory(moments),
        _refusals(moments),
        _recovery(moments),
        _release(moments),
        _account(ledger),
    ]


def statuses_of(moments: Sequence[Moment]) -> Counter[int]:
    statuses: Counter[int] = Counter()
    for moment in moments:
        statuses.update(moment.statuses)
    return statuses


def _memory(moments: Sequence[Moment]) -> Verdict:
    """What a connection needed may stay with the allocator, so the most connections so far count."""
    rest, most, worst = moments[0].memory, 0, (-1e9, moments[0], 0)
    for moment in moments:
        most = max(most, moment.connections)
        worst = max(
            worst, (moment.memory - most * CONNECTION_MIB, moment, most), key=lambda w: w[0]
        )
    _, moment, connections = worst
    allowed = rest + BEYOND_REST_MIB + connections * CONNECTION_MIB
    text = (
        f"{moment.memory:.0f} MiB after up to {connections:,} connections; {allowed:,.0f} MiB are "
        f"allowed; at most {max(one.memory for one in moments):.0f} MiB at any time"
    )
    return Verdict("memory", moment.memory <= allowed, text)


def _refusals(moments: Sequence[Moment]) -> Verdict:
    statuses = statuses_of(moments)
    mute = sum(moment.mute for moment in moments)
    refused = statuses[429] + statuses[503]
    strange = {
        status: number
        for status, number in statuses.items()
        if status and not (200 <= status < 300 or status in (416, 429, 503))
    }
    text = (
        f"{sum(statuses.values()):,} requests, {refused:,} answers 429 or 503, {mute} of them without "
        f"Retry-After; {statuses[0]:,} without an answer; others {strange or 'none'}"
    )
    return Verdict("refusals", not strange and not mute, text)


def _recovery(moments: Sequence[Moment]) -> Verdict:
    before, after = (
        float(
            np.median(
                [one.append_p50_ms for one in phase(moments, name, later=True) if one.append_p50_ms]
            )
        )
        for name in ("soak", "recovery")
    )
    text = f"append p50 {before:.1f} ms before the overload, {after:.1f} ms after it"
    return Verdict("recovery", after <= RECOVERED * before, text, timed=True)


def _typical_ms(moments: Sequence[Moment]) -> float:
    """The median of the median latencies."""
    return float(np.median([one.append_p50_ms for one in moments if one.append_p50_ms]))


def _release(moments: Sequence[Moment]) -> Verdict:
    rest, last = moments[0].memory, moments[-1].memory
    text = f"{rest:.0f} MiB at the start, {last:.0f} MiB at rest at the end"
    return Verdict("release", last <= rest + REMAINS_MIB, text)


def _account(ledger: Ledger) -> Verdict:
    wrong = ledger.judge()
    text = (
        f"{ledger.acknowledged:,} records acknowledged and read back, {ledger.doubtful:,} without an "
        "answer"
    )
    return Verdict("account", not wrong, "; ".join([text, *wrong]))


def phase(moments: Sequence[Moment], name: str, *, later: bool = False) -> list[Moment]:
    """The samples of a phase; `later` leaves out its first third."""
    chosen = [one for one in moments if one.phase == name]
    return chosen[len(chosen) // 3 :] if later else chosen


def _flat(moments: Sequence[Moment]) -> Iterator[Verdict]:
    steady = phase(moments, "soak", later=True)
    columns: dict[str, list[tuple[float, float]]] = {
        "memory": [(one.minute, one.memory) for one in steady],
        "descriptors": [(one.minute, one.descriptors) for one in steady],
        "files": [(one.minute, one.files) for one in steady],
        "append p50": [(one.minute, one.append_p50_ms) for one in steady if one.append_p50_ms],
    }
    for name, points in columns.items():
        minutes, values = zip(*points, strict=True)
        typical, (risen, least) = float(np.median(values)), rise(minutes, values)
        part, noise = TOLERANCES[name]
        allowed = max(part * typical, noise)
        yield Verdict(
            f"flat {name}",
            least <= allowed,
            f"median {typical:.1f}, rise {risen:+.1f} (at least {least:+.1f}, {allowed:.1f} allowed)",
            timed=name == "append p50",
        )
