"""Nothing that a client sends holds up the event loop, and with it everybody else.

`bench/lag.py` has the strict bound, for a machine with nothing else to do.
"""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from streamfold.errors import StreamfoldError
from streamfold.wire.json_scan import Limits, split_json
from tests.server.attacks import STREAMS, Attack, attacks

#: Bytes of the bodies: all that is taken when there is time for it.
SIZE = 32 << 20 if os.environ.get("STREAMFOLD_PROVE") else 2 << 20
#: Milliseconds of processor time in one go; before there were threads for it, seconds.
WORK_MAX = 100.0
#: Milliseconds, which depend on what else the machine does: this only tells minutes from moments.
WAIT_MAX = 2_000.0

REPOSITORY = Path(__file__).parents[2]


class Watched:
    """A server in a process of its own, and the clock on its event loop."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        assert process.stdin is not None
        self._answers, self._questions = process.stdout, process.stdin
        self._port = int(self._answers.readline())

    def send(self, attack: Attack) -> int:
        """The status of the answer, which is read to its end, or as far as is wanted."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=300)
        try:
            connection.request(attack.method, attack.path, attack.body, dict(attack.headers))
            response = connection.getresponse()
            left = attack.taken
            while data := response.read1(1 << 20):
                left = None if left is None else left - len(data)
                if left is not None and left <= 0:
                    break
            return response.status
        except ConnectionError:
            return 0  # refused before all of it was sent
        finally:
            connection.close()

    def lag(self) -> tuple[float, float]:
        """Milliseconds waited, and worked, in one go since this was last asked."""
        self._questions.write("\n")
        self._questions.flush()
        waited, worked = self._answers.readline().split()
        return float(waited), float(worked)


@pytest.fixture
def watched() -> Iterator[Watched]:
    command = [sys.executable, "-m", "tests.server.lag_server"]
    process = subprocess.Popen(
        command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        watched = Watched(process)
        for path, headers in STREAMS:
            watched.send(Attack("", "PUT", path, headers, b""))
        yield watched
    finally:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.alone
def test_no_request_holds_up_the_event_loop(watched: Watched) -> None:
    watched.lag()
    slow = []
    for attack in attacks(SIZE):
        status = watched.send(attack)
        assert status < 500, f"{attack.name} -> {status}"
        waited, worked = watched.lag()
        if waited > WAIT_MAX or worked > WORK_MAX:
            slow.append(f"{attack.name}: {waited} ms, of which {worked} ms of work")
    assert not slow, "\n".join(slow)


@pytest.mark.parametrize(
    "shape",
    [
        lambda n: b"," * (n // 2) + b'"' + b'\\"' * (n // 4),
        lambda n: b"[" + b",".join([b"1"] * (n // 2)) + b"]",
        lambda n: b"[" + b" " * n + b"1]",
        lambda n: b"[" * n,
        lambda n: b'["' + b"\\" * n + b'"]',
        lambda n: b'{"a":' * (n // 5),
        lambda n: b'"' * n,
    ],
    ids=["open string", "numbers", "blanks", "brackets", "backslashes", "objects", "quotes"],
)
def test_taking_json_apart_is_linear_in_its_size(shape: Callable[[int], bytes]) -> None:
    """Processor time of the best of three runs, for ten times as much."""

    def cost(size: int) -> float:
        body, best = shape(size), float("inf")
        for _ in range(3):
            begun = time.thread_time()
            with suppress(StreamfoldError):
                split_json(body, Limits(size, size))
            best = min(best, time.thread_time() - begun)
        return best

    assert cost(2_000_000) < 40 * cost(200_000) + 0.05
