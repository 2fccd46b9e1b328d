"""One access log line per request, without secrets."""

from __future__ import annotations

import base64
import errno
import io
import json
import logging
import sys
from typing import Any

import pytest

from streamfold.server.main import running_server
from tests.server.conftest import BASIN, STREAM, configuration, until
from tests.server.frames import PATH, SESSION, append_frame
from tests.server.raw_h2 import h2_client

SECRETS = (
    ("authorization", "Bearer very-secret-token"),
    ("s2-encryption-key", base64.b64encode(b"k" * 32).decode()),
)


async def test_every_request_leaves_a_line_without_its_secrets(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    async with running_server(configuration(access_log=True)) as server:
        await server.store.create_basin(BASIN)
        await server.store.create_stream(BASIN, STREAM)
        async with h2_client(server.port) as h2:
            await h2.exchange("GET", "/v1/basins?limit=3", SECRETS)
            await h2.exchange("POST", PATH, (*SESSION, *SECRETS), append_frame(b"body"))
            await h2.exchange("GET", "/v1/streams/nope/records", (("s2-basin", BASIN), *SECRETS))
    written = capfdbinary.readouterr().err
    assert b"very-secret" not in written
    assert SECRETS[1][1].encode() not in written
    basins, session, missing = map(_parse, written.splitlines())
    assert (basins["method"], basins["path"], basins["query"]) == ("GET", "/v1/basins", "limit=3")
    assert (basins["status"], basins["http"], basins["client"]) == (200, "2", "127.0.0.1")
    assert (session["path"], session["basin"], session["status"]) == (PATH, BASIN, 200)
    assert session["received"] == len(append_frame(b"body"))
    assert session["sent"] > 0
    assert missing["status"] == 404
    assert all(line["took"] > 0 for line in (basins, session, missing))


class FullDisk(io.BytesIO):
    """Refuses what is written while it is full."""

    full = True
    refused = 0

    def write(self, data: Any) -> int:
        if self.full:
            self.refused += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


async def test_lines_are_written_again_after_the_disk_was_full(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk, former = FullDisk(), sys.stderr
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(disk))
    caplog.set_level(logging.WARNING, "streamfold.server.http.access_log")
    async with running_server(configuration(access_log=True)) as server:
        monkeypatch.setattr(sys, "stderr", former)
        async with h2_client(server.port) as h2:
            await h2.exchange("GET", "/v1/basins?limit=2")
            await until(lambda: disk.refused == 1)
            await h2.exchange("GET", "/v1/basins?limit=3")
            await until(lambda: disk.refused == 2)
            disk.full = False
            await h2.exchange("GET", "/v1/basins?limit=4")
            await until(lambda: bool(disk.getvalue()))
        disk.full = True
        async with h2_client(server.port) as h2:
            await h2.exchange("GET", "/v1/basins?limit=5")
    request, dropped = map(_parse, disk.getvalue().splitlines())
    assert (request["query"], dropped) == ("limit=4", {"dropped": 2})
    assert "cannot write the access log" in caplog.text


#: Queries, and what the log shows of them.
QUERIES = {
    "limit=3&prefix=a/b": "limit=3&prefix=a/b",
    "access_token=SECRET": "***",
    "token=SECRET&limit=3": "***&limit=3",
    "limit=3&SECRET": "limit=3&***",
    "SECRET=1": "***",
    "limit=3;token=SECRET": "***",
    "prefix=sf_SECRET": "***",
    "offset=now&live=sse&Token=SECRET": "offset=now&live=sse&***",
    f"limit=%26token%3DSECRET{'x' * 200}": "***",
}


async def test_a_token_in_a_query_is_not_logged(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    async with (
        running_server(configuration(access_log=True)) as server,
        h2_client(server.port) as h2,
    ):
        for query in QUERIES:
            await h2.exchange("GET", f"/v1/stream/missing?{query}")
    written = capfdbinary.readouterr().err
    assert b"SECRET" not in written
    assert [_parse(line)["query"] for line in written.splitlines()] == list(QUERIES.values())


def _parse(line: bytes) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(line)
    return parsed


async def test_a_token_in_a_path_is_not_logged(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    async with (
        running_server(configuration(access_log=True)) as server,
        h2_client(server.port) as h2,
    ):
        await h2.exchange("GET", "/v1/stream/sf_SECRET-1_x/a")
    (line,) = map(_parse, capfdbinary.readouterr().err.splitlines())
    assert line["path"] == "/v1/stream/***/a"
