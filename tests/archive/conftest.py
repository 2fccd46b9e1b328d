from __future__ import annotations

import uuid

import pytest

from tests.s3 import S3Server


@pytest.fixture
def s3_url(s3_server: S3Server) -> str:
    """A folder of its own, so that tests share the server and nothing else."""
    return f"s3://{s3_server.bucket}/archive/{uuid.uuid4().hex}"
