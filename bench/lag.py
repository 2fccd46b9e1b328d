"""How long the event loop of a server is held up by the most expensive requests that a client can send.

    python -m bench.lag [--size BYTES]

Each request is sent alone. `waited` is time on the wall, which on a busy machine includes what other
processes took. The bound of 50 ms is for what does not: `worked`, the processor time of the loop's
thread in one iteration, and `held`, that of a worker thread while it kept the interpreter's lock.
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
    parser.add_argument("--only", default="", help="measure requests whose name has this in it")
    arguments = parser.parse_args()
    size, only = arguments.size, arguments.only
    command = [sys.executable, "-m", "tests.server.lag_server"]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        watched = Watched(process)
        for path, headers in STREAMS:
            watched.send(Attack("", "PUT", path, headers, b""))
        late = sum(_measure(watched, attack) for attack in attacks(size) if only in attack.name)
        assert process.stdin is not None
        process.stdin.close()
    print(f"{late} beyond {BOUND:.0f} ms")
    return min(late, 1)


def _measure(watched: Watched, attack: Attack) -> bool:
    watched.lag()
    status = watched.send(attack)
    waited, worked, held = watched.lag()
    late = max(worked, held) > BOUND
    mark = "  <--" if late else ""
    print(
        f"{attack.name:52} {status:3}  waited {waited:7.1f} ms, worked {worked:6.1f} ms, "
        f"held {held:6.1f} ms{mark}",
        flush=True,
    )
    return late


if __name__ == "__main__":
    sys.exit(main())
