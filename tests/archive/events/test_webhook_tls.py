"""Webhooks over HTTPS trust a custom authority only where it is configured."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamfold.archive.destinations.aws_credentials import Profiles
from streamfold.archive.events import EventRefusedError, EventSink, encode_event, open_sink
from streamfold.errors import InvalidError
from streamfold.testing.event_sink_kit import sample_event
from tests.archive.events.authorities import Authority
from tests.archive.events.receivers import run_hook


def opened(url: str, **more: str) -> EventSink:
    raw = {"type": "webhook", "url": url, **more}
    return open_sink(raw, Profiles.parse({}), path="events.hook")


async def test_a_named_authority_is_trusted(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ours")
    with run_hook(authority.server("127.0.0.1")) as hook:
        sink = opened(hook.url, ca_file=str(authority.file))
        await sink.send(sample_event())
        await sink.close()
        [(_, _, body)] = hook.requests
        assert body == encode_event(sample_event())


@pytest.mark.parametrize("trusted", [None, "another"])
async def test_an_untrusted_server_gets_no_event(tmp_path: Path, trusted: str | None) -> None:
    with run_hook(Authority(tmp_path, "ours").server("127.0.0.1")) as hook:
        more = {"ca_file": str(Authority(tmp_path, trusted).file)} if trusted else {}
        sink = opened(hook.url, **more)
        with pytest.raises(EventRefusedError, match="was not reached: SSLCertVerificationError"):
            await sink.send(sample_event())
        await sink.close()
        assert not hook.requests


async def test_a_certificate_for_another_host_is_refused(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ours")
    with run_hook(authority.server("127.0.0.2")) as hook:
        sink = opened(hook.url, ca_file=str(authority.file))
        with pytest.raises(EventRefusedError, match="SSLCertVerificationError"):
            await sink.send(sample_event())
        await sink.close()
        assert not hook.requests


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_file_without_certificates_is_reported_at_once(
    tmp_path: Path, content: str | None
) -> None:
    file = tmp_path / "ca.pem"
    if content:
        file.write_text(content)
    with pytest.raises(InvalidError, match=r"events\.hook: ca_file .* give a PEM file"):
        opened("https://example.com/hook", ca_file=str(file))
