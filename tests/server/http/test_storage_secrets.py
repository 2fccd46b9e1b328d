"""Storage failures: clients learn what happened, and only the log says where."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from streamfold.server.main import Server, running_server
from streamfold.wire.durable_streams.offsets import format_offset
from tests.server.conftest import BASIN, STREAM, configuration
from tests.server.raw_h2 import Answer, H2Client, h2_client

S2 = f"/v1/streams/{STREAM}"
DURABLE = f"/{BASIN}/{STREAM}"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with running_server(configuration(location=tmp_path.as_uri())) as server:
        await server.store.create_basin(BASIN)
        await server.store.create_stream(BASIN, STREAM)
        yield server


@pytest.fixture
async def h2(server: Server) -> AsyncIterator[H2Client]:
    async with h2_client(server.port) as client:
        yield client


async def publish(h2: H2Client, path: str) -> Answer:
    headers = (("s2-basin", BASIN), ("content-length", "5"))
    return await h2.exchange("PUT", path, headers, b"state")


def check_secrecy(answer: Answer, folder: Path, key: str, log: str) -> None:
    assert answer.status >= 400
    for secret in (str(folder), key, "snapshots/"):
        assert secret not in answer.body.decode()
    assert str(folder) in log


@pytest.mark.parametrize(
    "path",
    [f"{S2}/snapshot/0", f"{S2}/bootstrap", f"{DURABLE}/snapshot/{format_offset(0)}"],
)
async def test_a_snapshot_whose_blob_is_lost_is_refused_without_its_path_and_key(
    h2: H2Client, tmp_path: Path, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert (await publish(h2, f"{S2}/snapshot/0")).status == 204
    (blob,) = (tmp_path / "snapshots").glob("*/*-*")
    blob.unlink()
    answer = await h2.exchange("GET", path, (("s2-basin", BASIN),))
    check_secrecy(answer, tmp_path, blob.name, caplog.text)


@pytest.mark.parametrize("path", [f"{S2}/snapshot/0", f"{S2}/bootstrap"])
async def test_a_snapshot_with_a_flipped_bit_is_refused_without_its_path_and_key(
    h2: H2Client, tmp_path: Path, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert (await publish(h2, f"{S2}/snapshot/0")).status == 204
    (blob,) = (tmp_path / "snapshots").glob("*/*-*")
    blob.write_bytes(b"stale")
    answer = await h2.exchange("GET", path, (("s2-basin", BASIN),))
    assert answer.status == 500
    assert blob.name.encode() not in answer.body
    assert f"{blob.name}' of the snapshot at 0 is damaged" in caplog.text


@pytest.mark.parametrize("path", [f"{S2}/snapshot/0", f"{DURABLE}/snapshot/{format_offset(0)}"])
async def test_a_snapshot_that_cannot_be_written_is_refused_without_its_path_and_key(
    h2: H2Client, tmp_path: Path, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "snapshots"
    folder.rename(tmp_path / "elsewhere")
    folder.write_text("in the way")
    answer = await publish(h2, path)
    assert answer.status == 503
    check_secrecy(answer, tmp_path, f"{0:020d}", caplog.text)
