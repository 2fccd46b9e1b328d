"""Parses the stream of a records request, with the caller's grant, key and configuration."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import msgspec

from streamfold.errors import KeyRequiredError
from streamfold.model.configs import Cipher, StreamConfigLayer
from streamfold.model.grants import Grant
from streamfold.model.names import StreamRef
from streamfold.server.http.headers import text_of
from streamfold.server.http.request import Request
from streamfold.server.s2.resources import parse_ref
from streamfold.store.log.sealing import SealingKey
from streamfold.wire.s2 import headers
from streamfold.wire.s2.headers import EncryptionKey

_NO_LAYER: Final = StreamConfigLayer()
_BASIN: Final = headers.BASIN.encode()
_CONFIG: Final = headers.STREAM_CONFIG.encode()
_KEY: Final = headers.ENCRYPTION_KEY.encode()


class StreamRequest(msgspec.Struct, frozen=True, gc=False):
    """A stream, the caller's grant, the configuration to create it with, and its key."""

    ref: StreamRef
    grant: Grant
    create_with: StreamConfigLayer
    key: EncryptionKey | None

    @property
    def sealing_key(self) -> SealingKey | None:
        return None if self.key is None else SealingKey(self.key.reveal())


def parse_stream_request(request: Request, segment: str, grant: Grant) -> StreamRequest:
    """Parse a request's stream and headers.

    Headers are checked even if they turn out to be unused.
    """
    request_headers = request.headers
    ref = parse_ref(request_headers.get(_BASIN), segment)
    if grant.stream_prefix:
        ref = StreamRef(ref.basin, grant.full_stream_name(ref.stream))
    config, key = request_headers.get(_CONFIG), request_headers.get(_KEY)
    return StreamRequest(
        ref,
        grant,
        _NO_LAYER if config is None else headers.parse_stream_config(text_of(config)),
        None if key is None else headers.parse_encryption_key(text_of(key)),
    )


@contextmanager
def asking_for_key(stream_request: StreamRequest) -> Iterator[None]:
    """Translate KeyRequiredError in the block into an error that names the key header."""
    try:
        yield
    except KeyRequiredError as error:
        headers.require_encryption_key(stream_request.key, Cipher(error.cipher))
        raise
