"""How long the event loop of a server is held up by the most expensive requests that a client can send.

    python -m bench.lag [--size BYTES]

Each request is sent alone. The bound is 50 ms on a machine with nothing else to do. On a busy one the
time that the loop waited includes what others took from it; the time that it worked does not.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from tests.server.attacks import STREAMS, Attack, attacks
from tests.server.test_loop_lag import REPOSITORY, Watched

#: Milliseconds that others may have to wait.
BOUND = 50.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=32 << 20, help="bytes of the largest bodies")
    size = parser.parse_args().size
    command = [sys.executable, "-m", "tests.server.lag_server"]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        watched = Watched(process)
        for path, headers in STREAMS:
            watched.send(Attack("", "PUT", path, headers, b""))
        late = sum(_measure(watched, attack) for attack in attacks(size))
        assert process.stdin is not None
        process.stdin.close()
    print(f"{late} beyond {BOUND:.0f} ms")
    return min(late, 1)


def _measure(watched: Watched, attack: Attack) -> bool:
    watched.lag()
    status = watched.send(attack)
    waited, worked = watched.lag()
    mark = "  <--" if waited > BOUND else ""
    print(f"{attack.name:52} {status:3}  waited {waited:7.1f} ms, worked {worked:6.1f} ms{mark}")
    return waited > BOUND


if __name__ == "__main__":
    sys.exit(main())
