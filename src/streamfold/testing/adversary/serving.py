"""The server under attack: `python -P serving.py '<JSON>'` serves one location until it is stopped.

It is started as a file, and imports nothing but the server, so that `PYTHONPATH` may point to another
version of Streamfold. Its JSON has settings that `streamfold serve` has no options for: caches so small
that streams leave memory all the time, and background work that never rests.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any


def main() -> None:
    arguments = json.loads(sys.argv[1])
    if not arguments["kernels"]:
        # The kernels take seconds to load; without numba plain Python does the same.
        sys.modules["numba"] = None  # type: ignore[assignment]
    os.umask(0o077)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )

    from streamfold.errors import WriterFencedError
    from streamfold.server.config import Configuration
    from streamfold.server.main import Server, run
    from streamfold.store.settings import StoreSettings

    def announce(server: Server) -> None:
        print(json.dumps({"port": server.port}), flush=True)

    # Earlier versions need no permission to take a store over, and have no such setting.
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


if __name__ == "__main__":
    main()
