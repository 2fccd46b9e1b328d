"""TLS, with the protocol chosen in the handshake."""

from __future__ import annotations

import socket
import ssl
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest

from streamfold.errors import InvalidError
from streamfold.server.config import write_self_signed
from streamfold.server.http.door import TlsFiles
from streamfold.server.main import running_server
from tests.server.attacked import LARGE, Attacked, attacked
from tests.server.conftest import BASIN, STREAM, configuration, until
from tests.server.curl import curl
from tests.server.frames import PATH
from tests.server.raw_h1 import h1_client
from tests.server.raw_h2 import h2_client

#: Handshakes at once, and the descriptors of the server under attack, soft and hard.
HANDSHAKES, DESCRIPTORS = (2000, (512, 512)) if LARGE else (400, (256, 256))
APPEND = '{"records":[{"body":"x"}]}'
JSON = {"content-type": "application/json", "s2-basin": BASIN}


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


async def test_a_handshake_that_never_begins_is_closed() -> None:
    settings = configuration(tls_self=True, first_request=0.5)
    async with running_server(settings) as server, h1_client(server.port) as client:
        await client.rest()
        await until(lambda: server.client_limits.connections.closed == 1)


async def test_open_handshakes_leave_descriptors_for_storage_and_connections_for_others(
    tmp_path: Path,
) -> None:
    async with (
        attacked(
            tmp_path, streams=(STREAM,), descriptors=DESCRIPTORS, options=("--tls-self",)
        ) as server,
        _client(server) as known,
        _client(server) as stranger,
    ):
        assert (await known.get("/ping")).status_code == 200
        with ExitStack() as stack:
            for _ in range(HANDSHAKES):
                stack.enter_context(_connecting(server.port))
            # A new client gets in, and storage opens files: descriptors are left. How many depends on
            # how soon the gate's thread gets a processor.
            assert (await stranger.post(PATH, content=APPEND, headers=JSON)).status_code == 200
            assert (await known.get("/ping")).status_code == 200


async def test_connections_are_accepted_again_after_handshakes_took_all_descriptors(
    tmp_path: Path,
) -> None:
    async with (
        attacked(tmp_path, descriptors=DESCRIPTORS, options=("--tls-self",)) as server,
        _client(server) as known,
        _client(server) as stranger,
    ):
        assert (await known.get("/ping")).status_code == 200
        few = server.process.num_fds() + 5
        server.process.rlimit(psutil.RLIMIT_NOFILE, (few, DESCRIPTORS[1]))
        with ExitStack() as stack:
            for _ in range(10):
                stack.enter_context(_connecting(server.port))
            assert (await known.get("/ping")).status_code == 200
        assert (await stranger.get("/ping")).status_code == 200


def _client(server: Attacked) -> httpx.AsyncClient:
    url = f"https://127.0.0.1:{server.port}"
    return httpx.AsyncClient(base_url=url, verify=False, timeout=120)


def _connecting(port: int) -> socket.socket:
    """A connection that is made whenever the server accepts it, and sends nothing."""
    connection = socket.socket()
    connection.setblocking(False)
    connection.connect_ex(("127.0.0.1", port))
    return connection


def test_the_key_is_for_its_owner_only(tmp_path: Path) -> None:
    assert write_self_signed(tmp_path).key.stat().st_mode & 0o077 == 0


async def test_files_that_are_no_pair_are_refused_in_a_sentence_that_names_them(
    tmp_path: Path,
) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    one, other = write_self_signed(tmp_path / "one"), write_self_signed(tmp_path / "other")
    text = tmp_path / "text.pem"
    text.write_text("not a certificate")
    for files in (
        TlsFiles(one.certificate, other.key),
        TlsFiles(text, one.key),
        TlsFiles(one.certificate, text),
        TlsFiles(one.certificate, tmp_path / "missing.pem"),
    ):
        with pytest.raises(InvalidError, match="cannot be used") as caught:
            async with running_server(configuration(tls=files)):
                pass
        assert str(files.certificate) in caught.value.message
        assert str(files.key) in caught.value.message


def test_two_certificates_are_one_too_many(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="choose one"):
        configuration(tls=write_self_signed(tmp_path), tls_self=True)
