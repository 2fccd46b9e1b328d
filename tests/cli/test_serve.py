"""The server process: its output, shutdown and rejected options."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from streamfold.cli.main import main, streamfold
from streamfold.cli.parameters import ByteSize
from streamfold.server.http.door import WHOLE_BODY
from tests.server.frames import PATH, SESSION, append_frame, frames_in
from tests.server.raw_h1 import h1_client
from tests.server.raw_h2 import h2_client


@asynccontextmanager
async def process(*arguments: str, **variables: str) -> AsyncIterator[Process]:
    running = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "streamfold.cli.main",
        *arguments,
        stdout=PIPE,
        stderr=PIPE,
        env={**os.environ, **variables},
    )
    try:
        yield running
    finally:
        if running.returncode is None:
            running.kill()
        await running.communicate()


async def line_of(running: Process) -> str:
    assert running.stdout is not None
    async with asyncio.timeout(120):
        return (await running.stdout.readline()).decode()


async def test_it_prints_what_a_client_needs_and_stops_when_asked() -> None:
    async with process("lite", "--host", "127.0.0.1", "--port", "0") as running:
        lines = [await line_of(running) for _ in range(3)]
        assert lines[0].startswith("export S2_ACCOUNT_ENDPOINT=http://127.0.0.1:")
        assert lines[1].startswith("export S2_BASIN_ENDPOINT=http://127.0.0.1:")
        assert lines[2] == "export S2_ACCESS_TOKEN=ignored\n"
        running.send_signal(signal.SIGTERM)
        assert await running.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_signal_that_ends_it_drains_it_first(number: signal.Signals) -> None:
    """An append that is still arriving is acknowledged."""
    async with process("serve", "--host", "127.0.0.1", "--port", "0", "--json") as running:
        port = json.loads(await line_of(running))["port"]
        async with h1_client(port) as h1:
            # Larger than what the door waits for: the server has the request before its body.
            size = 2 * WHOLE_BODY
            head = (
                f"PUT /v1/stream/chat HTTP/1.1\r\nhost: localhost\r\ncontent-length: {size}\r\n\r\n"
            )
            await h1.send(f"{head}fi".encode())
            assert await status_of(port, "/ping") == 200  # by then the request is under way
            running.send_signal(number)
            while await status_of(port, "/ready") != 503:
                pass
            await h1.send(b"x" * (size - 2))
            assert (await h1.head())[0] == 201
        assert await running.wait() == 0


async def test_a_signal_without_meaning_is_ignored() -> None:
    async with process("serve", "--host", "127.0.0.1", "--port", "0", "--json") as running:
        port = json.loads(await line_of(running))["port"]
        assert running.stderr is not None
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            running.send_signal(number)
            async with asyncio.timeout(120):
                while line := await running.stderr.readline():
                    if f"{number.name} is ignored".encode() in line:
                        break
            assert line
        assert await status_of(port, "/ready") == 200
        running.send_signal(signal.SIGTERM)
        assert await running.wait() == 0


async def test_a_server_under_nohup_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a new process inherits it
    try:
        async with process("serve", "--host", "127.0.0.1", "--port", "0", "--json") as running:
            port = json.loads(await line_of(running))["port"]
            running.send_signal(signal.SIGHUP)
            assert await status_of(port, "/ready") == 200
            running.send_signal(signal.SIGTERM)
            assert await running.wait() == 0
    finally:
        signal.signal(signal.SIGHUP, before)


async def status_of(port: int, path: str) -> int:
    async with h1_client(port) as h1:
        await h1.send(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        return (await h1.head())[0]


async def test_a_missing_folder_of_tables_is_mentioned_at_the_start(tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere")
    async with process("serve", "--port", "0", "--tables", missing) as running:
        await line_of(running)
        assert running.stderr is not None
        warning = (await running.stderr.readline()).decode()
        assert warning.startswith(f"warning: --tables {missing}: there is no such folder yet")


async def test_records_are_there_after_a_stop_in_the_middle_of_a_session(tmp_path: Path) -> None:
    (tmp_path / "init.json").write_text(
        json.dumps({"basins": [{"name": "test-basin", "streams": [{"name": "orders"}]}]})
    )
    serve = ("serve", "--host", "127.0.0.1", "--port", "0", "--local-root", str(tmp_path / "data"),
             "--init-file", str(tmp_path / "init.json"), "--json")  # fmt: skip
    async with process(*serve) as running:
        port = json.loads(await line_of(running))["port"]
        async with h2_client(port) as h2:
            session = h2.open("POST", PATH, SESSION)
            await h2.send(session, append_frame(b"kept"))
            await h2.body_of(session, 10)
            running.send_signal(signal.SIGTERM)
            answer = await h2.whole(session)
            ack, end = frames_in(bytes(answer.body))
            assert not ack.terminal
            assert end.failure().status == 503
        assert await running.wait() == 0
    async with process(*serve) as running:
        port = json.loads(await line_of(running))["port"]
        async with h2_client(port) as h2:
            tail = await h2.exchange("GET", f"{PATH}/tail", (("s2-basin", "test-basin"),))
            assert json.loads(tail.body)["tail"]["seq_num"] == 1


async def test_requests_that_clients_reset_are_not_logged(tmp_path: Path) -> None:
    """Ten answers that their client does not take, and then resets."""
    spec = {"basins": [{"name": "test-basin", "streams": [{"name": "orders"}]}]}
    (tmp_path / "init.json").write_text(json.dumps(spec))
    arguments = ("--init-file", str(tmp_path / "init.json"), "--json", "--no-access-log")
    async with process("serve", "--host", "127.0.0.1", "--port", "0", *arguments) as running:
        port = json.loads(await line_of(running))["port"]
        async with h2_client(port) as h2:
            for _ in range(10):
                session = h2.open("GET", f"{PATH}?seq_num=0", SESSION, end=True)
                await h2.head(session)
                h2.reset(session)
            sent = h2.open("POST", PATH, SESSION)
            await h2.send(sent, append_frame(b"for the readers that have gone"), end=True)
            await h2.whole(sent)
        running.send_signal(signal.SIGTERM)
        _, logged = await running.communicate()
        assert logged == b""


async def test_an_address_that_is_taken_is_refused_in_one_line() -> None:
    async with process("serve", "--host", "127.0.0.1", "--port", "0", "--json") as first:
        port = json.loads(await line_of(first))["port"]
        async with process("serve", "--host", "127.0.0.1", "--port", str(port)) as second:
            _, errors = await second.communicate()
            assert second.returncode == 1
            assert errors.decode().startswith(f"error: cannot listen at 127.0.0.1 port {port}")
            assert b"Traceback" not in errors


@pytest.mark.parametrize("path", ["/dev/null/store", "{here}/file/below"])
async def test_a_folder_that_cannot_be_made_is_refused_in_one_line(
    path: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("not a folder")
    folder = path.format(here=tmp_path)
    async with process("serve", "--port", "0", "--local-root", folder) as running:
        _, errors = await running.communicate()
        assert running.returncode == 1
        *_, last = errors.decode().splitlines()
        assert last.startswith(f"error: cannot create the store's folder {folder!r} (")
        assert b"Traceback" not in errors


@pytest.mark.parametrize(
    ("options", "host", "said"),
    [
        ((), "127.0.0.1", "for this machine only, and requires no tokens"),
        (("--host", "0.0.0.0"), "localhost", "0.0.0.0 and is open: any client that reaches it"),
        (("--auth",), "localhost", "0.0.0.0 and requires access tokens"),
        (("--auth", "--host", "127.0.0.1"), "127.0.0.1", "127.0.0.1 and requires access tokens"),
    ],
)
async def test_it_listens_on_this_machine_only_by_default_and_says_so(
    options: tuple[str, ...], host: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMFOLD_ROOT_TOKEN", "a-root-token-of-this-test")
    async with process("serve", "--port", "0", *options) as running:
        assert running.stderr is not None
        exported = (await line_of(running)).strip()
        assert exported.startswith(f"export S2_ACCOUNT_ENDPOINT=http://{host}:")
        while said not in (line := (await running.stderr.readline()).decode()):
            assert line, "it ended without saying so"
        port = int(exported.rpartition(":")[2])
        assert _listening_addresses(port) == {
            "127.0.0.1" if "127.0.0.1" in said + host else "0.0.0.0"
        }


def _listening_addresses(port: int) -> set[str]:
    """Where this machine listens on a port, as the kernel has it."""
    found: set[str] = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        local, state = line.split()[1], line.split()[3]
        address, _, number = local.partition(":")
        if state == "0A" and int(number, 16) == port:
            found.add(socket.inet_ntoa(bytes.fromhex(address)[::-1]))
    return found


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--bucket", "b", "--local-root", "/tmp/no-such-folder"], "choose one"),
        (["--path", "prod"], "give a local root or a bucket"),
        (["--tls-cert", __file__], "need each other"),
        (["--accept-loss", "7"], "give --local-root"),
        (["--bucket", "records", "--lease-expiry", "0.5"], "or 0 for no lease"),
        (["--append-inflight-bytes", "1KiB"], "at least 1048576"),
        (["--append-inflight-bytes", "lots"], "64MiB"),
        (["--commit-interval", "-1"], "commit-interval"),
        (["--commit-timeout", "0"], "commit-timeout"),
        (["--commit-interval", "inf"], "'inf' is not a finite number"),
        (["--commit-timeout", "nan"], "'nan' is not a finite number"),
        (["--trim-grace", "nan"], "'nan' is not a finite number"),
        (["--port", "70000"], "65535"),
        (["--init-file", "/nowhere"], "does not exist"),
        (["--cors-origin", "app.example"], "scheme, host and port"),
        (["--public-url", "streams.example"], "must be http or https"),
        (["--public-url", "https://streams.example/"], "last slash"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["serve", *arguments])
    assert left.value.code in (1, 2)
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", [b"\xd2 random bytes \xff, as of openssl rand 32", b"a-token-of-two-\nlines-is-none"]
)
def test_a_root_token_that_no_client_can_send_is_refused(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "token"
    file.write_bytes(content)
    with pytest.raises(SystemExit) as left:
        # The bucket is refused, too: so nothing is served if the token is not.
        main(["serve", "--root-token-file", str(file), "--bucket", ""])
    assert left.value.code == 1
    assert "is not one line of text" in capsys.readouterr().err


def test_sizes_are_written_for_people() -> None:
    size = ByteSize()
    assert size.convert("64MiB", None, None) == 64 << 20
    assert size.convert("1 gb", None, None) == 10**9
    assert size.convert("123", None, None) == 123


def test_help_names_the_verbs() -> None:
    output = CliRunner().invoke(streamfold, ["--help"]).output
    assert "serve" in output
    assert "lite" in output
