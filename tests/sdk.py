"""The official client for tests, which waits for a busy machine."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from s2_sdk import S2, Endpoints, Timeout

#: By default the client repeats a request after five seconds, and one may take as long on a busy
#: machine: an append would be in the stream twice.
_TIMEOUT = Timeout(request=timedelta(minutes=2), connection=timedelta(minutes=2))


def sdk_client(url: str, token: str = "ignored", **options: Any) -> S2:
    """Return a client of the server at an address, to be used as a context manager."""
    return S2(
        token,
        endpoints=Endpoints(account=url, basin=url),
        **{"timeout": _TIMEOUT, **options},
    )
