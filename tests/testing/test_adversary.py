"""The adversary accepts a sound server, and notices every change made behind its back."""

from __future__ import annotations

import asyncio
import random
import shutil
import sys
from asyncio.subprocess import PIPE
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

import streamfold
from streamfold.errors import InvalidError
from streamfold.testing.adversary import (
    Accountant,
    BrokenPromiseError,
    Campaign,
    Ledger,
    Program,
)
from streamfold.testing.adversary.client import Client, CurrentServer
from streamfold.testing.adversary.comparison import Comparison
from streamfold.testing.adversary.ledger import Append, Life, OperationOutcome, StreamHistory
from streamfold.testing.adversary.reading import StoredRecord, StreamContents, stream_headers
from streamfold.testing.adversary.servers import ServerProcess
from streamfold.testing.adversary.shrinking import FailingProgram, Shrinker, attack, script
from streamfold.testing.adversary.workload import STREAMS, Workload


async def test_kills_and_stops_of_a_server_on_local_disk_break_no_promise(tmp_path: Path) -> None:
    options = ["--seed", "9", "--rounds", "2", "--workers", "8", "--seconds", "0.6"]
    report = tmp_path / "report.json"
    files = ["--folder", str(tmp_path / "run"), "--report", str(report)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "streamfold.testing.adversary", *options, *files),
        stdout=PIPE,
        stderr=PIPE,
    )
    stdout, stderr = await process.communicate()
    printed = stdout.decode()
    assert process.returncode == 0, printed + stderr.decode()
    assert "seed 9: no violation" in printed
    for done in ("kills", "stops", "acknowledged", "records checked"):
        assert f"{done} 0" not in printed
    line = msgspec.json.decode(await asyncio.to_thread(report.read_bytes))
    assert (line["proof"], line["violations"]) == ("adversary-local", 0)
    assert line["figures"]["lost"] == 0 < line["figures"]["acknowledged"]


async def test_failures_of_object_storage_break_no_promise(tmp_path: Path) -> None:
    program = Program(4, rounds=1, storage="s3", workers=8, seconds=0.4)
    totals = await Campaign(program, tmp_path).run()
    assert totals.storage_faults
    assert totals.acknowledged
    assert totals.records_checked


class Books:
    """A quiet server, and a stream on it that has been written to and accounted for."""

    def __init__(self, port: int) -> None:
        self.ledger = Ledger()
        self.client = Client(CurrentServer(port, 1))
        self.dice = random.Random(1)
        program = Program(1, busy_streams=0, small_streams=1)
        self.workload = Workload(self.ledger, self.client, self.dice, program)
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
            assert append.outcome is OperationOutcome.KEPT

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
        books.ledger.end(lost, OperationOutcome.KEPT, books.life.tail, "200")
        printed = await books.violation()
        assert "its tail had reached 7" in printed
        assert f"append {lost.id}: 1 records of 10 bytes begins" in printed
        lost.outcome, lost.place, books.life.tail = OperationOutcome.REFUSED, None, 6
        await books.accountant.account()

        # An append that was refused, and is there.
        refused = books.ledger.begin(books.history, 1, 1, 10)
        await books.workload.writers.append_s2(books.history, refused)
        refused.outcome = OperationOutcome.REFUSED
        assert f"append {refused.id} was refused" in await books.violation()
        refused.outcome = OperationOutcome.KEPT
        await books.accountant.account()

        # One that was found missing after a restart, and appears later.
        refused.outcome = OperationOutcome.ABSENT
        assert "found missing after a restart" in await books.violation()
        refused.outcome = OperationOutcome.KEPT

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


def account(ledger: Ledger, life: Life, first: int, tail: int) -> None:
    """Account for a stream of which a reader gets no record from `first` on."""
    contents = StreamContents([], first, tail)
    comparison = Comparison(ledger, life, contents, 1, ledger.clock.wall_ms())
    comparison.check_appends()
    comparison.check_start([])
    comparison.conclude()


