from __future__ import annotations

from pathlib import Path

import pytest

from streamfold.archive.destinations.destination import Destination
from streamfold.blob import open_blob_store
from streamfold.testing.blob_faults import FaultyBlobStore
from streamfold.testing.destination_kit import DestinationConformance
from streamfold.testing.faults import ScriptedFaults
from tests.s3 import S3Server


class TestMemory(DestinationConformance):
    @pytest.fixture
    def destination(self) -> Destination:
        return Destination.open("memory:table")


class TestLocal(DestinationConformance):
    @pytest.fixture
    def destination(self, tmp_path: Path) -> Destination:
        return Destination.open((tmp_path / "public.users").as_uri())


class TestS3(DestinationConformance):
    @pytest.fixture
    def destination(self, s3_server: S3Server, s3_url: str) -> Destination:
        return Destination.open(s3_url, **s3_server.options())


class TestFaultyWithoutFaults(DestinationConformance):
    @pytest.fixture
    def destination(self) -> Destination:
        return Destination(
            FaultyBlobStore(open_blob_store("memory:"), ScriptedFaults()), "memory:table/"
        )
