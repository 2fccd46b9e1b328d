"""TLS, with the protocol chosen in the handshake."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from streamfold.errors import InvalidError
from streamfold.server.main import running_server
from streamfold.server.tls import write_self_signed
from tests.server.conftest import configuration
from tests.server.curl import curl
from tests.server.raw_h2 import h2_client


@pytest.mark.parametrize(("flag", "version"), [("--http1.1", "1.1"), ("--http2", "2")])
async def test_one_port_serves_both_versions(tmp_path: Path, flag: str, version: str) -> None:
    files = write_self_signed(tmp_path)
    async with running_server(configuration(tls=files)) as server:
        url = f"https://localhost:{server.port}/ping"
        answer = await curl(
            "--cacert", str(files.certificate), flag, "--write-out", "%{http_version}", url
        )
    assert (answer.status, answer.body) == (200, b"OK" + version.encode())


async def test_a_self_signed_certificate_is_for_this_machine() -> None:
    async with running_server(configuration(tls_self=True)) as server:
        assert server.url == f"https://127.0.0.1:{server.port}"
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        async with h2_client(server.port, tls=context) as h2:
            assert (await h2.exchange("GET", "/ping")).status == 200


def test_the_key_is_for_its_owner_only(tmp_path: Path) -> None:
    assert write_self_signed(tmp_path).key.stat().st_mode & 0o077 == 0


def test_two_certificates_are_one_too_many(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="choose one"):
        configuration(tls=write_self_signed(tmp_path), tls_self=True)
