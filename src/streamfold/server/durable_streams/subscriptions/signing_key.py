"""The key that webhooks are signed with: made once, kept in the store."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from streamfold.errors import DataCorruptError
from streamfold.store.catalog.documents import Documents
from streamfold.wire.durable_streams import signing

_KIND: Final = "ds-signing-key"
_ID: Final = "current"
#: Bytes of a private key.
_SIZE: Final = 32


class SigningKey:
    """Signs webhooks; its public half is published for receivers to verify them."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.kid = signing.key_id(private.public_key())
        published = signing.JwkSet((signing.jwk(private.public_key(), self.kid),))
        #: The body of `jwks.json`.
        self.jwks = msgspec.json.encode(published)

    def sign(self, timestamp: int, body: bytes) -> str:
        """The value of the signature's header, for `timestamp` in Unix seconds."""
        return signing.sign(self._private, self.kid, timestamp, body)


class Keyring:
    """The key of this store; it is durable before it is used or published."""

    def __init__(self, documents: Documents) -> None:
        self._documents = documents
        self._lock = asyncio.Lock()
        self._key: SigningKey | None = None

    async def key(self) -> SigningKey:
        """The key, made at its first use."""
        async with self._lock:
            if self._key is None:
                self._key = SigningKey(await self._load() or await self._make())
            return self._key

    async def _load(self) -> Ed25519PrivateKey | None:
        raw = await self._documents.get(_KIND, _ID)
        if raw is None:
            return None
        if len(raw) != _SIZE:
            raise DataCorruptError(f"the key of webhooks has {len(raw)} bytes, not {_SIZE}")
        return Ed25519PrivateKey.from_private_bytes(raw)

    async def _make(self) -> Ed25519PrivateKey:
        private = Ed25519PrivateKey.generate()
        await self._documents.put(_KIND, _ID, private.private_bytes_raw())
        return private
