"""Kernels are an extra: without them, without numba and without a cache everything works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import streamfold
from streamfold.model.positions import U64_MAX
from streamfold.model.records import Record
from streamfold.records import measure, parse_append_input, record_kernel, warm_up
from streamfold.records.compiler_pages import mappings
from tests.records.models import Clock, assign_slots, sequence, serialize_batch, serialize_input
from tests.records.test_batch import stamped

APPEND = r"""
from streamfold.records import parse_append_input, warm_up
two_records = b"\x0a\x03\x1a\x01a\x0a\x03\x1a\x01b"
"""


def run(code: str, cwd: Path, **environment: str) -> str:
    """Output of `code` in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_records_does_not_load_the_compiler(tmp_path: Path) -> None:
    code = APPEND + "import sys; parse_append_input(two_records); print('numba' in sys.modules)"
    assert run(code, tmp_path) == "False"


def test_without_numba_plain_python_does_the_work(tmp_path: Path) -> None:
    block = "import sys; sys.modules['numba'] = None\n"
    code = block + APPEND + "print(warm_up(), parse_append_input(two_records).batch.count)"
    assert run(code, tmp_path) == "False 2"


def test_kernels_compile_where_no_cache_can_be_written(tmp_path: Path) -> None:
    """As in a container with a read-only file system: a file stands where each folder would."""
    package = tmp_path / "streamfold"
    shutil.copytree(
        Path(streamfold.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__")
    )
    (package / "records" / "__pycache__").touch()
    (tmp_path / "home").touch()
    code = (
        "import numpy, streamfold; from streamfold.records import record_kernel as kernel\n"
        "print(kernel.count_records(numpy.frombuffer(b'\\x0a\\x00', numpy.uint8)))\n"
        "print(type(kernel.count_records._cache).__name__)\n"
        "print(streamfold.__file__)"
    )
    nowhere = str(tmp_path / "home" / "cache")
    folders = dict.fromkeys(("HOME", "XDG_CACHE_HOME"), nowhere)
    out = run(code, tmp_path, NUMBA_CACHE_DIR="", PYTHONPATH=str(tmp_path), **folders)
    assert out.split() == ["1", "NullCache", str(package / "__init__.py")]


def test_every_kernel_is_compiled_for_one_set_of_types_only() -> None:
    raw = serialize_input(stamped(0, U64_MAX), match=U64_MAX)
    for first, clock in ((0, Clock()), (1 << 63, Clock(uncapped=True, now=U64_MAX))):
        payload = sequence(parse_append_input(raw).batch, first, clock).payload
        for buffer in (payload, memoryview(payload), memoryview(bytearray(payload))):
            measure(buffer)
    for compiled in (
        record_kernel.count_records,
        record_kernel.scan,
        record_kernel.emit,
        record_kernel.measure,
    ):
        assert len(vars(compiled)["overloads"]) == 1


def test_threads_that_sequence_at_once_do_not_disturb_each_other() -> None:
    records = [[Record(bytes([thread]) * 500)] * 200 for thread in range(4)]
    expected = [serialize_batch(assign_slots(batch, 0, Clock())) for batch in records]

    def work(thread: int) -> bool:
        batch = parse_append_input(serialize_input(records[thread])).batch
        return all(sequence(batch, 0, Clock()).payload == expected[thread] for _ in range(50))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


KERNEL = """
from numpy import uint64
from shared import double
from streamfold.records.compiling import kernel

@kernel
def quadruple(number):
    return double(double(number))

print(quadruple(uint64(5)))
"""
SHARED = """
from numpy import uint64
from streamfold.records.compiling import inner
FACTOR = uint64({factor})

@inner
def double(number):
    return {body}
"""


def test_a_cached_kernel_is_compiled_again_when_what_it_calls_has_changed(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(KERNEL)

    def result(factor: int, body: str) -> str:
        (tmp_path / "shared.py").write_text(SHARED.format(factor=factor, body=body))
        return run("import main", tmp_path, PYTHONDONTWRITEBYTECODE="1")

    assert result(2, "number * FACTOR") == "20"
    assert list(tmp_path.rglob("*.nbi"))
    assert result(3, "number * FACTOR") == "45"
    assert result(3, "number + FACTOR") == "11"


def test_warming_up_again_is_free_and_says_the_same() -> None:
    assert warm_up()
    assert warm_up()


def test_the_memory_of_the_compiler_is_released_and_kernels_still_work(tmp_path: Path) -> None:
    code = (
        APPEND
        + """
from pathlib import Path
from streamfold.records import release_compiler
def resident():
    found = [line for line in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in line]
    return int(found[0].split()[1]) << 10
assert release_compiler() == 0
assert warm_up()
before = resident()
released = release_compiler()
assert released > 40 << 20, released
assert before - resident() > 0.9 * released, (before, resident())
import numba
from streamfold.records import compiled
assert compiled.scan(two_records).count == 2
print(numba.njit(lambda number: number + 1)(1))
"""
    )
    assert run(code, tmp_path) == "2"


SMAPS = """\
7f00-7f10 r-xp 00000000 fe:00 17      /lib/libllvmlite.so
Rss:                  12 kB
Anonymous:             0 kB
Swap:                  0 kB
VmFlags: rd ex
7f10-7f20 r--p 00001000 fe:00 17      /lib/with space/libllvmlite.so
Rss:                   8 kB
Anonymous:             4 kB
Swap:                  0 kB
7f20-7f30 r--p 00001000 fe:00 17      /lib/libllvmlite.so
Rss:                   8 kB
Anonymous:             0 kB
Swap:                  4 kB
7f30-7f40 rw-p 00002000 fe:00 17      /lib/libllvmlite.so
Rss:                   8 kB
Anonymous:             0 kB
Swap:                  0 kB
7f40-7f50 r--p 00000000 00:00 0
Rss:                   8 kB
"""


def test_only_pages_that_are_as_the_file_has_them_are_disposable() -> None:
    found = list(mappings(SMAPS))
    assert [one.disposable for one in found] == [True, False, False, False, False]
    assert found[0] == (0x7F00, 16, "r-xp", "/lib/libllvmlite.so", 12 << 10, 0)
    assert [one.file for one in found[1:]] == [
        "/lib/with space/libllvmlite.so",
        "/lib/libllvmlite.so",
        "/lib/libllvmlite.so",
        "",
    ]
