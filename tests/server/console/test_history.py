"""The server's metrics history of the last hour."""

from __future__ import annotations

import msgspec

from streamfold.model.access_tokens import Secret
from streamfold.server.console import ConsoleSettings
from streamfold.server.main import running_server
from tests.server.conftest import BASIN, configuration
from tests.server.raw_h2 import h2_client

ROOT = "the-root-token-of-this-test"


async def test_the_history_has_readings_from_the_start_and_needs_the_right_to_metrics() -> None:
    guarded = configuration(root_token=Secret(ROOT), console=ConsoleSettings())
    async with running_server(guarded) as server, h2_client(server.port) as client:
        await server.store.create_basin(BASIN)
        refused = await client.exchange("GET", "/console/history", (), b"")
        assert refused.status == 401
        token = (("authorization", f"Bearer {ROOT}"),)
        answer = await client.exchange("GET", "/console/history", token, b"")
        assert answer.status == 200
        history = msgspec.json.decode(answer.body)
        names = {series["name"] for series in history["series"]}
        assert {"process_resident_memory_bytes", "streamfold_followers"} <= names
        reading, *_ = history["readings"]
        assert len(reading) == 1 + len(history["series"])
        memory = [one["name"] for one in history["series"]].index("process_resident_memory_bytes")
        assert reading[1 + memory] > 1 << 20