def lived(ledger: Ledger, age: int | None) -> tuple[StreamHistory, Life]:
    history = StreamHistory("basin", "stream", False, age, True, ledger.clock)
    ledger.histories["basin", "stream"] = history
    return history, history.be_born(ledger.clock.advance(), ledger.clock.wall_ms())


def test_records_may_be_young_again_after_the_clock_went_back_and_not_otherwise() -> None:
    ledger = Ledger()
    history, life = lived(ledger, age=3)
    append = ledger.begin(history, 1, 1, 10)
    ledger.end(append, OperationOutcome.KEPT, 0, "")
    ledger.clock.ahead_ms = 7_200_000
    account(ledger, life, 1, 1)
    with pytest.raises(BrokenPromiseError, match="begins at 0 again, and was trimmed to 1"):
        account(ledger, life, 0, 1)
    ledger.clock.ahead_ms = 0
    account(ledger, life, 0, 1)


def read_again(ledger: Ledger, life: Life, append: Append, place: int) -> None:
    """Account for a stream of which a reader gets the records of `append`, and nothing else."""
    records = [
        StoredRecord(place + index, 1, "", append.body(index)) for index in range(append.count)
    ]
    contents = StreamContents(records, place, place + append.count)
    Comparison(ledger, life, contents, 3, ledger.clock.wall_ms()).check_records()


@pytest.mark.parametrize("outcome", [OperationOutcome.UNKNOWN, OperationOutcome.KEPT])
def test_an_append_that_expired_before_anybody_saw_it_may_appear_after_the_clock_went_back(
    outcome: OperationOutcome,
) -> None:
    ledger = Ledger()
    history, life = lived(ledger, age=3)
    append = ledger.begin(history, 1, 4, 3000)
    if outcome is OperationOutcome.KEPT:
        append.changes -= 1  # a creation meanwhile: nobody knows which life it belongs to
    ledger.end(append, outcome, 0 if outcome is OperationOutcome.KEPT else None, "")
    ledger.clock.ahead_ms = 300_000
    account(ledger, life, 4, 4)
    ledger.give_up_unknown(2)
    ledger.forget_past()
    ledger.clock.ahead_ms = -300_000
    read_again(ledger, life, append, 0)
    assert append.outcome in (OperationOutcome.SEEN, OperationOutcome.KEPT)
    assert append.life is life


@pytest.mark.parametrize("why", ["it keeps all", "it is in view", "it is another stream"])
def test_an_append_that_age_cannot_hide_must_never_appear(why: str) -> None:
    ledger = Ledger()
    history, life = lived(ledger, age=None if why == "it keeps all" else 3)
    if why == "it is in view":
        life.tail = 4
    append = ledger.begin(history, 1, 4, 3000)
    ledger.end(append, OperationOutcome.UNKNOWN, None, "")
    account(ledger, life, 0 if why == "it keeps all" else 4, 4)
    ledger.give_up_unknown(2)
    if why == "it is another stream":
        assert append.outcome is OperationOutcome.UNKNOWN
        history.die()
        life = history.be_born(ledger.clock.advance(), ledger.clock.wall_ms())
        account(ledger, life, 4, 4)
        ledger.give_up_unknown(3)
    assert append.outcome is OperationOutcome.ABSENT
    ledger.forget_past()
    with pytest.raises(BrokenPromiseError, match="a record that nobody appended"):
        read_again(ledger, life, append, 4)


def test_an_append_that_age_hid_must_not_appear_after_younger_ones() -> None:
    ledger = Ledger()
    history, life = lived(ledger, age=3)
    unknown = ledger.begin(history, 1, 1, 10)
    ledger.end(unknown, OperationOutcome.UNKNOWN, None, "")
    account(ledger, life, 4, 4)
    ledger.give_up_unknown(2)
    younger = ledger.begin(history, 2, 1, 10)
    ledger.end(younger, OperationOutcome.KEPT, 4, "")
    records = [
        StoredRecord(place, 1, "", append.body(0)) for place, append in ((4, younger), (5, unknown))
    ]
    comparison = Comparison(ledger, life, StreamContents(records, 4, 6), 3, ledger.clock.wall_ms())
    with pytest.raises(BrokenPromiseError, match=f"append {unknown.id}, at 5, ended before"):
        comparison.check_records()


