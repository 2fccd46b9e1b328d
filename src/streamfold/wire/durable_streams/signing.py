"""Webhook signatures, which prove that this server sent a request, and when.

    Webhook-Signature: t=1700000000,kid=ds_...,ed25519=...

The signature covers the timestamp, a dot and the raw body, so neither can be replaced.
"""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Final

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from streamfold.errors import InvalidError

SIGNATURE_HEADER: Final = "webhook-signature"
ALGORITHM: Final = "ed25519"

_KEY_ID = re.compile(r"[A-Za-z0-9_.-]{1,128}")


class Jwk(msgspec.Struct, frozen=True):
    """An Ed25519 public key in RFC 8037 format."""

    kid: str
    x: str
    kty: str = "OKP"
    crv: str = "Ed25519"
    alg: str = "EdDSA"
    use: str = "sig"


class JwkSet(msgspec.Struct, frozen=True):
    """The body of `jwks.json`."""

    keys: tuple[Jwk, ...]


def key_id(public_key: Ed25519PublicKey) -> str:
    """Derive an id from the key: `ds_` and its RFC 7638 thumbprint."""
    members = f'{{"crv":"Ed25519","kty":"OKP","x":"{_encode(public_key.public_bytes_raw())}"}}'
    return f"ds_{_encode(hashlib.sha256(members.encode()).digest())}"


def sign(private_key: Ed25519PrivateKey, kid: str, timestamp: int, body: bytes) -> str:
    """Return the header value for `body`, sent at `timestamp` (Unix seconds)."""
    if not _KEY_ID.fullmatch(kid) or timestamp < 0:
        raise InvalidError(
            f"kid {kid[:60]!r} at {timestamp} cannot sign: "
            "a kid has letters, digits, '_', '.' and '-', and times start at 0"
        )
    signature = private_key.sign(_signed(timestamp, body))
    return f"t={timestamp},kid={kid},ed25519={_encode(signature)}"


def jwk(public_key: Ed25519PublicKey, kid: str) -> Jwk:
    """Return the key in the form that receivers verify with."""
    return Jwk(kid, _encode(public_key.public_bytes_raw()))


def _signed(timestamp: int, body: bytes) -> bytes:
    return b"%d.%b" % (timestamp, body)


def _encode(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")
