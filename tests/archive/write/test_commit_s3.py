"""Commits over a network that loses responses after requests took effect."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from streamfold.archive.destinations.destination import Destination
from streamfold.archive.errors import CommitUnknownError
from streamfold.archive.write.writer import ArchiveWriter
from tests.archive.plain_reader import read_states
from tests.archive.tables import changes, open_writer, rows
from tests.blob.bad_network import LossyProxy, run_lossy_proxy
from tests.s3 import S3Server

QUICK = {"attempts": "2", "first_pause": "0.01", "request_timeout": "60"}
DONE = [("0", {1: "a"}), ("1", {1: "a", 2: "b"})]


@pytest.fixture
async def proxy(s3_server: S3Server) -> AsyncIterator[LossyProxy]:
    async with run_lossy_proxy(s3_server.endpoint) as running:
        yield running


@pytest.fixture
def direct(s3_server: S3Server, s3_url: str) -> Destination:
    return Destination.open(s3_url, **s3_server.options())


@pytest.fixture
async def writer(s3_server: S3Server, s3_url: str, proxy: LossyProxy) -> ArchiveWriter:
    options = s3_server.options() | {"endpoint": proxy.endpoint} | QUICK
    opened = await open_writer(Destination.open(s3_url, **options))
    await opened.write_base(rows({1: "a"}), "0", reason="first")
    return opened


@pytest.mark.parametrize("lost", [1, 2, 3])
async def test_a_commit_whose_answers_are_lost_is_recognised(
    proxy: LossyProxy, writer: ArchiveWriter, direct: Destination, lost: int
) -> None:
    proxy.lose("PUT", lost, after=1)  # the first one is the file
    await writer.write_diff(changes(("INSERT", 2, "b")), "0", "1")
    assert await read_states(direct.blobs) == DONE


async def test_a_commit_that_cannot_be_read_back_is_unknown_until_it_can(
    proxy: LossyProxy, writer: ArchiveWriter, direct: Destination
) -> None:
    proxy.lose("PUT", 99, after=1)
    proxy.lose("GET", 99)
    proxy.lose("HEAD", 99)
    with pytest.raises(CommitUnknownError, match="may or may not"):
        await writer.write_diff(changes(("INSERT", 2, "b")), "0", "1")
    for method in ("PUT", "GET", "HEAD"):
        proxy.lose(method, 0)
    manifest = await writer.write_diff(changes(("INSERT", 2, "b")), "0", "1")
    assert await read_states(direct.blobs) == DONE
    assert len(manifest.artifacts) == 2
