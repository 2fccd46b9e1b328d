"""Snapshots in parts: published whole or not at all, bounded while staged, read like others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from streamfold.server.main import Server, running_server
from streamfold.store.catalog.staged_parts import StagedParts
from streamfold.store.engine.disk_space import DiskSpace
from streamfold.wire.durable_streams.responses import SnapshotDigest
from tests.server.conftest import configuration
from tests.server.durable_streams.conftest import JSON, OCTETS, browsing, token
from tests.server.durable_streams.test_snapshot_size import (
    GROWTH_MAX,
    LIMIT,
    MIB,
    Peak,
    serving_from,
)

STREAM = "/v1/stream/parted"
OTHER = "/v1/stream/other"


def digest_of(*bodies: bytes, kind: str = "application/octet-stream") -> str:
    digest = SnapshotDigest(kind)
    for body in bodies:
        digest.update(body)
    return digest.hexdigest()


async def stage(web: httpx.AsyncClient, body: bytes, stream: str = STREAM) -> str:
    staged = await web.post(f"{stream}/snapshot/2/parts", content=body)
    assert staged.status_code == 201, staged.text
    return staged.headers["stream-snapshot-part"]


async def commit(
    web: httpx.AsyncClient, parts: Sequence[str], digest: str, at: int | str = 2, **more: str
) -> httpx.Response:
    headers = OCTETS | {
        "stream-snapshot-parts": str(len(parts)),
        "stream-snapshot-digest": digest,
        **{name.replace("_", "-"): value for name, value in more.items()},
    }
    content = "".join(f"{part}\n" for part in parts)
    return await web.put(f"{STREAM}/snapshot/{at}", headers=headers, content=content)


async def staged(web: httpx.AsyncClient, stream: str = STREAM) -> list[str]:
    answer = await web.get(f"{stream}/snapshot/parts")
    assert answer.status_code == 200, answer.text
    return [part["part"] for part in answer.json()["parts"]]


@pytest.fixture(autouse=True)
async def streams(web: httpx.AsyncClient) -> None:
    for stream in (STREAM, OTHER):
        assert (await web.put(stream, headers=JSON, content=b"[1,2,3]")).status_code == 201


async def test_parts_become_one_snapshot_and_a_repetition_changes_nothing(
    web: httpx.AsyncClient,
) -> None:
    bodies = [b"first ", b"", b"second"]
    parts = [await stage(web, body) for body in bodies]
    assert await staged(web) == sorted(parts)
    assert (await web.get(f"{STREAM}/snapshots")).json() == {"snapshots": []}
    digest = digest_of(*bodies)
    for _ in range(2):  # the second finds no parts any more
        published = await commit(web, parts, digest)
        assert published.status_code == 204, published.text
        assert published.headers["stream-snapshot-digest"] == digest
        assert published.headers["stream-snapshot-offset"] == token(2)
    assert (await web.get(f"{STREAM}/snapshot/2")).content == b"first second"
    assert b"first second" in (await web.get(f"{STREAM}/bootstrap")).content
    assert await staged(web) == []


async def test_a_repetition_trims_if_it_asks_for_that(web: httpx.AsyncClient) -> None:
    """A client that got no answer repeats its commit, and may decide to trim only then."""
    part, digest = await stage(web, b"state"), digest_of(b"state")
    assert (await commit(web, [part], digest)).status_code == 204
    assert (await web.get(STREAM, params={"offset": token(0)})).json() == [1, 2, 3]
    repeated = await commit(web, [part], digest, stream_trim_on_snapshot="true")
    assert repeated.status_code == 204, repeated.text
    assert (await web.get(STREAM, params={"offset": token(0)})).status_code == 410
    assert (await web.get(STREAM, params={"offset": token(2)})).json() == [3]


async def test_the_order_of_the_list_is_that_of_the_bytes(web: httpx.AsyncClient) -> None:
    second, first = await stage(web, b"second"), await stage(web, b"first ")
    wrong = await commit(web, [second, first], digest_of(b"first ", b"second"))
    assert (wrong.status_code, wrong.json()["code"]) == (400, "invalid")
    assert (await web.get(f"{STREAM}/snapshots")).json() == {"snapshots": []}
    right = await commit(web, [first, second], digest_of(b"first ", b"second"))
    assert right.status_code == 204, right.text


async def test_parts_belong_to_one_stream_and_to_no_later_one_of_its_name(
    web: httpx.AsyncClient,
) -> None:
    mine, foreign = await stage(web, b"mine"), await stage(web, b"foreign", OTHER)
    assert await staged(web, OTHER) == [foreign]
    refused = await commit(web, [mine, foreign], digest_of(b"mine", b"foreign"))
    assert refused.status_code == 400
    assert "not staged for this stream" in refused.json()["message"]
    await web.delete(STREAM)
    await web.put(STREAM, headers=JSON, content=b"[1,2,3]")
    assert await staged(web) == []
    assert (await commit(web, [mine], digest_of(b"mine"))).status_code == 400


async def test_a_refused_commit_leaves_its_parts_for_another(web: httpx.AsyncClient) -> None:
    part = await stage(web, b"state")
    digest = digest_of(b"state")
    assert (await commit(web, [part], digest, at=9)).status_code == 409
    assert (await commit(web, [part], digest, stream_snapshot_match="0" * 64)).status_code == 409
    assert (await commit(web, [part], digest_of(b"other"))).status_code == 400
    assert await staged(web) == [part]
    assert (await commit(web, [part], digest)).status_code == 204


async def test_a_commit_that_comes_too_late_is_told_the_newest_snapshot(
    web: httpx.AsyncClient,
) -> None:
    part, digest = await stage(web, b"late"), digest_of(b"late")
    newest = await web.put(f"{STREAM}/snapshot/3", headers=OCTETS, content=b"newest")
    late = await commit(web, [part], digest)
    assert late.status_code == 409
    for name in ("stream-snapshot-offset", "stream-snapshot-digest"):
        assert late.headers[name] == newest.headers[name]
    beyond = await commit(web, [part], digest, at=9)
    assert beyond.status_code == 409
    assert "stream-snapshot-offset" not in beyond.headers


async def test_malformed_commits_are_refused(web: httpx.AsyncClient) -> None:
    part, digest = await stage(web, b"state"), digest_of(b"state")
    for count, shown, content in (
        ("0", digest, ""),
        ("4097", digest, f"{part}\n"),
        ("one", digest, f"{part}\n"),
        ("1", "", f"{part}\n"),
        ("1", digest.upper(), f"{part}\n"),
        ("1", digest, part),
        ("1", digest, f"{part}\n\n"),
        ("2", digest, f"{part}\n"),
        ("2", digest, f"{part}\n{part}\n"),
        ("1", digest, f"{part}\r\n"),
        ("1", digest, "../../secret\n"),
        ("1", digest, "x" * 400_000),
    ):
        headers = {"stream-snapshot-parts": count, "stream-snapshot-digest": shown}
        refused = await web.put(f"{STREAM}/snapshot/2", headers=headers, content=content)
        assert refused.status_code == 400, (count, shown, content[:80], refused.text)
    assert await staged(web) == [part]


async def test_parts_are_discarded_all_together(web: httpx.AsyncClient) -> None:
    for body in (b"a", b"b"):
        await stage(web, body)
    kept = await stage(web, b"kept", OTHER)
    assert (await web.delete(f"{STREAM}/snapshot/parts")).status_code == 204
    assert (await staged(web), await staged(web, OTHER)) == ([], [kept])
    assert (await web.delete(f"{STREAM}/snapshot/2/parts")).status_code == 400
    for method, path in (
        ("POST", "missing/snapshot/2/parts"),
        ("GET", "missing/snapshot/parts"),
        ("DELETE", "missing/snapshot/parts"),
    ):
        assert (await web.request(method, f"/v1/stream/{path}", content=b"")).status_code == 404
    assert (await web.post(f"{STREAM}/snapshot/x/parts", content=b"part")).status_code == 400
    assert (await web.post(f"{STREAM}/snapshot/parts", content=b"part")).status_code == 400
    assert (await web.put(f"{STREAM}/snapshot/parts", content=b"part")).status_code == 405


async def test_a_stream_has_so_many_parts_and_is_told_the_limit(
    durable: Server, web: httpx.AsyncClient
) -> None:
    supervisor, room = durable.store._supervisor, DiskSpace(None, None)
    blobs = supervisor.parts._store  # the same storage, with lower limits
    supervisor.parts = StagedParts(blobs, room, durable.store._now, parts_max=2, bytes_max=100)
    await stage(web, b"x" * 10)
    await stage(web, b"x" * 10)
    full = await web.post(f"{STREAM}/snapshot/2/parts", content=b"x")
    assert (full.status_code, full.headers["ursula-max-staged-parts"]) == (429, "2")
    assert full.json()["code"] == "staged_parts_limit"
    await stage(web, b"x" * 60, OTHER)
    full = await web.post(f"{OTHER}/snapshot/2/parts", content=b"x" * 50)
    assert (full.status_code, full.headers["ursula-max-staged-bytes"]) == (429, "100")
    await stage(web, b"x" * 40, OTHER)
    await web.delete(f"{STREAM}/snapshot/parts")
    await stage(web, b"x")


async def test_the_head_of_a_stream_names_the_limits(web: httpx.AsyncClient) -> None:
    head = await web.head(STREAM)
    assert head.headers["ursula-max-snapshot-bytes"] == str(1 << 30)
    assert head.headers["ursula-max-request-bytes"] == str(32 * MIB)


async def test_the_same_parts_through_the_s2_face(web: httpx.AsyncClient) -> None:
    path, basin = "/v1/streams/parted", {"s2-basin": "durable-streams"}
    first = await web.post(f"{path}/snapshot/2/parts", headers=basin, content=b"by S2")
    part = first.headers["stream-snapshot-part"]
    listed = await web.get(f"{path}/snapshot/parts", headers=basin)
    assert [one["size_bytes"] for one in listed.json()["parts"]] == [5]
    headers = basin | {
        "stream-snapshot-parts": "1",
        "stream-snapshot-digest": digest_of(b"by S2"),
    }
    done = await web.put(f"{path}/snapshot/2", headers=headers, content=f"{part}\n")
    assert done.status_code == 204, done.text
    assert (await web.get(f"{STREAM}/snapshot/2")).content == b"by S2"
    await stage(web, b"more")
    assert (await web.delete(f"{path}/snapshot/parts", headers=basin)).status_code == 204
    assert await staged(web) == []


async def test_staged_parts_survive_a_restart(tmp_path: Path) -> None:
    location = tmp_path.as_uri()
    async with running_server(configuration(location=location)) as server, browsing(server) as web:
        await web.put(STREAM, headers=JSON, content=b"[1,2,3]")
        parts = [await stage(web, b"first "), await stage(web, b"second")]
    async with running_server(configuration(location=location)) as server, browsing(server) as web:
        published = await commit(web, parts, digest_of(b"first ", b"second"))
        assert published.status_code == 204, published.text
        assert (await web.get(f"{STREAM}/snapshot/2")).content == b"first second"
    files = [path for path in (tmp_path / "snapshots").rglob("*") if path.is_file()]
    assert len(files) == 1, "the parts are gone"


async def test_commits_of_one_stream_exclude_each_other(web: httpx.AsyncClient) -> None:
    body = bytes(8 * MIB)
    parts = [await stage(web, body) for _ in range(4)]
    digest = digest_of(*[body] * 4)
    answers = await asyncio.gather(*(commit(web, parts, digest) for _ in range(3)))
    codes = {answer.status_code for answer in answers}
    assert 204 in codes
    assert codes <= {204, 503}
    for answer in answers:
        if answer.status_code == 503:
            assert (answer.json()["code"], answer.headers["retry-after"]) == (
                "snapshot_parts_busy",
                "1",
            )
    assert (await commit(web, parts, digest)).status_code == 204


async def test_a_snapshot_above_128_mib_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    count, piece = 5, 27 * MIB
    assert count * piece > LIMIT
    bodies = [bytes([number]) * piece for number in range(count)]
    with serving_from(tmp_path) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as web:
            await web.put(STREAM, headers=JSON, content=b"[1,2,3]")
            await web.put(f"{STREAM}/snapshot/1", content=bytes(MIB))  # buffers are there now
            with Peak(server.pid) as peak:
                parts = [await stage(web, body) for body in bodies]
                published = await commit(web, parts, digest_of(*bodies))
            assert published.status_code == 204, published.text
            assert peak.growth < GROWTH_MAX, peak.growth
            with Peak(server.pid) as peak:
                for path in ("snapshot/2", "bootstrap"):
                    digest = SnapshotDigest("application/octet-stream")
                    size = 0
                    async with web.stream("GET", f"{STREAM}/{path}") as answer:
                        async for content in answer.aiter_raw():
                            size += len(content)
                            digest.update(content)
                    assert size >= count * piece
                    if path == "snapshot/2":
                        assert digest.hexdigest() == published.headers["stream-snapshot-digest"]
            assert peak.growth < GROWTH_MAX, peak.growth
