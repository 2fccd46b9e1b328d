"""Serves the store over HTTP/1.1 and HTTP/2 on one port, in the store's event loop."""

import sys

from streamfold.extras import needing_extra

with needing_extra("server"):
    import prometheus_client as prometheus_client

    if sys.platform != "win32":
        import uvloop as uvloop
