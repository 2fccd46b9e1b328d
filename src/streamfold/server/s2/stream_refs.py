"""The stream that a request for records is about, with the request's grant, key and configuration."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import msgspec

from streamfold.model.configs import StreamConfigLayer
from streamfold.model.grants import Grant
from streamfold.model.names import StreamRef
from streamfold.server.http.headers import text_of
from streamfold.server.http.request import Request
from streamfold.server.s2.resources import parse_ref
from streamfold.store.log.sealing import SealingKey
from streamfold.store.read.reader import OpenStream
from streamfold.store.store import StreamStore
from streamfold.wire.s2 import headers
from streamfold.wire.s2.headers import EncryptionKey

_NO_LAYER: Final = StreamConfigLayer()
_BASIN: Final = headers.BASIN.encode()
_CONFIG: Final = headers.STREAM_CONFIG.encode()
_KEY: Final = headers.ENCRYPTION_KEY.encode()


class StreamRequest(msgspec.Struct, frozen=True, gc=False):
    """A stream, the caller's grant, the configuration to create it with, and the key to its records."""

    ref: StreamRef
    grant: Grant
    create_with: StreamConfigLayer
    key: EncryptionKey | None

    @property
    def sealing_key(self) -> SealingKey | None:
        return None if self.key is None else SealingKey(self.key.reveal())


def parse_stream_request(request: Request, segment: str, grant: Grant) -> StreamRequest:
    """Parse what a request is about; headers are checked even if they turn out to be unused."""
    given = request.headers
    ref = parse_ref(given.get(_BASIN), segment)
    if grant.stream_prefix:
        ref = StreamRef(ref.basin, grant.full_stream_name(ref.stream))
    config, key = given.get(_CONFIG), given.get(_KEY)
    return StreamRequest(
        ref,
        grant,
        _NO_LAYER if config is None else headers.parse_stream_config(text_of(config)),
        None if key is None else headers.parse_encryption_key(text_of(key)),
    )


@asynccontextmanager
async def open_stream(
    store: StreamStore, stream_request: StreamRequest, *, on_append: bool
) -> AsyncIterator[OpenStream]:
    """The stream of a request, created if its basin allows that; raises unless the key fits."""
    async with store.opened(
        *stream_request.ref, create_with=stream_request.create_with, on_append=on_append
    ) as stream:
        if stream.cipher is not None:
            headers.require_encryption_key(stream_request.key, stream.cipher)
        yield stream
