"""The console's view of the servers of a store on object storage: one active, one that stands by."""

from __future__ import annotations

import pytest

from tests.ports import free_port
from tests.s3 import S3Server
from tests.server.test_standby import NEVER, Bucket


@pytest.fixture
def bucket(s3_server: S3Server, request: pytest.FixtureRequest) -> Bucket:
    return Bucket(s3_server, request.node.name)


async def test_a_server_that_stands_by_is_shown_until_it_is_active(bucket: Bucket) -> None:
    other = free_port()
    beside = ("--name", "a", "--server", f"http://127.0.0.1:{other}")
    async with bucket.serve(*beside, expiry=NEVER) as active:
        await active.serves()
        await active.says("/console/servers", 200, '"state":"away"')
        async with bucket.serve("--name", "b", "--port", str(other), expiry=NEVER):
            await active.says("/console/servers", 200, '"state":"standby"')
        shown = (await active.get("/console/servers")).json()
    assert shown["this"]["name"] == "a"
    assert shown["this"]["state"] == "active"
    assert shown["this"]["lease_expiry"] == float(NEVER)
    assert shown["this"]["location"].startswith("s3://")
