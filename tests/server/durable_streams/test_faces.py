"""Records written through one face can be read through the other, even after a restart."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from s2_sdk import (
    S2,
    AppendInput,
    BasinConfig,
    CommandRecord,
    Encryption,
    ReadLimit,
    Record,
    S2ServerError,
    S2Stream,
    SeqNum,
    TailOffset,
    Timestamp,
)

from streamfold.server.main import running_server
from tests.server.conftest import configuration, sdk
from tests.server.durable_streams.conftest import (
    JSON,
    OCTETS,
    browsing,
    producer,
    read_pages,
    token,
)

DEFAULT = "durable-streams"


@asynccontextmanager
async def both_faces(folder: Path) -> AsyncIterator[tuple[S2, httpx.AsyncClient]]:
    """A server on local disk, by both protocols."""
    settings = configuration(location=folder.as_uri(), long_poll=0.1)
    async with running_server(settings) as server, sdk(server) as s2, browsing(server) as web:
        yield s2, web


async def bodies(stream: S2Stream, start: int = 0) -> list[bytes]:
    """What S2 reads, commands left out."""
    batch = await stream.read(start=SeqNum(start), limit=ReadLimit(count=1000))
    return [r.body for r in batch.records if not (r.headers and not r.headers[0][0])]


async def test_json_written_here_is_read_there_one_record_per_message(tmp_path: Path) -> None:
    async with both_faces(tmp_path) as (_, web):
        await web.put("/v1/stream/app/json", headers=JSON, content=b'[{"n": 1}]')
        headers = JSON | producer("p", 0, 0)
        assert (
            await web.post("/v1/stream/app/json", headers=headers, content=b"[2, [3]]")
        ).is_success
    async with both_faces(tmp_path) as (s2, web):
        stream = s2.basin(DEFAULT).stream("app/json")
        assert await bodies(stream) == [b'{"n":1}', b"2", b"[3]"]
        again = await web.post("/v1/stream/app/json", headers=headers, content=b"[2, [3]]")
        assert (again.status_code, again.headers["producer-seq"]) == (204, "0")
        assert (await stream.check_tail()).seq_num == 3


async def test_json_written_there_is_read_here(tmp_path: Path) -> None:
    async with both_faces(tmp_path) as (s2, web):
        await web.put("/v1/stream/json", headers=JSON)
        records = [Record(json.dumps({"n": n}).encode()) for n in range(3)]
        await s2.basin(DEFAULT).stream("json").append(AppendInput(records))
        assert (await web.get("/v1/stream/json")).json() == [{"n": n} for n in range(3)]
    async with both_faces(tmp_path) as (_, web):
        read = await web.get("/v1/stream/json", params={"offset": token(1)})
        assert read.json() == [{"n": 1}, {"n": 2}]
        assert read.headers["stream-next-offset"] == token(3)


async def test_a_json_stream_stays_json_on_every_face(tmp_path: Path) -> None:
    async with both_faces(tmp_path) as (s2, web):
        await web.put("/v1/stream/json", headers=JSON, content=b"[1]")
        stream = s2.basin(DEFAULT).stream("json")
        with pytest.raises(S2ServerError) as refused:
            await stream.append(AppendInput([Record(b"2"), Record(b"not json")]))
        assert refused.value.status_code == 422
        assert (await web.get("/v1/stream/json")).json() == [1]


async def test_bytes_go_both_ways(tmp_path: Path) -> None:
    large = bytes(range(256)) * 10_000
    async with both_faces(tmp_path) as (s2, web):
        await s2.create_basin("some-bucket")
        await s2.basin("some-bucket").create_stream("bytes")
        stream = s2.basin("some-bucket").stream("bytes")
        await stream.append(AppendInput([Record(b"from "), Record(b"s2 ")]))
        await web.post("/some-bucket/bytes", headers=OCTETS, content=large)
        await stream.append(AppendInput([Record(b" and s2")]))
    async with both_faces(tmp_path) as (s2, web):
        whole = await read_pages(web, "/some-bucket/bytes", token(0))
        assert whole == b"from s2 " + large + b" and s2"
        read = await web.get("/some-bucket/bytes")
        assert read.headers["content-type"] == "application/octet-stream"
        pieces = (
            await s2.basin("some-bucket")
            .stream("bytes")
            .read(start=SeqNum(2), limit=ReadLimit(count=2))
        )
        assert pieces.records[0].headers == [(b"ds-more", b"")]


async def test_commands_are_invisible_here(tmp_path: Path) -> None:
    async with both_faces(tmp_path) as (s2, web):
        await web.put("/v1/stream/json", headers=JSON, content=b"[0,1]")
        stream = s2.basin(DEFAULT).stream("json")
        await stream.append(AppendInput([CommandRecord.fence("token")]))
        await web.post("/v1/stream/json", headers=JSON, content=b"3")
        read = await web.get("/v1/stream/json")
        assert (read.json(), read.headers["stream-next-offset"]) == ([0, 1, 3], token(4))
        async with web.stream("GET", "/v1/stream/json?offset=-1&live=sse") as events:
            text = ""
            async for piece in events.aiter_text():
                text += piece
                if "upToDate" in text:
                    break
        assert "data:[0,1,3]" in text or "data:[0,1]" in text
        assert "fence" not in text
        assert "token" not in text
        boot = await web.get("/v1/stream/json/bootstrap")
        assert b"token" not in boot.content


async def test_a_stream_that_only_has_commands_reads_as_empty(tmp_path: Path) -> None:
    async with both_faces(tmp_path) as (s2, web):
        await web.put("/v1/stream/json", headers=JSON)
        stream = s2.basin(DEFAULT).stream("json")
        await stream.append(AppendInput([CommandRecord.fence("token")]))
        read = await web.get("/v1/stream/json")
        assert (read.json(), read.headers["stream-up-to-date"]) == ([], "true")


async def test_a_fence_of_s2_does_not_hold_here(tmp_path: Path) -> None:
    async with both_faces(tmp_path) as (s2, web):
        await web.put("/v1/stream/x", headers=OCTETS)
        stream = s2.basin(DEFAULT).stream("x")
        await stream.append(AppendInput([CommandRecord.fence("mine")]))
        assert (await web.post("/v1/stream/x", headers=OCTETS, content=b"x")).status_code == 204
        with pytest.raises(S2ServerError) as refused:
            await stream.append(AppendInput([Record(b"y")], fencing_token="other"))
        assert refused.value.status_code == 412


async def test_what_s2_trims_is_gone_here_and_bootstrap_is_pointed_to(tmp_path: Path) -> None:
    async with both_faces(tmp_path) as (s2, web):
        await web.put("/v1/stream/json", headers=JSON, content=b"[0,1,2]")
        stream = s2.basin(DEFAULT).stream("json")
        await stream.append(AppendInput([CommandRecord.trim(2)]))
    async with both_faces(tmp_path) as (_, web):
        gone = await web.get("/v1/stream/json", params={"offset": "-1"})
        assert (gone.status_code, gone.headers["stream-next-offset"]) == (410, token(2))
        assert gone.headers["link"] == '</v1/stream/json/bootstrap>; rel="bootstrap"'
        boot = await web.get("/v1/stream/json/bootstrap")
        assert boot.headers["stream-snapshot-offset"] == "-1"
        assert boot.content.count(b"application/json") == 1


async def test_retention_set_here_is_a_trim_there(tmp_path: Path) -> None:
    async with both_faces(tmp_path) as (s2, web):
        await web.put("/v1/stream/json", headers=JSON, content=b"[0,1,2]")
        await web.put("/v1/stream/json/snapshot/2", content=b"state")
        await web.put("/v1/stream/json/retention/2")
        assert await bodies(s2.basin(DEFAULT).stream("json")) == [b"2"]


async def test_a_closed_stream_refuses_records_of_s2(tmp_path: Path) -> None:
    async with both_faces(tmp_path) as (_, web):
        await web.put("/v1/stream/json", headers=JSON, content=b"[1]")
        await web.post("/v1/stream/json", headers={"stream-closed": "true"})
    async with both_faces(tmp_path) as (s2, web):
        stream = s2.basin(DEFAULT).stream("json")
        with pytest.raises(S2ServerError) as refused:
            await stream.append(AppendInput([Record(b"2")]))
        assert (refused.value.status_code, refused.value.code) == (409, "stream_closed")
        assert await bodies(stream) == [b"1"]
        assert (await web.get("/v1/stream/json")).headers["stream-closed"] == "true"


async def test_a_fork_reads_as_one_stream_through_s2(tmp_path: Path) -> None:
    async with both_faces(tmp_path) as (_, web):
        await web.put("/v1/stream/source", headers=JSON, content=b"[0,1]")
        await web.post("/v1/stream/source", headers=JSON, content=b"[2,3]")
        fork = {"stream-forked-from": "/v1/stream/source", "stream-fork-offset": token(2)}
        sub = fork | {"stream-fork-sub-offset": "1"}
        assert (
            await web.put("/v1/stream/fork", headers=sub, content=b'["own"]')
        ).status_code == 201
        await web.post("/v1/stream/source", headers=JSON, content=b"[4]")
    async with both_faces(tmp_path) as (s2, web):
        basin = s2.basin(DEFAULT)
        assert await bodies(basin.stream("fork")) == [b"0", b"1", b"2", b'"own"']
        assert await bodies(basin.stream("source")) == [b"0", b"1", b"2", b"3", b"4"]
        await basin.stream("fork").append(AppendInput([Record(b"5")]))
        assert (await web.get("/v1/stream/fork")).json() == [0, 1, 2, "own", 5]
        records = (await basin.stream("fork").read(start=SeqNum(0))).records
        stamps = [record.timestamp for record in records]
        assert stamps == sorted(stamps)
        inherited = await basin.stream("fork").read(start=TailOffset(4))
        assert [record.seq_num for record in inherited.records] == [1, 2, 3, 4]
        by_time = await basin.stream("fork").read(start=Timestamp(stamps[1]))
        assert [r.timestamp for r in by_time.records] == [s for s in stamps if s >= stamps[1]]


async def test_a_stream_of_s2_is_forked_here(tmp_path: Path) -> None:
    async with both_faces(tmp_path) as (s2, web):
        await s2.create_basin("some-bucket")
        await s2.basin("some-bucket").create_stream("source")
        source = s2.basin("some-bucket").stream("source")
        await source.append(AppendInput([Record(b"one"), Record(b"two")]))
        fork = {"stream-forked-from": "/some-bucket/source"}
        assert (await web.put("/some-bucket/fork", headers=fork)).status_code == 201
        await s2.basin("some-bucket").delete_stream("source")
        assert (await web.get("/some-bucket/fork")).content == b"onetwo"
        assert (await web.get("/some-bucket/source")).status_code == 410


async def test_encrypted_records_are_read_and_forked_with_their_key(tmp_path: Path) -> None:
    key = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="
    secret = {"s2-encryption-key": key}
    async with both_faces(tmp_path) as (s2, web):
        config = BasinConfig(stream_cipher=Encryption.AEGIS_256)
        await s2.create_basin("sealed-bucket", config=config)
        created = await web.put("/sealed-bucket/a", headers=OCTETS | secret, content=b"first ")
        assert created.status_code == 201, created.text
        await web.post("/sealed-bucket/a", headers=OCTETS | secret, content=b"second")
        fork = {"stream-forked-from": "/sealed-bucket/a", "stream-fork-offset": token(1)}
        sub = fork | {"stream-fork-sub-offset": "3"} | secret
        assert (await web.put("/sealed-bucket/b", headers=sub)).status_code == 201
    async with both_faces(tmp_path) as (_, web):
        read = await web.get("/sealed-bucket/b", headers=secret)
        assert read.content == b"first sec"
        assert read.headers["cache-control"] == "no-store"
        assert (await web.get("/sealed-bucket/b")).status_code == 400
        wrong = {"s2-encryption-key": key.replace("AAEC", "BBEC")}
        assert (await web.get("/sealed-bucket/b", headers=wrong)).status_code in (400, 403)
        assert (await web.post("/sealed-bucket/a", headers=OCTETS, content=b"x")).status_code == 400
