"""HTTP over the store: one port, HTTP/1.1 and HTTP/2, in the event loop of the store."""

import sys

from streamfold.extras import needing_extra

with needing_extra("server"):
    import prometheus_client as prometheus_client

    if sys.platform != "win32":
        import uvloop as uvloop
