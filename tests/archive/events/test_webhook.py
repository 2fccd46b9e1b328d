"""Webhooks: signatures, answers of all kinds, and receivers that do not answer."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import socket
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from streamfold.archive.destinations.destination import Destination
from streamfold.archive.events import (
    EventRefusedError,
    EventUnconfirmedError,
    SecretReference,
    WebhookSink,
    decode_event,
    encode_event,
)
from streamfold.errors import InvalidError
from streamfold.testing.event_sink_kit import sample_event
from tests.archive.events.feeds import Table, deliver_all
from tests.archive.events.receivers import Hook, run_hook

SECRET = "a-secret-of-enough-bytes"


async def test_a_request_has_the_event_its_id_and_the_time(hook: Hook) -> None:
    sink = WebhookSink(hook.url, now=lambda: 1_800_000_000.9)
    await sink.send(sample_event())
    [(path, headers, body)] = hook.requests
    assert path == "/hooks/path-secret-1?key=query-secret-2"
    assert body == encode_event(sample_event())
    assert headers["content-type"] == "application/json"
    assert headers["webhook-id"] == sample_event().event_id
    assert headers["webhook-timestamp"] == "1800000000"
    assert "webhook-signature" not in headers
    await sink.close()


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (SECRET, SECRET.encode()),
        (f"  {SECRET}\n", SECRET.encode()),
        ("whsec_" + base64.b64encode(bytes(range(32))).decode(), bytes(range(32))),
    ],
)
async def test_a_secret_signs_id_time_and_body(
    hook: Hook, monkeypatch: pytest.MonkeyPatch, text: str, key: bytes
) -> None:
    monkeypatch.setenv("HOOK_SECRET", text)
    sink = WebhookSink(hook.url, secret=SecretReference("HOOK_SECRET"), now=lambda: 7.0)
    await sink.send(sample_event())
    [(_, headers, body)] = hook.requests
    expected = hmac.digest(key, sample_event().event_id.encode() + b".7." + body, hashlib.sha256)
    assert headers["webhook-signature"] == "v1," + base64.b64encode(expected).decode()
    await sink.close()


async def test_a_secret_in_a_file_may_change_while_the_sink_runs(
    hook: Hook, tmp_path: Path
) -> None:
    file = tmp_path / "secret"
    file.write_text(SECRET)
    sink = WebhookSink(hook.url, secret=SecretReference(file=file), now=lambda: 7.0)
    await sink.send(sample_event())
    file.write_text(SECRET[::-1])
    await sink.send(sample_event())
    file.unlink()
    with pytest.raises(EventRefusedError, match="cannot be read") as failure:
        await sink.send(sample_event())
    first, second = (headers["webhook-signature"] for _, headers, _ in hook.requests)
    assert first != second
    assert SECRET not in str(failure.value)
    await sink.close()


@pytest.mark.parametrize("text", [None, "", "short", "whsec_", "whsec_*secret*", "whsec_c2hvcnQ="])
def test_a_secret_that_is_not_a_key_is_refused_at_once_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    monkeypatch.delenv("HOOK_SECRET", raising=False)
    if text is not None:
        monkeypatch.setenv("HOOK_SECRET", text)
    with pytest.raises(InvalidError, match="'HOOK_SECRET'") as failure:
        WebhookSink("https://example.com", secret=SecretReference("HOOK_SECRET"))
    assert "*secret*" not in str(failure.value)
    assert "short" not in str(failure.value)


def test_a_secret_has_exactly_one_source() -> None:
    with pytest.raises(InvalidError):
        SecretReference()
    with pytest.raises(InvalidError):
        SecretReference("NAME", Path("file"))


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
async def test_every_2xx_takes_the_event(hook: Hook, status: int) -> None:
    hook.answer = lambda _: status
    await WebhookSink(hook.url).send(sample_event())


@pytest.mark.parametrize("status", [301, 302, 307, 308, 400, 401, 404, 410, 429])
async def test_other_answers_refuse_it(hook: Hook, status: int) -> None:
    hook.answer = lambda _: status
    with pytest.raises(EventRefusedError, match=f"HTTP {status}"):
        await WebhookSink(hook.url).send(sample_event())


@pytest.mark.parametrize("status", [500, 502, 503, 504])
async def test_failures_of_the_receiver_leave_it_unknown(hook: Hook, status: int) -> None:
    hook.answer = lambda _: status
    with pytest.raises(EventUnconfirmedError, match=f"HTTP {status}"):
        await WebhookSink(hook.url).send(sample_event())


async def test_redirects_are_not_followed(hook: Hook) -> None:
    with run_hook() as elsewhere:
        hook.answer, hook.headers["location"] = (lambda _: 307), elsewhere.url
        with pytest.raises(EventRefusedError, match="redirects are not followed"):
            await WebhookSink(hook.url).send(sample_event())
        assert elsewhere.requests == []


async def test_a_port_without_a_listener_is_a_refusal(hook: Hook) -> None:
    await asyncio.to_thread(hook.stop)
    with pytest.raises(EventRefusedError, match="ConnectionRefusedError"):
        await WebhookSink(hook.url).send(sample_event())


async def test_a_connection_that_breaks_before_the_answer_is_unknown(hook: Hook) -> None:
    def hang_up(handler: BaseHTTPRequestHandler) -> None:
        handler.connection.shutdown(socket.SHUT_RDWR)

    hook.answer = hang_up
    with pytest.raises(EventUnconfirmedError):
        await WebhookSink(hook.url).send(sample_event())


async def test_a_receiver_that_never_answers_is_given_up(hook: Hook) -> None:
    gone = threading.Event()

    def wait_for_end(handler: BaseHTTPRequestHandler) -> None:
        assert handler.rfile.read(1) == b"", "the sender closes the connection"
        gone.set()

    hook.answer = wait_for_end
    sink = WebhookSink(hook.url, timeout=5.0)  # enough to send it on a busy machine
    with pytest.raises(EventUnconfirmedError, match="TimeoutError"):
        await sink.send(sample_event())
    assert await asyncio.to_thread(gone.wait, 300)
    hook.answer = lambda _: 204
    patient = WebhookSink(hook.url)
    await patient.send(sample_event())


async def test_a_receiver_that_answers_byte_by_byte_is_given_up(hook: Hook) -> None:
    def drip(handler: BaseHTTPRequestHandler) -> None:
        try:
            while True:  # each byte alone comes well within the timeout
                handler.wfile.write(b"H")
                handler.wfile.flush()
                threading.Event().wait(0.02)
        except OSError:
            handler.close_connection = True

    hook.answer = drip
    with pytest.raises(EventUnconfirmedError):
        await WebhookSink(hook.url, timeout=5.0).send(sample_event())


async def test_a_cancelled_request_is_broken_off(hook: Hook) -> None:
    received, gone = threading.Event(), threading.Event()

    def wait_for_end(handler: BaseHTTPRequestHandler) -> None:
        received.set()
        handler.rfile.read(1)
        gone.set()

    hook.answer = wait_for_end
    sink = WebhookSink(hook.url, timeout=600)
    sending = asyncio.create_task(sink.send(sample_event()))
    assert await asyncio.to_thread(received.wait, 300)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert await asyncio.to_thread(gone.wait, 300)
    await sink.close()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "example.com/hook-secret",
        "ftp://example.com/hook-secret",
        "https:///hook-secret",
        "https://example.com:99999/hook-secret",
        "https://user:hook-secret@example.com/",
        "https://example.com/hook-secret#part",
        "https://example.com/hook-secret\r\nevil: 1",
        "https://example.com/hook-secret/ü",
    ],
)
def test_urls_that_cannot_be_used_are_refused_and_not_shown(url: str) -> None:
    with pytest.raises(InvalidError, match="webhook") as failure:
        WebhookSink(url)
    assert "hook-secret" not in str(failure.value)


async def test_a_dispatcher_logs_failures_of_a_webhook_without_its_secrets(
    hook: Hook, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("DEBUG")
    monkeypatch.setenv("HOOK_SECRET", SECRET)
    answers = [500, 404, 302]
    hook.answer = lambda _: answers.pop() if answers else 204
    table = await Table.create(Destination.open("memory:table"))
    sink = WebhookSink(hook.url, secret=SecretReference("HOOK_SECRET"))
    await deliver_all(table.destination, hook=sink)
    assert caplog.text.count("sink hook") == 3
    assert not any(word in caplog.text for word in (SECRET, "path-secret", "query-secret"))
    assert [decode_event(body) for _, _, body in hook.requests] == table.committed * 4
