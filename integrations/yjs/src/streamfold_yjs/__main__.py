"""Serve Yjs documents from Streamfold.

    S2_ACCESS_TOKEN=… streamfold-yjs --streamfold http://localhost:8080 --port 4438

The token is for compaction and deletion. Everything else is done with the token that a browser sends.
"""

from __future__ import annotations

import argparse
import logging
import os

import uvicorn

from streamfold_yjs.gateway import make_app


def main() -> None:
    parser = argparse.ArgumentParser(prog="streamfold-yjs", description=__doc__)
    parser.add_argument("--streamfold", default="http://localhost:8080", metavar="URL")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=4438)
    parser.add_argument(
        "--compact-after",
        type=int,
        default=1 << 20,
        metavar="BYTES",
        help="take a snapshot of a document after this many bytes of updates (1 MiB)",
    )
    parser.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="pages of this origin may use the documents; those of this machine may anyway",
    )
    options = parser.parse_args()
    logging.basicConfig(level="INFO")
    logging.getLogger("httpx").setLevel("WARNING")
    app = make_app(
        options.streamfold,
        token=os.environ.get("S2_ACCESS_TOKEN", ""),
        compact_after=options.compact_after,
        cors_origins=options.cors_origin,
    )
    uvicorn.run(
        app, host=options.host, port=options.port, access_log=False, timeout_graceful_shutdown=1
    )


if __name__ == "__main__":
    main()
