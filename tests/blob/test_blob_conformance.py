from __future__ import annotations

from pathlib import Path

import pytest

from streamfold.blob import BlobStore, open_blob_store
from streamfold.testing import BlobStoreConformance
from streamfold.testing.blob_faults import FaultyBlobStore
from streamfold.testing.faults import ScriptedFaults
from tests.s3 import S3Server


class TestMemory(BlobStoreConformance):
    @pytest.fixture
    def store(self) -> BlobStore:
        return open_blob_store("memory:")


class TestLocal(BlobStoreConformance):
    @pytest.fixture
    def store(self, tmp_path: Path) -> BlobStore:
        return open_blob_store((tmp_path / "new" / "root").as_uri())


# Upstream defect 13.
class TestS3(BlobStoreConformance):
    @pytest.fixture
    def store(self, s3_server: S3Server, s3_url: str) -> BlobStore:
        return open_blob_store(s3_url, **s3_server.options())


class TestFaultyWithoutFaults(BlobStoreConformance):
    @pytest.fixture
    def store(self) -> BlobStore:
        return FaultyBlobStore(open_blob_store("memory:"), ScriptedFaults())
