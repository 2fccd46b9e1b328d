"""Webhook signatures, verified with the published key."""

from __future__ import annotations

import base64
import json
import re

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from streamfold.errors import InvalidError
from streamfold.wire.durable_streams.signing import JwkSet, jwk, key_id, sign

#: The first key of RFC 8032, section 7.1, and of RFC 8037, appendix A.
SECRET = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
PRIVATE = Ed25519PrivateKey.from_private_bytes(SECRET)
PUBLIC = PRIVATE.public_key()
KID = key_id(PUBLIC)
NOW = 1_700_000_000
BODY = b'{"wake_id":"w","streams":[]}'
HEADER = sign(PRIVATE, KID, NOW, BODY)


def decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def test_a_signature_is_over_the_time_and_the_raw_body() -> None:
    match = re.fullmatch(r"t=(\d+),kid=(ds_[\w-]+),ed25519=([\w-]+)", HEADER)
    assert match is not None
    assert match[1] == str(NOW)
    assert match[2] == KID
    PUBLIC.verify(decode(match[3]), b"%d.%b" % (NOW, BODY))


def test_a_receiver_verifies_with_the_published_key() -> None:
    published = json.loads(msgspec.json.encode(JwkSet((jwk(PUBLIC, KID),))))
    [key] = published["keys"]
    assert key == {
        "kid": KID,
        "x": "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo",  # as RFC 8037 has it
        "kty": "OKP",
        "crv": "Ed25519",
        "alg": "EdDSA",
        "use": "sig",
    }
    received = Ed25519PublicKey.from_public_bytes(decode(key["x"]))
    received.verify(decode(HEADER.rpartition("=")[2]), b"%d.%b" % (NOW, BODY))


def test_a_key_is_named_by_its_thumbprint() -> None:
    assert KID == "ds_kPrK_qmxVWaYVA9wwBF6Iuo3vVzz7TxHCTwXBygrS4k"  # as RFC 8037 has it


@pytest.mark.parametrize("kid", ["", "a,b", "a=b", "a b", "a\n", "\u00e9", "x" * 129])
def test_a_key_whose_name_would_break_the_header_cannot_sign(kid: str) -> None:
    with pytest.raises(InvalidError, match="kid"):
        sign(PRIVATE, kid, NOW, BODY)


def test_time_before_1970_cannot_be_signed() -> None:
    with pytest.raises(InvalidError, match="-1"):
        sign(PRIVATE, KID, -1, BODY)
