"""What holds for all tests: which stay together when several processes share the work, as `pytest -n 3
--dist loadgroup` has them do, which programs they run, and that random examples are the same each time.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from streamfold.blob import BlobStore
    from tests.s3 import S3Server
    from tests.s3_gate import Gate

#: Neither chance nor the speed of the machine decides: the same examples, however long each takes.
settings.register_profile(
    "tests",
    derandomize=True,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tests")

# Node.js, Go, Chromium and curl are those of the environment, see tests/tools: the same everywhere.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

# What tests start must end with its terminal, also where `nohup` started the tests.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

ROOT = Path(__file__).parents[1]
#: Tests that stay together: those with the fixture `spark` share a session, which takes long to start
#: and much memory, and those of the folder `interop` install packages into the same folder.
SPARK, INTEROP = "spark", "interop"


@pytest.hookimpl(tryfirst=True)  # xdist looks at the marks in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a file stay together, for their fixtures. The longest begin first, so that no process
    is left with one of them at the end: the Spark session's, then those that start their own Spark.
    """
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))
    items.sort(key=lambda item: (_group(item) != SPARK, _folder(item) != SPARK))


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One server for all tests of a process, each of which uses a prefix of its own."""
    from tests.s3 import run_s3_server  # moto takes a second to load

    with run_s3_server() as server:
        yield server


@pytest.fixture(scope="module")
def gate() -> Iterator[Gate]:
    """An S3 server that looks at who calls; it knows these keys unless a test names others."""
    from tests.s3_gate import run_gate

    with run_gate("ROLE", "SSO", "PROFILE") as gate:
        yield gate


@pytest.fixture
def blobs() -> BlobStore:
    """An empty store of blobs, in memory."""
    from streamfold.blob import open_blob_store

    return open_blob_store("memory:")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse to run where groups are not kept: a Spark session in each process takes much memory."""
    grouped = getattr(session.config.option, "loadgroup", False)
    if grouped and session.items and "@" not in session.items[0].nodeid:
        raise pytest.UsageError("this pytest-xdist does not keep groups together under this pytest")


def _group(item: pytest.Item) -> str:
    if SPARK in getattr(item, "fixturenames", ()):
        return SPARK
    return INTEROP if _folder(item) == INTEROP else item.path.relative_to(ROOT).as_posix()


def _folder(item: pytest.Item) -> str:
    """The folder below `tests/`; a name of no folder there for tests of integrations."""
    return item.path.relative_to(ROOT).parts[1]
