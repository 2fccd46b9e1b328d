"""Events to an HTTP endpoint, signed according to Standard Webhooks.

    POST <url>
    content-type: application/json
    webhook-id: <event id>
    webhook-timestamp: <seconds since 1970>
    webhook-signature: v1,<base64 of HMAC-SHA256 over "id.timestamp.body">      with a secret only

Any 2xx accepts the event. Redirects are not followed: a signed request goes only to its URL.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated
from urllib.parse import SplitResult, urlsplit

import httpx
import msgspec

from streamfold.archive.events.event import Event, encode_event
from streamfold.archive.events.sink import (
    EventRefusedError,
    EventSink,
    EventUnconfirmedError,
    SecretReference,
    SinkContext,
    SinkType,
    WorkerThread,
)
from streamfold.errors import InvalidError
from streamfold.extensions import Options
from streamfold.http_client import AsyncHttp, build_request, cause_of

#: Seconds for the whole attempt, from connecting to the status of the response.
TIMEOUT = 15.0


class WebhookOptions(Options, frozen=True, kw_only=True):
    url: Annotated[str, msgspec.Meta(description="where to POST; `http://` or `https://`")]
    secret_env: Annotated[
        str | None, msgspec.Meta(description="variable with the secret that signs requests")
    ] = None
    secret_file: Annotated[
        str | None, msgspec.Meta(description="file with that secret, instead of a variable")
    ] = None
    ca_file: Annotated[
        str | None,
        msgspec.Meta(description="PEM of the authorities to trust instead of the system's"),
    ] = None

    def secret(self) -> SecretReference | None:
        if self.secret_env is None and self.secret_file is None:
            return None
        file = Path(self.secret_file) if self.secret_file is not None else None
        return SecretReference(self.secret_env, file)

    def tls(self) -> ssl.SSLContext | None:
        if self.ca_file is None:
            return None
        try:
            return ssl.create_default_context(cafile=self.ca_file)
        except OSError as error:  # includes SSLError
            raise InvalidError(
                f"ca_file {self.ca_file!r} has no certificates that can be used "
                f"({error.strerror or type(error).__name__}): give a PEM file"
            ) from None


class WebhookSink(EventSink):
    """Posts each event in its own request. Only the host of the URL is ever shown.

    Paths and queries of webhooks often act as passwords.
    """

    def __init__(
        self,
        url: str,
        *,
        secret: SecretReference | None = None,
        timeout: float = TIMEOUT,
        tls: ssl.SSLContext | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._url = _parse_url(url)
        self._path = (self._url.path or "/") + (f"?{self._url.query}" if self._url.query else "")
        self._secret = secret
        self._timeout = timeout
        self._http = AsyncHttp(tls)
        self._now = now
        #: Reads the secret, which may be in a file.
        self._thread = WorkerThread(f"webhook {self._name}")
        if secret is not None:
            secret.read_key()  # report a missing secret now, not with the first event

    def __repr__(self) -> str:
        return f"WebhookSink({self._name!r})"

    @property
    def _name(self) -> str:
        return f"{self._url.scheme}://{self._url.hostname}:{self._port}"

    @property
    def _port(self) -> int:
        return self._url.port or (443 if self._url.scheme == "https" else 80)

    @property
    def _origin(self) -> httpx.URL:
        return httpx.URL(scheme=self._url.scheme, host=self._url.hostname, port=self._port)

    async def send(self, event: Event) -> None:
        body = encode_event(event)
        sent = False

        async def trace(phase: str, _: object) -> None:
            nonlocal sent
            sent = sent or phase == "http11.send_request_headers.started"

        try:
            async with asyncio.timeout(self._timeout):
                headers = await self._thread.run(self._headers, event, body)
                request = build_request(
                    "POST",
                    self._origin,
                    self._path,
                    headers,
                    body,
                    timeout=self._timeout,
                    trace=trace,
                )
                async with self._http.send(request) as response:
                    status = response.status_code
        except (TimeoutError, httpx.TransportError) as error:
            raise self._lost(type(cause_of(error)).__name__, sent=sent) from None
        if not 200 <= status < 300:
            raise self._judge(status)

    async def close(self) -> None:
        await self._thread.close()

    def _headers(self, event: Event, body: bytes) -> dict[str, str]:
        moment = str(int(self._now()))
        headers = {
            "content-type": "application/json",
            "webhook-id": event.event_id,
            "webhook-timestamp": moment,
        }
        if self._secret is not None:
            try:
                key = self._secret.read_key()
            except InvalidError as error:
                raise EventRefusedError(f"webhook {self._name}: {error.message}") from None
            headers["webhook-signature"] = sign(key, event.event_id, moment, body)
        return headers

    def _judge(self, status: int) -> EventRefusedError | EventUnconfirmedError:
        if status < 500:
            return EventRefusedError(
                f"webhook {self._name} did not accept the event: HTTP {status}; only 2xx accepts, and "
                "redirects are not followed"
            )
        return EventUnconfirmedError(
            f"webhook {self._name} failed with HTTP {status}: the event may have been accepted"
        )

    def _lost(self, reason: str, *, sent: bool) -> EventRefusedError | EventUnconfirmedError:
        if not sent:
            return EventRefusedError(f"webhook {self._name} was not reached: {reason}")
        return EventUnconfirmedError(
            f"webhook {self._name} did not answer ({reason}): the event may have been accepted"
        )


def sign(key: bytes, event_id: str, timestamp: str, body: bytes) -> str:
    """Return the signature header of a request."""
    signed = b".".join((event_id.encode(), timestamp.encode(), body))
    return "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()


def _parse_url(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = None
    if not usable:
        raise InvalidError("the URL of a webhook must be http:// or https:// with a host and port")
    if parts.username or parts.password or parts.fragment:
        raise InvalidError(
            f"the URL of webhook {parts.hostname} holds credentials or a fragment: use a secret"
        )
    if not parts.geturl().isascii() or any(ord(char) <= ord(" ") for char in url):
        raise InvalidError(f"the URL of webhook {parts.hostname} must be percent-encoded ASCII")
    return parts


def _open(options: WebhookOptions, context: SinkContext) -> WebhookSink:
    return WebhookSink(options.url, secret=options.secret(), tls=options.tls())


WEBHOOK = SinkType(
    id="webhook",
    summary="an HTTP endpoint, with requests signed by Standard Webhooks",
    options=WebhookOptions,
    open=_open,
    target=("url",),
)
