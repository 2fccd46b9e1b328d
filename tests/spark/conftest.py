"""One Spark session and one server for the whole package, because both take seconds to start."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

from streamfold.snapshotter.spark.driver_loop import DriverLoop
from streamfold.spark import local_session

from .server import SecuredServer, Server

_numbers = itertools.count()


@pytest.fixture(scope="session")
def event_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("events")


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory, event_log: Path) -> Iterator[SparkSession]:
    settings = {
        "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
        "spark.local.dir": str(tmp_path_factory.mktemp("scratch")),
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": event_log.as_uri(),
        "spark.eventLog.compress": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
    }
    session = local_session("tests", cores="2,2", quick=True, settings=settings)
    session.sparkContext.setLogLevel("OFF")  # tests fail queries on purpose
    yield session
    _end(session)


def _end(session: SparkSession) -> None:
    """Stop Spark and its Java process, which would stay until this one ends."""
    gateway: Any = session.sparkContext._gateway
    session.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(240)
    SparkContext._gateway = SparkContext._jvm = None


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("served")).start()
    yield running
    running.kill()


@pytest.fixture(scope="session")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredServer]:
    """A server whose streams are encrypted and whose certificate no system trusts."""
    running = SecuredServer(tmp_path_factory.mktemp("secured"))
    running.start()
    yield running
    running.kill()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    """A server that a test may kill."""
    running = Server(tmp_path).start()
    yield running
    running.kill()


@pytest.fixture
def fresh(server: Server) -> Callable[[], str]:
    """Makes a stream that no other test knows."""

    def create() -> str:
        name = f"stream/{next(_numbers)} of tests"
        server.create(name)
        return name

    return create


@pytest.fixture
def loop() -> Iterator[DriverLoop]:
    with DriverLoop() as running:
        yield running
