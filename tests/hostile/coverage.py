"""Fuzzes decoders, guided by coverage.

    python -m tests.hostile.coverage INPUTS SEED JOBS FOLDER [NAME]

libFuzzer runs once per process, so each decoder gets a fork. Coverage is that of Streamfold's Python
code; parsers in C and native code count as one step, and are reached through what calls them. The
fuzzer continues after a finding. FOLDER/<number> has what became of a decoder: `findings` as JSON
lines, `stats` as libFuzzer prints them, and `crash-*`, an input that ended the process.

Without atheris, which has wheels for CPython 3.11 to 3.13 on Linux, inputs are mutated without a guide.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import math
import multiprocessing
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import redirect_stderr
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.hostile.decoder import Decoder

#: Packages whose branches guide the fuzzer.
INSTRUMENTED = [
    "streamfold.archive",
    "streamfold.follow.encoding",
    "streamfold.ingest.postgres.pgoutput",
    "streamfold.model",
    "streamfold.records.batch",
    "streamfold.records.payload",
    "streamfold.records.protobuf",
    "streamfold.records.rules",
    "streamfold.server.durable_streams.paths",
    "streamfold.server.http",
    "streamfold.snapshotter.config",
    "streamfold.snapshotter.decoding",
    "streamfold.spark.stream.exactly_once",
    "streamfold.store.engine.table_check",
    "streamfold.store.log.chunks",
    "streamfold.store.rows",
    "streamfold.wire",
]
#: Bytes of an input; seconds and MiB that one may take before it counts as a crash.
_LENGTH, _TIMEOUT, _MEMORY_MIB = 8_192, 60, 4_096
#: Findings of one decoder: more would not be read.
_FINDINGS_MAX = 20


def available() -> bool:
    return importlib.util.find_spec("atheris") is not None


def main(inputs: int, seed: int, jobs: int, folder: Path, only: str) -> None:
    """Share the inputs out among the decoders by their weights, `jobs` decoders at once."""
    warnings.simplefilter("ignore")  # libraries that warn of odd values: not what is judged here
    decoders = [decoder for decoder in _decoders() if only in decoder.name]
    whole = sum(decoder.weight for decoder in decoders)
    context = multiprocessing.get_context("fork")
    running: list[BaseProcess] = []
    for number, decoder in enumerate(decoders):
        place = folder / str(number)
        place.mkdir(parents=True)
        (place / "name").write_text(decoder.name)
        runs = max(len(decoder.seeds) + 1, math.ceil(inputs * decoder.weight / whole))
        process: BaseProcess = context.Process(
            target=_fuzz, args=(decoder, runs, seed + number, place)
        )
        process.start()
        running = _wait_for_room([*running, process], jobs)
    for process in running:
        process.join()


def _wait_for_room(running: list[BaseProcess], jobs: int) -> list[BaseProcess]:
    while len(running) >= jobs:
        wait([process.sentinel for process in running])
        running = [process for process in running if process.is_alive()]
    return running


def _decoders() -> Sequence[Decoder]:
    if not available():
        from tests.hostile.catalogue import decoders

        return decoders()
    import atheris

    with (
        open(os.devnull, "w") as nothing,  # noqa: PTH123 - it names every module
        redirect_stderr(nothing),
        atheris.instrument_imports(include=INSTRUMENTED, enable_loader_override=False),
    ):
        from tests.hostile.catalogue import decoders
    return decoders()


def _fuzz(decoder: Decoder, runs: int, seed: int, folder: Path) -> None:
    """In a process of its own, which libFuzzer ends."""
    stats = os.open(folder / "stats", os.O_WRONLY | os.O_CREAT)
    os.dup2(stats, 2)
    findings = _Findings(folder)
    if not available():
        from tests.hostile.mutation import Mutator

        mutator = Mutator(decoder.seeds, seed)
        for data in decoder.seeds:
            findings.judge(decoder, data)
        for _ in range(runs - len(decoder.seeds)):
            findings.judge(decoder, mutator.next())
        print(f"stat::number_of_executed_units: {runs}", file=sys.stderr)
        return
    import atheris

    corpus = folder / "corpus"
    corpus.mkdir()
    for number, data in enumerate(decoder.seeds):
        (corpus / str(number)).write_bytes(data)
    options = [
        f"-runs={runs}",
        f"-seed={seed % (1 << 31) or 1}",
        f"-max_len={_LENGTH}",
        f"-timeout={_TIMEOUT}",
        f"-rss_limit_mb={_MEMORY_MIB}",
        f"-artifact_prefix={folder}/",
        "-print_final_stats=1",
        "-verbosity=0",
        "-reload=0",
    ]
    atheris.Setup([sys.argv[0], *options, str(corpus)], lambda data: findings.judge(decoder, data))
    atheris.Fuzz()


class _Findings:
    """Writes each kind of finding once."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "findings"
        self._places: set[str] = set()

    def judge(self, decoder: Decoder, data: bytes) -> None:
        from tests.hostile.decoder import judge

        finding = judge(decoder, data)
        if finding is None or finding.place in self._places or len(self._places) >= _FINDINGS_MAX:
            return
        self._places.add(finding.place)
        line = finding._asdict() | {"data": base64.b64encode(data).decode()}
        with self._file.open("a") as lines:
            lines.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    share, first_seed, at_once = map(int, sys.argv[1:4])
    main(share, first_seed, at_once, Path(sys.argv[4]), sys.argv[5] if sys.argv[5:] else "")
