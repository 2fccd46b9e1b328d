"""Files of a server on local disk are private to its user."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from streamfold.store.store import open_store
from tests.interop.serving import serving


@pytest.fixture
def lax_umask() -> Iterator[None]:
    """Sets a umask that lets all users read and write what the process creates."""
    before = os.umask(0)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, str]:
    """The permissions of everything below a folder, and of itself."""
    return {str(path): stat.filemode(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}


@pytest.mark.usefixtures("lax_umask")
def test_a_server_writes_files_that_only_its_user_can_read(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with (
        serving("--no-access-log", "--local-root", str(folder)) as exports,
        httpx.Client(base_url=exports["S2_ACCOUNT_ENDPOINT"], timeout=60) as web,
    ):
        stream = "/v1/stream/orders"
        assert web.put(stream, content=b"secret").status_code == 201
        assert web.put(f"{stream}/snapshot/1", content=b"state").status_code == 204
    found = modes(folder)
    assert len(found) > 10
    assert set(found.values()) <= {"drwx------", "-rw-------"}


@pytest.mark.usefixtures("lax_umask")
async def test_a_store_in_an_application_is_in_folders_that_only_its_user_can_enter(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "store"
    async with open_store(folder.as_uri()) as store:
        await store.create_basin("test-basin")
    for one in (folder, *folder.iterdir()):
        assert stat.filemode(one.stat().st_mode) == "drwx------"
