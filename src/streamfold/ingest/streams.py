"""The streams of a basin, created when they are first needed."""

from __future__ import annotations

from typing import Protocol

from streamfold.extras import needing_extra
from streamfold.follow.clients.client import StreamClient

with needing_extra("client"):
    import s2_sdk

    from streamfold.follow.clients.s2 import S2Client, translate
    from streamfold.follow.clients.s2_internals import retire_silent_connections

_EXISTS = "resource_already_exists"


class Streams(Protocol):
    """Where an ingester writes."""

    async def ensure(self, name: str) -> StreamClient:
        """Open the stream; create it unless it exists."""
        ...


class BasinStreams:
    """The streams of a basin of any S2 endpoint."""

    def __init__(self, basin: s2_sdk.S2Basin) -> None:
        self._basin = basin

    async def ensure(self, name: str) -> StreamClient:
        # The last record says where the source was left, and readers start from the first copy: none
        # of them may expire, as they would after 7 days in most basins.
        kept = s2_sdk.StreamConfig(retention_policy="infinite")
        try:
            await self._basin.create_stream(name, config=kept)
        except s2_sdk.S2Error as error:
            if getattr(error, "code", "") != _EXISTS:
                retire_silent_connections(self._basin, error)
                raise translate(error) from error
        return S2Client(self._basin.stream(name))
