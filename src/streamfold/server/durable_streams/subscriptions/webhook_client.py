"""One signed POST to a webhook: to a checked address, within a deadline, with a bounded answer."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import httpx
import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from streamfold.errors import DataCorruptError
from streamfold.http_client import AsyncHttp, build_request, cause_of
from streamfold.server.durable_streams.subscriptions.webhook_addresses import WebhookAddress
from streamfold.store.catalog.documents import Documents
from streamfold.wire.durable_streams import signing

_KIND: Final = "ds-signing-key"
_ID: Final = "current"
#: Bytes of a private key.
_KEY_SIZE: Final = 32
#: Bytes of an answer's body that are read; httpx bounds those of its head.
BODY_MAX: Final = 64 << 10
#: Headers of an answer.
_HEADERS_MAX: Final = 100
#: Seconds for everything, from the first packet to the last.
TIMEOUT: Final = 10.0


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
        if len(raw) != _KEY_SIZE:
            raise DataCorruptError(f"the key of webhooks has {len(raw)} bytes, not {_KEY_SIZE}")
        return Ed25519PrivateKey.from_private_bytes(raw)

    async def _make(self) -> Ed25519PrivateKey:
        private = Ed25519PrivateKey.generate()
        await self._documents.put(_KIND, _ID, private.private_bytes_raw())
        return private


class WebhookError(Exception):
    """The answer is not valid HTTP; the receiver may still have got the request."""


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    #: At most BODY_MAX bytes of it; empty if there was more.
    body: bytes


class WebhookClient:
    """Sends requests; redirects are answers like others, and are not followed."""

    def __init__(self, timeout: float = TIMEOUT, tls: ssl.SSLContext | None = None) -> None:
        self._timeout = timeout
        self._http = AsyncHttp(tls)

    async def post(
        self,
        target: WebhookAddress,
        addresses: Sequence[str],
        headers: Mapping[str, str],
        body: bytes,
    ) -> Reply:
        """The answer; OSError (TimeoutError among them) or WebhookError without one."""
        failure: httpx.TransportError | None = None
        try:
            async with asyncio.timeout(self._timeout):
                for address in addresses:
                    try:
                        return await self._post(target, address, headers, body)
                    except httpx.ConnectError as error:
                        failure = error
        except httpx.TransportError as error:
            failure = error
        cause = cause_of(failure) if failure else OSError(f"{target.host} has no address")
        if isinstance(cause, OSError):
            raise cause
        raise WebhookError(f"the answer cannot be read: {cause}") from cause

    async def _post(
        self, target: WebhookAddress, address: str, headers: Mapping[str, str], body: bytes
    ) -> Reply:
        """Connect to the checked address; certificate and `host` are those of the name."""
        origin = httpx.URL(
            scheme="https" if target.secure else "http", host=address, port=target.port
        )
        request = build_request(
            "POST",
            origin,
            target.path,
            {"host": target.authority, "content-length": str(len(body)), **headers},
            body,
            timeout=self._timeout,
            sni_hostname=target.host,
        )
        async with self._http.send(request) as response:
            if len(response.headers.raw) > _HEADERS_MAX:
                raise WebhookError(f"the answer has more than {_HEADERS_MAX} headers")
            return Reply(response.status_code, await _read_body(response))


async def _read_body(response: httpx.Response) -> bytes:
    """The body; empty if it is longer than is read."""
    if int(response.headers.get("content-length", 0)) > BODY_MAX:
        return b""
    body = bytearray()
    async for piece in response.aiter_raw():
        body += piece
        if len(body) > BODY_MAX:
            return b""
    return bytes(body)
