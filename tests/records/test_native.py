"""The native codec among threads and processes, and when it is loaded."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from streamfold.model.records import Record
from streamfold.records import parse_append_input
from tests.records.models import Clock, assign_slots, sequence, serialize_batch, serialize_input

#: What clients import, and what every command does.
WITHOUT = [
    "import streamfold",
    "from streamfold import connect, Record",
    "import streamfold.follow",
    "from streamfold.cli.main import main\nsys.argv[1:] = ['--help']\n"
    "try: main()\nexcept SystemExit as end: assert not end.code",
]


@pytest.mark.parametrize("code", WITHOUT)
def test_native_code_is_not_loaded_before_it_is_needed(code: str) -> None:
    check = f"import sys\n{code}\nsys.exit('streamfold._native' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, capture_output=True, timeout=120)


def test_threads_that_sequence_at_once_do_not_disturb_each_other() -> None:
    records = [[Record(bytes([thread]) * 500)] * 200 for thread in range(4)]
    expected = [serialize_batch(assign_slots(batch, 0, Clock())) for batch in records]

    def work(thread: int) -> bool:
        batch = parse_append_input(serialize_input(records[thread])).batch
        return all(sequence(batch, 0, Clock()).payload == expected[thread] for _ in range(50))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_a_forked_process_goes_on_with_what_was_loaded() -> None:
    raw = serialize_input([Record(b"x" * 500)] * 200)
    expected = sequence(parse_append_input(raw).batch, 0, Clock()).payload
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(_sequenced, [raw] * 4) == [expected] * 4


def _sequenced(raw: bytes) -> bytes:
    return sequence(parse_append_input(raw).batch, 0, Clock()).payload
