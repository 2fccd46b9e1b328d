"""Signatures of webhooks, which prove that this server sent a request, and when.

    Webhook-Signature: t=1700000000,kid=ds_...,ed25519=...

The signature is over the timestamp, a dot and the raw body, so that neither can be replaced.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from typing import Final

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from streamfold.errors import InvalidError, UnauthenticatedError

SIGNATURE_HEADER: Final = "webhook-signature"
ALGORITHM: Final = "ed25519"

#: Seconds between two clocks at most: what is older may be an old request sent again.
TOLERANCE: Final = 300

_KEY_ID = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_SIGNATURE = re.compile(r"t=([0-9]{1,15}),kid=([A-Za-z0-9_.-]{1,128}),ed25519=([A-Za-z0-9_-]{86})")


class Jwk(msgspec.Struct, frozen=True):
    """An Ed25519 public key as RFC 8037 writes it."""

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
    """A name that follows from the key: `ds_` and its thumbprint by RFC 7638."""
    members = f'{{"crv":"Ed25519","kty":"OKP","x":"{_encode(public_key.public_bytes_raw())}"}}'
    return f"ds_{_encode(hashlib.sha256(members.encode()).digest())}"


def sign(private_key: Ed25519PrivateKey, kid: str, timestamp: int, body: bytes) -> str:
    """The value of the header for `body`, sent at `timestamp` (Unix seconds)."""
    if not _KEY_ID.fullmatch(kid) or timestamp < 0:
        raise InvalidError(
            f"kid {kid[:60]!r} at {timestamp} cannot sign: "
            "a kid has letters, digits, '_', '.' and '-', and times start at 0"
        )
    signature = private_key.sign(_signed(timestamp, body))
    return f"t={timestamp},kid={kid},ed25519={_encode(signature)}"


def verify(
    keys: Mapping[str, Ed25519PublicKey],
    header: str,
    body: bytes,
    *,
    now: int,
    tolerance: int = TOLERANCE,
) -> None:
    """Return only if one of `keys`, by their kid, signed `body` within `tolerance` of `now`."""
    match = _SIGNATURE.fullmatch(header)
    key = keys.get(match[2]) if match else None
    if match is None or key is None:
        raise UnauthenticatedError(f"{SIGNATURE_HEADER} is malformed, or by an unknown key")
    timestamp = int(match[1])
    try:
        key.verify(base64.urlsafe_b64decode(f"{match[3]}=="), _signed(timestamp, body))
    except InvalidSignature:
        raise UnauthenticatedError(f"{SIGNATURE_HEADER} does not fit the body") from None
    if abs(now - timestamp) > tolerance:
        raise UnauthenticatedError(
            f"the webhook was signed at {timestamp}, more than {tolerance} seconds from {now}"
        )


def jwk(public_key: Ed25519PublicKey, kid: str) -> Jwk:
    """The key as others get it, to verify with."""
    return Jwk(kid, _encode(public_key.public_bytes_raw()))


def _signed(timestamp: int, body: bytes) -> bytes:
    return b"%d.%b" % (timestamp, body)


def _encode(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")
