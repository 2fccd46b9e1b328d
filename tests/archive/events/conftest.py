from __future__ import annotations

from collections.abc import Iterator

import pytest

from streamfold.archive import Destination
from streamfold.archive.destinations.aws_credentials import AwsAccess
from tests.archive.events.receivers import Hook, access_to, run_hook
from tests.s3 import S3Server


def set_ambient(monkeypatch: pytest.MonkeyPatch, server: S3Server) -> None:
    """Put the server's credentials into the environment, and nothing else of this machine."""
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.access_key_id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.secret_access_key)


@pytest.fixture
def ambient(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server, whose credentials are the ambient ones."""
    set_ambient(monkeypatch, s3_server)
    return s3_server


@pytest.fixture(scope="session")
def access(s3_server: S3Server) -> AwsAccess:
    """Ambient access, opened once: boto3 takes long to load its descriptions of services."""
    opened = access_to(s3_server)
    with pytest.MonkeyPatch.context() as monkeypatch:
        set_ambient(monkeypatch, s3_server)
        opened.storage_credentials()
    return opened


@pytest.fixture
def hook() -> Iterator[Hook]:
    with run_hook() as running:
        yield running


@pytest.fixture
def destination() -> Destination:
    return Destination.open("memory:table")
