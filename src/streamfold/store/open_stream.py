"""A stream that is open for one request: found once, and then read as often as needed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from streamfold.model.configs import Cipher
from streamfold.model.positions import StreamPosition
from streamfold.store.log.sealing import SealingKey
from streamfold.store.log.stream_log import StreamLog
from streamfold.store.mount import Mount
from streamfold.store.read.reader import Reader, read_once
from streamfold.store.read.requests import ReadBatch, ReadRequest
from streamfold.store.usage.recorder import UsageRecorder


@dataclass(frozen=True, slots=True)
class OpenStream:
    """What a caller may do with a stream whose log it has a lease of."""

    mount: Mount
    log: StreamLog
    usage: UsageRecorder

    @property
    def cipher(self) -> Cipher | None:
        return self.log.row.cipher

    @property
    def tail(self) -> StreamPosition:
        """The position after the last durable record."""
        return self.log.durable

    async def read(self, request: ReadRequest, key: SealingKey | None = None) -> ReadBatch:
        """One batch of at most 1000 records and 1 MiB; PositionUnwrittenError at the tail."""
        batch = await read_once(self.mount, self.log, request, key)
        self.usage.record_read(self.log.basin, batch.metered)
        return batch

    @asynccontextmanager
    async def follow(
        self, request: ReadRequest, key: SealingKey | None = None
    ) -> AsyncIterator[Reader]:
        """A reader of the stored records and then of new ones, within the limits of `request`."""
        reader = await Reader.open(self.mount, self.log, request, key)
        self.usage.record_read_session(self.log.basin)
        reader.on_delivered = partial(self.usage.record_delivery, self.log.basin)
        async with aclosing(reader):
            yield reader
