"""Bootstrap: the newest snapshot and later records in one response, with its end."""

from __future__ import annotations

import email
import email.policy
import json
from itertools import count

import httpx
from s2_sdk import AppendInput, Record

from streamfold.server.main import Server
from tests.server.conftest import sdk
from tests.server.durable_streams.conftest import JSON, OCTETS, token

STREAM = "/v1/stream/app/state"


def parts_of(response: httpx.Response) -> list[tuple[str, bytes]]:
    """Types and bytes of the parts, as the parser of the standard library finds them."""
    head = b"Content-Type: " + response.headers["content-type"].encode() + b"\r\n\r\n"
    message = email.message_from_bytes(head + response.content, policy=email.policy.HTTP)
    assert not message.defects
    found = []
    for part in message.iter_parts():
        assert list(part.keys()) == ["Content-Type"]
        body = part.get_payload(decode=True)
        assert isinstance(body, bytes)
        found.append((str(part["Content-Type"]), body))
    return found


async def test_an_empty_stream_gives_one_empty_part(web: httpx.AsyncClient) -> None:
    await web.put(STREAM, headers=JSON)
    answer = await web.get(f"{STREAM}/bootstrap")
    assert answer.status_code == 200
    assert answer.headers["stream-snapshot-offset"] == "-1"
    assert answer.headers["stream-next-offset"] == token(0)
    assert answer.headers["stream-up-to-date"] == "true"
    assert answer.headers["cache-control"] == "no-store"
    assert parts_of(answer) == [("application/octet-stream", b"")]


async def test_it_brings_the_snapshot_and_every_message_after_it(web: httpx.AsyncClient) -> None:
    await web.put(STREAM, headers=JSON, content=b'[{"n":0},{"n":1},{"n":2}]')
    await web.put(f"{STREAM}/snapshot/1", content=b"old")
    published = await web.put(
        f"{STREAM}/snapshot/2", content=b"new\r\nstate\x00", headers={"content-type": "image/x"}
    )
    await web.post(STREAM, headers=JSON, content=b"[[3],4]")
    answer = await web.get(f"{STREAM}/bootstrap")
    assert answer.headers["stream-snapshot-offset"] == token(2)
    digest = published.headers["stream-snapshot-digest"]
    assert answer.headers["stream-snapshot-digest"] == digest
    assert answer.headers["stream-next-offset"] == token(5)
    assert answer.headers["stream-up-to-date"] == "true"
    assert parts_of(answer) == [
        ("image/x", b"new\r\nstate\x00"),
        ("application/json", b'{"n":2}'),
        ("application/json", b"[3]"),
        ("application/json", b"4"),
    ]


async def test_in_a_byte_stream_a_part_is_an_append(web: httpx.AsyncClient) -> None:
    await web.put("/bucket/bytes", headers=OCTETS)
    appends = [b"first", b"\r\n--not-a-boundary\r\n", b"y" * 2_500_000, b""]
    for body in appends[:3]:
        await web.post("/bucket/bytes", headers=OCTETS, content=body)
    await web.post("/bucket/bytes", headers={"stream-closed": "true"})
    answer = await web.get("/bucket/bytes/bootstrap")
    assert [body for _, body in parts_of(answer)] == [b"", *appends[:3]]
    assert answer.headers["stream-closed"] == "true"


async def test_more_than_8_mib_of_updates_come_in_part_and_it_says_so(
    web: httpx.AsyncClient,
) -> None:
    await web.put(STREAM, headers=JSON)
    messages = [json.dumps({"n": n, "fill": "x" * 100_000}).encode() for n in range(150)]
    for at in range(0, len(messages), 50):
        body = b"[" + b",".join(messages[at : at + 50]) + b"]"
        assert (await web.post(STREAM, headers=JSON, content=body)).status_code == 204
    answer = await web.get(f"{STREAM}/bootstrap")
    assert "stream-up-to-date" not in answer.headers
    got = [json.loads(body)["n"] for _, body in parts_of(answer)[1:]]
    assert got == list(range(len(got)))
    assert 80 <= len(got) < 150
    following = answer.headers["stream-next-offset"]
    assert following == token(len(got))
    for _ in count():
        page = await web.get(STREAM, params={"offset": following})
        got += [message["n"] for message in page.json()]
        following = page.headers["stream-next-offset"]
        if "stream-up-to-date" in page.headers:
            break
    assert got == list(range(150))


async def test_one_append_of_more_than_8_mib_comes_whole(web: httpx.AsyncClient) -> None:
    await web.put("/bucket/large", headers=OCTETS, content=b"small")
    await web.post("/bucket/large", headers=OCTETS, content=b"z" * (12 << 20))
    for _ in range(3):
        await web.post("/bucket/large", headers=OCTETS, content=b"after" * 200_000)
    await web.put("/bucket/large/snapshot/1", content=b"one")
    answer = await web.get("/bucket/large/bootstrap")
    sizes = [len(body) for _, body in parts_of(answer)]
    assert sizes[:2] == [3, 12 << 20]
    assert "stream-up-to-date" not in answer.headers
    rest = await web.get("/bucket/large", params={"offset": answer.headers["stream-next-offset"]})
    assert sum(sizes[2:]) + len(rest.content) == 3_000_000


async def test_boundaries_cannot_be_guessed(web: httpx.AsyncClient) -> None:
    await web.put(STREAM, headers=JSON, content=b"[1]")
    kinds = {(await web.get(f"{STREAM}/bootstrap")).headers["content-type"] for _ in range(5)}
    assert len(kinds) == 5
    assert all(len(kind.partition("boundary=")[2]) >= 32 for kind in kinds)


async def test_it_is_not_live_and_needs_a_stream(web: httpx.AsyncClient) -> None:
    await web.put(STREAM, headers=JSON)
    for live in ("sse", "long-poll", "no", ""):
        assert (await web.get(f"{STREAM}/bootstrap", params={"live": live})).status_code == 400
    assert (await web.get("/v1/stream/none/bootstrap")).status_code == 404
    assert (await web.post(f"{STREAM}/bootstrap")).status_code == 405


async def test_a_parameter_that_only_contains_the_word_live_is_of_no_interest(
    web: httpx.AsyncClient,
) -> None:
    await web.put(STREAM, headers=JSON)
    assert (await web.get(f"{STREAM}/bootstrap", params={"x": "live"})).status_code == 200


async def test_after_retention_it_still_leads_to_everything(web: httpx.AsyncClient) -> None:
    await web.put(STREAM, headers=JSON, content=b"[0,1,2,3]")
    await web.put(f"{STREAM}/snapshot/3", content=b"0-2")
    await web.put(f"{STREAM}/retention/3")
    answer = await web.get(f"{STREAM}/bootstrap")
    assert [body for _, body in parts_of(answer)] == [b"0-2", b"3"]


async def test_a_mark_that_another_protocol_left_at_the_tail_hides_no_record(
    durable: Server, web: httpx.AsyncClient
) -> None:
    await web.put("/v1/stream/marked", headers=OCTETS, content=b"one")
    async with sdk(durable) as s2:
        stream = s2.basin("durable-streams").stream("marked")
        record = Record(b"two", headers=[(b"ds-more", b"")])
        await stream.append(AppendInput([record]))
    answer = await web.get("/v1/stream/marked/bootstrap")
    assert [body for _, body in parts_of(answer)] == [b"", b"one", b"two"]
    assert answer.headers["stream-next-offset"] == token(2)
