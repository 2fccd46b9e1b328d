"""The adversary finds nothing on a sound server, and everything that is done behind its back."""

from __future__ import annotations

import asyncio
import random
import sys
from asyncio.subprocess import PIPE
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from streamfold.testing.adversary import (
    Accountant,
    BrokenPromiseError,
    Campaign,
    FlakyBucket,
    Ledger,
)
from streamfold.testing.adversary.client import Client, Target
from streamfold.testing.adversary.ledger import Life, Outcome, StreamHistory
from streamfold.testing.adversary.reading import stream_headers
from streamfold.testing.adversary.report import script
from streamfold.testing.adversary.servers import ServerProcess
from streamfold.testing.adversary.workload import STREAMS, Workload


async def test_kills_and_stops_of_a_server_on_local_disk_break_no_promise(tmp_path: Path) -> None:
    options = ["--seed", "9", "--rounds", "3", "--workers", "8", "--seconds", "0.6", "--folder"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "streamfold.testing.adversary", *options, str(tmp_path)),
        stdout=PIPE,
        stderr=PIPE,
    )
    stdout, stderr = await process.communicate()
    printed = stdout.decode()
    assert process.returncode == 0, printed + stderr.decode()
    assert "seed 9: no violation" in printed
    for done in ("kills", "stops", "acknowledged", "records checked"):
        assert f"{done} 0" not in printed


async def test_failures_of_object_storage_break_no_promise(tmp_path: Path) -> None:
    totals = await Campaign(4, tmp_path, FlakyBucket(), workers=8, seconds=0.4).run(1)
    assert totals.storage_faults
    assert totals.acknowledged
    assert totals.records_checked


class Books:
    """A quiet server, and a stream on it that has been written to and accounted for."""

    def __init__(self, port: int) -> None:
        self.ledger = Ledger()
        self.client = Client(Target(port, 1))
        self.dice = random.Random(1)
        self.workload = Workload(self.ledger, self.client, self.dice, 0, 1)
        self.workload.prepare()
        self.accountant = Accountant(self.ledger, self.client, self.dice)
        self.history = StreamHistory(
            STREAMS, "stream", json=False, age=None, creates=False, clock=self.ledger.clock
        )
        self.ledger.histories[STREAMS, "stream"] = self.history

    @property
    def life(self) -> Life:
        life = self.history.living
        assert life is not None
        return life

    async def write(self, appends: int) -> None:
        if self.history.living is None:
            await self.workload.lifecycle.create(self.history)
        for _ in range(appends):
            append = self.ledger.begin(self.history, 1, 2, 10)
            await self.workload.writers.append_s2(self.history, append)
            assert append.outcome is Outcome.KEPT

    async def sneak(self, method: str, path: str, body: object = None) -> None:
        """Do something that is not on the books."""
        content = b"" if body is None else msgspec.json.encode(body)
        answer = await self.client.exchange(method, path, stream_headers(STREAMS), content)
        assert answer.status < 300, answer

    async def violation(self) -> str:
        with pytest.raises(BrokenPromiseError) as caught:
            await self.accountant.account()
        printed = script(self.ledger, caught.value, 1)
        assert "seed 1" in printed
        return printed


@asynccontextmanager
async def quiet_server(folder: Path) -> AsyncIterator[Books]:
    location = (folder / "store").as_uri()
    server = await ServerProcess.start(location, {"trim_grace": 0.0}, folder / "log", {})
    try:
        books = Books(server.port)
        await books.write(3)
        await books.accountant.account()
        yield books
        books.client.close()
    finally:
        await server.stop()


def record(text: str, command: str = "") -> dict[str, object]:
    body: dict[str, object] = {"body": b64encode(text.encode("latin-1")).decode()}
    if command:
        body["headers"] = [["", b64encode(command.encode()).decode()]]
    return body


RECORDS = "/v1/streams/stream/records"


async def test_everything_that_happens_behind_its_back_is_a_violation(tmp_path: Path) -> None:
    async with quiet_server(tmp_path) as books:
        # An append that was acknowledged, and is not there.
        lost = books.ledger.begin(books.history, 1, 1, 10)
        books.ledger.end(lost, Outcome.KEPT, books.life.tail, "200")
        printed = await books.violation()
        assert "its tail had reached 7" in printed
        assert f"append {lost.id}: 1 records of 10 bytes begins" in printed
        lost.outcome, lost.place, books.life.tail = Outcome.REFUSED, None, 6
        await books.accountant.account()

        # An append that was refused, and is there.
        refused = books.ledger.begin(books.history, 1, 1, 10)
        await books.workload.writers.append_s2(books.history, refused)
        refused.outcome = Outcome.REFUSED
        assert f"append {refused.id} was refused" in await books.violation()
        refused.outcome = Outcome.KEPT
        await books.accountant.account()

        # One that was found missing after a restart, and appears later.
        refused.outcome = Outcome.ABSENT
        assert "found missing after a restart" in await books.violation()
        refused.outcome = Outcome.KEPT

        # Two appends in the wrong order, and one that broke its condition.
        first, second = books.history.appends[:2]
        second.ended, ended = first.began - 1, second.ended
        assert "ended before" in await books.violation()
        second.ended, second.match = ended, 0
        assert "asked for 0" in await books.violation()
        second.match, second.token = None, "of another"
        assert "fencing token" in await books.violation()
        second.token = None
        await books.accountant.account()

        # A record that was doubled.
        await books.sneak("POST", RECORDS, {"records": [record(first.body(0).decode())]})
        assert f"append {first.id} is at seq_num 0 and also at" in await books.violation()


@pytest.mark.parametrize(
    ("records", "finding"),
    [
        ([record("foreign")], "a record that nobody appended"),
        ([record("0.0.0.0.0.0.1")], "with other bytes"),
        ([record("\0\0\0\0\0\0\0\3", "trim")], "a record that nobody appended"),
        ([record("\0\0\0\0\0\0\0\7", "trim")], "is lost: s2-streams/stream begins at 7"),
    ],
)
async def test_records_that_nobody_appended_are_violations(
    tmp_path: Path, records: list[dict[str, object]], finding: str
) -> None:
    async with quiet_server(tmp_path) as books:
        await books.sneak("POST", RECORDS, {"records": records})
        assert finding in await books.violation()


async def test_a_stream_that_is_deleted_or_replaced_is_a_violation(tmp_path: Path) -> None:
    async with quiet_server(tmp_path) as books:
        await books.sneak("DELETE", "/v1/streams/stream")
        assert "exists, and is not listed" in await books.violation()
        await asyncio.sleep(0.002)  # creation times are in milliseconds
        await books.sneak("POST", "/v1/streams", {"stream": "stream"})
        assert "is another stream now" in await books.violation()