def test_a_trim_is_remembered_when_its_append_is_forgotten() -> None:
    ledger = Ledger()
    history, life = lived(ledger, age=None)
    append = ledger.begin(history, 1, 5, 0)
    append.trim = 377
    history.changes += 1  # a deletion meanwhile: nobody knows which life it belongs to
    ledger.end(append, OperationOutcome.KEPT, 0, "")
    account(ledger, life, 6, 6)
    history.forget({life}, ledger.appends)
    assert not history.appends
    account(ledger, life, 6, 6)


async def test_a_program_has_smaller_ones_and_survives_a_file(tmp_path: Path) -> None:
    program = Program(7, rounds=9, operations=("append", "fork", "list", "delete"))
    smaller = list(program.smaller())
    assert all(candidate.size < program.size for candidate in smaller)
    assert smaller[0].operations == ("list", "delete")
    assert min(candidate.rounds for candidate in smaller) == 1
    assert any(not candidate.faults for candidate in program.having(faults=("kill",)).smaller())
    program.write(tmp_path / "program.json")
    assert Program.read(tmp_path / "program.json") == program
    with pytest.raises(InvalidError, match="operation 'dance' is unknown"):
        Program(7, operations=("dance",))
    with pytest.raises(InvalidError, match="does not hold a program"):
        Program.read(tmp_path)


async def test_a_failing_program_shrinks_to_what_it_takes(tmp_path: Path) -> None:
    """A server that acknowledges appends before they are durable."""
    source = tmp_path / "source"
    await asyncio.to_thread(shutil.copytree, PACKAGE, source / "streamfold")
    engine = source / "streamfold" / "store" / "engine" / "slatedb.py"
    text = await asyncio.to_thread(engine.read_text)
    assert _COMMIT in text
    await asyncio.to_thread(engine.write_text, text.replace(_COMMIT, _LATE_COMMIT))
    environment = {"PYTHONPATH": str(source)}
    program = Program(
        5, rounds=2, workers=6, followers=0, seconds=0.4, small_streams=4, faults=("kill", "pause")
    )
    failure: FailingProgram | None = None
    for number in range(
        5
    ):  # an attack finds nothing if no append was acknowledged just before a kill
        failure = failure or await attack(program, tmp_path / f"attack-{number}", environment)
    assert failure is not None
    smallest = failure
    for _ in range(4):
        if smallest is failure:
            smallest = await Shrinker(tmp_path, environment, runs=3, repeats=1).shrink(failure)
    assert smallest.program.size < program.size
    assert "VIOLATION" in smallest.script


#: What waits until a commit is durable, and what does not.
_COMMIT = """\
            sequence = await self._database.commit(batch.native)
"""
_LATE_COMMIT = """\
            late = self._database.commit(batch.native)
            self._late = asyncio.get_running_loop().call_later(0.5, asyncio.ensure_future, late)
            sequence = 0
"""
PACKAGE = Path(streamfold.__file__).parent


@pytest.mark.parametrize("faults", [("clock", "kill"), ("power",), ("storage", "stop")])
async def test_faults_of_the_machine_break_no_promise(
    tmp_path: Path, faults: tuple[str, ...]
) -> None:
    program = Program(SEEDS[faults[0]], rounds=1, workers=6, seconds=0.5, faults=faults)
    totals = await Campaign(program, tmp_path).run()
    happened = {
        "clock": totals.clock_moves,
        "power": totals.power_cuts,
        "storage": totals.storage_faults,
    }
    assert happened[faults[0]]
    assert totals.records_checked


#: With which the fault comes in the first round.
SEEDS = {"clock": 12, "power": 6, "storage": 1}
