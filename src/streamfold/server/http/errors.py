"""Errors between a client and the listener, whatever protocol they speak.

Both leave the outcome of the request open: the server may have acted on what had arrived.
"""

from __future__ import annotations

from streamfold.errors import StreamfoldError


class ClientHangupError(StreamfoldError):
    """The client closed the connection, or stopped reading, before it had its answer."""

    code = "client_hangup"
    definite = False


class RequestTimeoutError(StreamfoldError):
    """The client sends its request too slowly."""

    code = "request_timeout"
    definite = False
