"""The server under attack: `python -P serving.py '<JSON>'` serves one location until stopped.

It is started as a file and imports little besides the server, so `PYTHONPATH` may point to another
version of Streamfold. Its JSON contains settings for which `streamfold serve` has no options:
caches so small that streams leave memory all the time, and background work that never rests. It may
also have a wrong clock and a faulty disk, which lines of JSON on standard input control.
"""

from __future__ import annotations

import json
import logging
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

_NANOSECONDS = 1_000_000_000


def move_clock(seconds: float) -> None:
    """Make this process's Python code read a system clock that is `seconds` ahead."""
    shift = round(seconds * _NANOSECONDS)
    read, read_ns = time.time, time.time_ns
    time.time = lambda: read() + seconds
    time.time_ns = lambda: read_ns() + shift


def main() -> None:
    arguments = json.loads(sys.argv[1])
    os.umask(0o077)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if arguments.get("disk") is not None:
        _install_disk(**arguments["disk"])
    if arguments.get("clock"):
        move_clock(arguments["clock"])
    _serve(arguments)


def _serve(arguments: dict[str, Any]) -> None:
    from streamfold.errors import DeviceFailedError, WriterFencedError
    from streamfold.server.config import Configuration
    from streamfold.server.main import Server, run
    from streamfold.store.settings import StoreSettings

    def announce(server: Server) -> None:
        print(json.dumps({"port": server.port}), flush=True)

    # Earlier versions need no permission to take over a store, and lack this setting.
    permission: dict[str, Any] = {"take_over": True} if hasattr(Configuration, "take_over") else {}
    configuration = Configuration(
        location=arguments["location"],
        store=StoreSettings(**arguments["store"]),
        host="127.0.0.1",
        port=0,
        console=None,
        access_log=False,
        long_poll=1.0,
        **(permission if arguments["take_over"] else {}),
    )
    try:
        run(configuration, announce)
    except WriterFencedError:
        sys.exit(8)  # as `streamfold serve` does
    except DeviceFailedError as error:
        logging.getLogger(__name__).error("the server stops: %s", error)
        sys.exit(1)  # as `streamfold serve` does


def _install_disk(root: str, boot: str, spare: str | None) -> None:
    """Intercept the server's disk calls. With `spare`, also track what is synced."""
    # Before importing anything, because Streamfold's functions have `os.fsync` as a default value.
    real_sync = os.fsync
    syncs: list[Any] = [real_sync]

    def sync_by_last(descriptor: int) -> None:
        syncs[-1](descriptor)

    setattr(os, "fsync", sync_by_last)  # noqa: B010 - of another type
    from streamfold.testing.adversary.machine.faulty_disk import DiskFault, FaultyDisk

    hostile = None
    setattr(os, "fsync", real_sync)  # noqa: B010 - the disk puts its own in place of it
    if spare is not None:
        from streamfold.testing.hostile_disk import HostileDisk, Mood

        hostile = HostileDisk(Path(root), Path(spare))

        def sync(descriptor: int) -> None:
            hostile.sync(Path(f"/proc/self/fd/{descriptor}").readlink())

        setattr(os, "fsync", sync)  # noqa: B010
    disk = FaultyDisk(Path(root))
    disk.install()
    if hostile is not None:
        hostile.follow(disk.native)
    syncs.append(os.fsync)

    from streamfold.store.engine import local_disk

    local_disk.current_boot = lambda: boot

    def obey() -> None:
        for line in sys.stdin:
            order = json.loads(line)
            if "fault" in order:
                disk.turn(DiskFault(order["fault"]))
            if "cut_power" in order and hostile is not None:
                dice = random.Random(order["seed"])
                with hostile.frozen():  # every sync waits until the process is gone
                    hostile.cut_power(Path(order["cut_power"]), dice, dice.choice(list(Mood)))
                    os._exit(0)

    threading.Thread(target=obey, daemon=True, name="orders").start()


if __name__ == "__main__":
    main()
