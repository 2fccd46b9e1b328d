"""A server with damaged storage serves what is intact and reports the damage."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import s2_sdk
from s2_sdk import AppendInput

from streamfold.model.access_tokens import AccessToken, ResourceSet, Right, Scope, Secret
from streamfold.model.records import Record
from streamfold.server.http import door
from streamfold.server.main import running_server
from streamfold.store import keys
from streamfold.store.damage import StreamDamagedError
from streamfold.store.read.requests import ReadRequest, from_seq_num
from streamfold.store.read_only import open_read_only
from streamfold.store.store import open_store
from tests.sdk import sdk_client
from tests.server.conftest import configuration
from tests.server.raw_h2 import H2Client, h2_client
from tests.store.damaged_tables import Place, Table, only_table

BASINS = ("first-basin", "other-basin")
#: Streams of each basin, their records, and those of the stream with chunk files. A table has a filter
#: from 1000 rows on.
STREAMS = ("s0", "s1", "s2")
RECORDS = 340
LARGE, LARGE_RECORDS = "large", 600
JSON = ("content-type", "application/json")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that was closed, with one table of several blocks, and chunk files."""
    root = tmp_path_factory.mktemp("whole")
    asyncio.run(_fill(root))
    return root


async def _fill(root: Path) -> None:
    bytes_of = random.Random(1).randbytes
    async with open_store(root.as_uri()) as store:
        for basin in BASINS:
            await store.create_basin(basin)
            for stream in (*STREAMS, LARGE):
                await store.create_stream(basin, stream)
        for _ in range(RECORDS // 2):
            batch = [Record(bytes_of(200)), Record(bytes_of(200))]
            await asyncio.gather(
                *[store.append(basin, stream, batch) for basin in BASINS for stream in STREAMS]
            )
        for _ in range(LARGE_RECORDS // 200):
            await store.append(BASINS[0], LARGE, [Record(bytes_of(1000)) for _ in range(200)])
        await store.append(BASINS[1], LARGE, [Record(b"one")])


@pytest.fixture
async def damaged(whole: Path, tmp_path: Path) -> Table:
    """A copy of the store's table, to be damaged."""
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    return await only_table(tmp_path)


class Client:
    """Reads and appends as any HTTP client does."""

    def __init__(self, h2: H2Client) -> None:
        self._h2 = h2

    async def get(self, path: str, basin: str = "") -> tuple[int, Any]:
        headers = (("s2-basin", basin),) if basin else ()
        answer = await self._h2.exchange("GET", path, headers)
        body = answer.body.decode()
        return answer.status, json.loads(body) if body.startswith("{") else body

    async def append(self, basin: str, stream: str) -> tuple[int, Any]:
        headers = (("s2-basin", basin), JSON)
        body = b'{"records":[{"body":"a"}]}'
        answer = await self._h2.exchange("POST", f"/v1/streams/{stream}/records", headers, body)
        return answer.status, json.loads(answer.body)

    async def create(self, basin: str, stream: str) -> tuple[int, Any]:
        body = json.dumps({"stream": stream}).encode()
        answer = await self._h2.exchange("POST", "/v1/streams", (("s2-basin", basin), JSON), body)
        return answer.status, json.loads(answer.body)

    async def read_all(self, basin: str, stream: str, tail: int) -> tuple[list[range], list[str]]:
        """Read up to `tail`; after an error, continue where it says. Returns what came, and errors."""
        parts: list[range] = []
        errors: list[str] = []
        seq_num = 0
        while seq_num < tail:
            path = f"/v1/streams/{stream}/records?seq_num={seq_num}"
            status, body = await self.get(path, basin)
            if status == 200:
                numbers = [record["seq_num"] for record in body["records"]]
                assert numbers == list(range(seq_num, seq_num + len(numbers)))
                parts.append(range(seq_num, numbers[-1] + 1))
                seq_num = numbers[-1] + 1
            else:
                assert (status, body["code"]) == (500, "storage")
                errors.append(body["message"])
                following = body["message"].partition("read on from seq_num ")[2].split()
                if not following:
                    break
                assert int(following[0]) > seq_num
                seq_num = int(following[0])
        return parts, errors


@asynccontextmanager
async def serving(root: Path) -> AsyncIterator[Client]:
    async with (
        running_server(configuration(location=root.as_uri())) as server,
        h2_client(server.port) as h2,
    ):
        yield Client(h2)


def tails() -> list[tuple[str, str, int]]:
    """All streams, and the seq_num after the last record of each."""
    small = [(basin, stream, RECORDS) for basin in BASINS for stream in STREAMS]
    return [*small, (BASINS[0], LARGE, LARGE_RECORDS), (BASINS[1], LARGE, 1)]


@pytest.mark.parametrize("place", Place)
async def test_a_server_starts_and_serves_what_is_whole(
    damaged: Table, tmp_path: Path, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    damaged.flip(place)
    unreadable = 0
    async with serving(tmp_path) as client:
        for basin, stream, tail in tails():
            parts, errors = await client.read_all(basin, stream, tail)
            assert all(repr(basin) in error for error in errors), errors
            assert sum(map(len, parts)) == tail or errors
            unreadable += tail - sum(map(len, parts))
        status, ready = await client.get("/ready")
        assert status == 200
        _, damage = await client.get("/v1/damage")
        _, metrics = await client.get("/metrics")
        assert (await client.get("/health"))[0] == 200
    if place in (Place.STATISTICS, Place.FOOTER):
        assert ready == "OK"
        assert damage["summary"] == []
        assert unreadable == 0
        return
    if place is Place.FILTER and ready == "OK":
        assert unreadable == 0  # reads did without it, so nobody has noticed
        return
    assert ready["status"] == "degraded"
    assert ready["degraded"] == damage["summary"]
    assert damage["files"] == [damaged.name]
    assert 'streamfold_damage{of="files"} 1.0' in metrics
    assert f'streamfold_damage{{of="places"}} {float(len(damage["places"]))}' in metrics
    if place is Place.FILTER:
        assert unreadable == 0
    logged = [
        record
        for record in caplog.records
        # On a busy machine the door may say that it closes connections which are still open.
        if record.levelno >= logging.WARNING and record.name != door.__name__
    ]
    messages = [record.getMessage() for record in logged]
    assert len(set(messages)) == len(messages)
    assert all(damaged.name in message for message in messages)


async def test_a_damaged_block_of_records_costs_its_records_and_nothing_else(
    damaged: Table, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damaged.flip(Place.RECORDS)
    async with serving(tmp_path) as client:
        errors: dict[tuple[str, str], list[str]] = {}
        missing = 0
        for basin, stream, tail in tails():
            parts, met = await client.read_all(basin, stream, tail)
            missing += tail - sum(map(len, parts))
            if met:
                errors[basin, stream] = met
            assert (await client.append(basin, stream))[0] == 200
        # A block has 64 KiB: some 260 records, of one stream or two.
        assert 200 < missing < 340
        _, damage = await client.get("/v1/damage")
        places = {(place["basin"], place["stream"]): place for place in damage["places"]}
        assert places.keys() == errors.keys()
        for (basin, stream), place in places.items():
            first, following = place["first_seq_num"], place["next_seq_num"]
            subject = f"records {first} to {following - 1} of stream {stream!r} in basin {basin!r}"
            assert place["effect"] == f"{subject} cannot be read"
            assert errors[basin, stream][0].startswith(f"{subject} cannot be read")
            assert place["file"] == damaged.name
            # From the middle of the damage, too, and again: it is logged once.
            path = f"/v1/streams/{stream}/records?seq_num={(first + following) // 2}"
            assert (await client.get(path, basin))[0] == 500
            whole, _ = await client.read_all(basin, stream, first)
            assert sum(map(len, whole)) >= first
    subjects = [record.getMessage() for record in caplog.records if "cannot be read:" in record.msg]
    assert len(subjects) == len(set(subjects))


async def test_a_store_whose_own_rows_are_damaged_takes_no_changes(
    damaged: Table, tmp_path: Path
) -> None:
    """Neither the format nor the next stream id count as missing: a new stream could get an old id."""
    damaged.flip(Place.FIRST_BLOCK)
    before = damaged.path.read_bytes()
    async with serving(tmp_path) as client:
        for basin, stream, _ in tails():
            status, body = await client.append(basin, stream)
            # Definite: S2's clients neither repeat it nor take it for an append that may have happened.
            assert (status, body["code"]) == (409, "store_damaged")
            assert "storage is damaged" in body["message"]
        status, body = await client.create(BASINS[0], "new-stream")
        assert (status, body["code"]) == (409, "store_damaged")
        _, ready = await client.get("/ready")
        assert "the store takes no changes" in ready["degraded"]
    damaged.path.write_bytes(before)
    damaged.flip(Place.FIRST_BLOCK)  # back to what was written
    async with serving(tmp_path) as client:
        assert await client.get("/ready") == (200, "OK")
        for basin, stream, tail in tails():
            assert await client.read_all(basin, stream, tail) == ([range(tail)], [])
            status, ack = await client.append(basin, stream)
            assert (status, ack["start"]["seq_num"]) == (200, tail)


async def test_the_official_client_takes_a_refusal_because_of_damage_for_definite(
    damaged: Table, tmp_path: Path
) -> None:
    """It repeats a 500, and after one the outcome of an append is unknown."""
    damaged.flip(Place.FIRST_BLOCK)
    settings = configuration(location=tmp_path.as_uri())
    batch = AppendInput([s2_sdk.Record(b"a")])
    async with running_server(settings) as server, sdk_client(server.url) as client:
        target = client.basin(BASINS[0]).stream(STREAMS[0])
        with pytest.raises(s2_sdk.S2ServerError) as refused:
            await target.append(batch)
        with pytest.raises(s2_sdk.S2ServerError) as ended:
            async with target.append_session() as session:
                await (await session.submit(batch))
        for error in (refused.value, ended.value):
            assert (error.status_code, error.code) == (409, "store_damaged")


async def test_a_stream_whose_last_records_are_damaged_takes_more_which_can_be_read(
    damaged: Table, tmp_path: Path
) -> None:
    """Also after a restart, when they are not in memory: SlateDB's scans do not pass the block."""
    basin, stream, more = BASINS[0], STREAMS[1], 20
    place = damaged.blocks[damaged.block_of(keys.chunk(2, RECORDS - 1))][0] + 100
    damaged.flip_at(place)
    for restarted in (False, True):
        async with serving(tmp_path) as client:
            if not restarted:
                for number in range(more):
                    status, ack = await client.append(basin, stream)
                    assert (status, ack["start"]["seq_num"]) == (200, RECORDS + number)
            [before, *behind], [error] = await client.read_all(basin, stream, RECORDS + more)
            named = (
                f"records {before.stop} to {RECORDS - 1} of stream {stream!r} in basin {basin!r}"
            )
            assert error.startswith(f"{named} cannot be read")
            assert f"read on from seq_num {RECORDS} " in error
            assert [behind[0].start, behind[-1].stop] == [RECORDS, RECORDS + more]
            status, page = await client.get(f"/v1/streams/{stream}/records?tail_offset=5", basin)
            assert [record["seq_num"] for record in page["records"]] == list(
                range(RECORDS + more - 5, RECORDS + more)
            )
    damaged.flip_at(place)
    async with serving(tmp_path) as client:
        assert (await client.read_all(basin, stream, RECORDS + more))[1] == []


async def test_a_table_that_is_gone_is_named(damaged: Table, tmp_path: Path) -> None:
    damaged.path.unlink()
    async with serving(tmp_path) as client:
        status, ready = await client.get("/ready")
        assert (status, ready["status"]) == (200, "degraded")
        _, damage = await client.get("/v1/damage")
        assert damage["files"] == [damaged.name]
        assert damage["read_only"]


async def test_a_reader_beside_the_server_names_the_damage(damaged: Table, tmp_path: Path) -> None:
    damaged.flip(Place.RECORDS)
    errors: list[StreamDamagedError] = []
    async with open_read_only(tmp_path.as_uri()) as streams:
        for basin, stream, tail in tails():
            try:
                async for _ in streams.batches(basin, stream, 0, tail, None):
                    pass
            except StreamDamagedError as error:
                errors.append(error)
    assert {error.file for error in errors} == {damaged.name}
    assert all(error.ref in [(basin, stream) for basin, stream, _ in tails()] for error in errors)


def damage_chunk_file(root: Path) -> Path:
    """Damage the second chunk file of the large stream."""
    file = sorted(path for path in (root / "chunks").rglob("*") if path.is_file())[1]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(data)
    return file


async def test_a_damaged_chunk_file_costs_its_records_and_is_named(
    damaged: Table, tmp_path: Path
) -> None:
    file = damage_chunk_file(tmp_path)
    async with serving(tmp_path) as client:
        parts, [error] = await client.read_all(BASINS[0], LARGE, LARGE_RECORDS)
        assert sum(map(len, parts)) == LARGE_RECORDS - 200
        assert error.startswith(f"records 200 to 399 of stream {LARGE!r} in basin {BASINS[0]!r}")
        _, damage = await client.get("/v1/damage")
        [place] = damage["places"]
        assert (place["first_seq_num"], place["next_seq_num"]) == (200, 400)
        assert place["file"] == file.relative_to(tmp_path).as_posix()
        assert (await client.get("/ready"))[1]["status"] == "degraded"


async def test_damage_is_named_without_the_prefix_that_a_token_must_not_see(
    damaged: Table, tmp_path: Path
) -> None:
    damage_chunk_file(tmp_path)
    root = Secret("the-root-token-of-this-test")
    scope = Scope(
        basins=ResourceSet.prefix(""),
        streams=ResourceSet.prefix(LARGE[:2]),
        ops=frozenset([Right.ACCOUNT_METRICS, Right.STREAM_METRICS]),
    )
    settings = configuration(location=tmp_path.as_uri(), root_token=root)
    async with running_server(settings) as server, h2_client(server.port) as h2:
        with pytest.raises(StreamDamagedError):
            await server.store.read(BASINS[0], LARGE, ReadRequest(from_seq_num(200)))
        token = AccessToken("app", scope, auto_prefix_streams=True)
        secret = await server.store.account.issue_access_token(token)
        headers = (("authorization", f"Bearer {secret.text}"),)
        answer = await h2.exchange("GET", "/v1/damage", headers)
    [place] = json.loads(answer.body)["places"]
    assert place["stream"] == LARGE[2:]
    subject = f"records 200 to 399 of stream {LARGE[2:]!r} in basin {BASINS[0]!r}"
    assert place["effect"] == f"{subject} cannot be read"


async def test_a_subscription_that_cannot_be_read_does_not_count_as_missing(tmp_path: Path) -> None:
    path = "/v1/stream/__ds/subscriptions/mine"
    body = b'{"type":"pull-wake","streams":["a"],"wake_stream":"b"}'

    async def ask(method: str, path: str, body: bytes = b"") -> int:
        headers = (("authorization", "Bearer no-token-of-a-wake"), JSON)
        return (await h2.exchange(method, path, headers, body)).status

    settings = configuration(location=tmp_path.as_uri())
    async with running_server(settings) as server, h2_client(server.port) as h2:
        assert await ask("PUT", path, body) == 201
    table = await only_table(tmp_path)
    table.flip(Place.INDEX)
    async with running_server(settings) as server, h2_client(server.port) as h2:
        for id_ in (path, f"{path}-not"):
            asked = [await ask(method, id_, body) for method in ("GET", "PUT", "DELETE")]
            assert (asked, await ask("POST", f"{id_}/ack", b"{}")) == ([500, 409, 409], 409)
    table.flip(Place.INDEX)  # back to what was written
    async with running_server(settings) as server, h2_client(server.port) as h2:
        assert await ask("GET", path) == 200
