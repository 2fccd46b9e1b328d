"""Encryption of whole chunks with customer-held keys.

A sealed payload is a random nonce followed by ciphertext and tag. The tag also authenticates the
chunk's header and the stream's id, so a chunk cannot be moved within or between streams. The key is
never stored or logged.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable

from aeg import aegis256
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from streamfold.errors import DecryptionFailedError, InvalidError
from streamfold.model.configs import Cipher

#: Bytes of a key, for either cipher.
KEY_BYTES = 32
#: Bytes of AES-GCM's random nonce. A nonce this short may repeat after about 2**32 uses.
_GCM_NONCE = 12
#: Hence no AES-GCM chunk may begin beyond this seq_num.
GCM_SEQ_NUM_MAX = 2**32 - 1


class Sealing(enum.IntEnum):
    """The cipher of a payload, as stored in the chunk header."""

    CLEAR = 0
    AEGIS_256 = 1
    AES_256_GCM = 2


SEALING_OF = {Cipher.AEGIS_256: Sealing.AEGIS_256, Cipher.AES_256_GCM: Sealing.AES_256_GCM}


class SealingKey:
    """A customer's key, compared by its bytes. Its repr does not reveal it."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise InvalidError(f"an encryption key has {len(key)} bytes: it must have {KEY_BYTES}")
        self._key = key

    def __repr__(self) -> str:
        return "SealingKey(...)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SealingKey) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def seal(
        self,
        sealing: Sealing,
        payload: bytes | memoryview,
        context: bytes,
        random: Callable[[int], bytes] = os.urandom,
    ) -> bytes:
        """Encrypt `payload` and bind it to `context`."""
        if sealing is Sealing.AEGIS_256:
            nonce = random(aegis256.NONCEBYTES)
            return nonce + bytes(aegis256.encrypt(self._key, nonce, payload, context))
        nonce = random(_GCM_NONCE)
        return nonce + AESGCM(self._key).encrypt(nonce, payload, context)

    def unseal(self, sealing: Sealing, sealed: bytes | memoryview, context: bytes) -> bytes:
        """Reverse `seal`. Raises DecryptionFailedError for another key or altered bytes."""
        size = aegis256.NONCEBYTES if sealing is Sealing.AEGIS_256 else _GCM_NONCE
        nonce, body = bytes(sealed[:size]), bytes(sealed[size:])
        try:
            if sealing is Sealing.AEGIS_256:
                return bytes(aegis256.decrypt(self._key, nonce, body, context))
            return AESGCM(self._key).decrypt(nonce, body, context)
        except (ValueError, TypeError, InvalidTag):
            # Drop the cause, which may contain bytes of the key or the records.
            raise DecryptionFailedError from None
