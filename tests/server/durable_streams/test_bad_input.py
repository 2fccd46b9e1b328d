"""Requests that break a rule get the protocol's status and change nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

import httpx
import pytest

from tests.server.durable_streams.conftest import JSON, OCTETS, producer, token

STREAM = "/v1/stream/app/strict"
BYTES = "/v1/stream/app/bytes"
CLOSED = "/v1/stream/app/closed"
TEXT = {"content-type": "text/plain"}


@dataclass(frozen=True)
class Bad:
    """A request, and the status that it must get."""

    name: str
    status: int
    method: str
    path: str
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


def post(
    name: str,
    status: int,
    body: bytes = b"1",
    path: str = STREAM,
    of: dict[str, str] | None = None,
    **headers: str,
) -> Bad:
    named = {key.replace("_", "-"): value for key, value in headers.items()}
    return Bad(name, status, "POST", path, {**JSON, **(of or {}), **named}, body)


def put(
    name: str, status: int, path: str = "/v1/stream/new", at: int | None = None, **headers: str
) -> Bad:
    """A creation; with `at`, a fork at that position."""
    named = {key.replace("_", "-"): value for key, value in headers.items()}
    if at is not None:
        named |= {"stream-forked-from": STREAM, "stream-fork-offset": token(at)}
    return Bad(name, status, "PUT", path, named)


def get(name: str, status: int, query: str, path: str = STREAM) -> Bad:
    return Bad(name, status, "GET", f"{path}?{query}")


def trio(name: str, epoch: int | str, seq: int | str) -> dict[str, str]:
    return {"producer-id": name, "producer-epoch": str(epoch), "producer-seq": str(seq)}


#: More messages than an append may have.
MANY = b"[" + b"1," * 3_500_000 + b"1]"
#: An offset that no stream has.
NEVER = f"{'9' * 16}_{'9' * 16}"

TABLE = [
    # Offsets
    get("empty offset", 400, "offset="),
    get("two offsets", 400, f"offset={token(0)}&offset={token(1)}"),
    get("offset with a space", 400, "offset=0%200"),
    get("offset with a comma", 400, "offset=0,0"),
    get("offset with a slash", 400, "offset=a/b"),
    get("offset that climbs", 400, "offset=../../etc"),
    get("offset with NUL", 400, "offset=0%00"),
    get("offset with CRLF", 400, "offset=0%0D%0A"),
    get("offset of another server", 400, "offset=0000000000000000_0000000000000007"),
    get("offset with a sign", 400, "offset=%2B1"),
    get("offset in other digits", 400, "offset=%D9%A1"),
    get("offset beyond the tail", 416, f"offset={token(99)}"),
    get("offset beyond the tail, live", 416, f"offset={token(99)}&live=sse"),
    get("offset beyond every stream", 416, f"offset={'9' * 16}_{'0' * 16}"),
    get("query that is not UTF-8", 400, "offset=%ff"),
    get("unknown live mode", 400, "offset=-1&live=websocket"),
    get("long-poll without offset", 400, "live=long-poll"),
    get("sse without offset", 400, "live=sse"),
    get("missing stream", 404, "offset=now", "/v1/stream/none"),
    get("missing bucket", 404, "offset=now", "/no-such-bucket/stream"),
    get("missing stream, live", 404, "offset=-1&live=sse", "/v1/stream/none"),
    # Bodies
    post("empty body", 400, b""),
    post("bad JSON", 400, b"{"),
    post("two JSON values", 400, b"1 2"),
    post("NaN", 400, b"NaN"),
    post("JSON that is not UTF-8", 400, b'"\xff"'),
    post("empty array", 400, b"[]"),
    post("nesting without end", 400, b"[" * 200_000 + b"]" * 200_000),
    post("a message of more than 1 MiB", 413, b'"' + b"x" * (1 << 20) + b'"'),
    post("more messages than an append may have", 413, MANY),
    Bad("no content type", 400, "POST", STREAM, {}, b"1"),
    Bad("another content type", 409, "POST", STREAM, TEXT, b"1"),
    post("missing stream", 404, path="/v1/stream/none"),
    post("compressed", 400, path=BYTES, of=OCTETS, content_encoding="gzip"),
    post("compressed in a way that nobody knows", 400, path=BYTES, of=OCTETS, content_encoding="x"),
    Bad("compressed creation", 400, "PUT", "/v1/stream/new", {"content-encoding": "zstd"}, b"x"),
    Bad("compressed snapshot", 400, "PUT", f"{BYTES}/snapshot/1", {"content-encoding": "gzip"}, b"x"),
    # Producers
    post("producer without epoch", 400, producer_id="p", producer_seq="0"),
    post("producer without seq", 400, producer_id="p", producer_epoch="0"),
    post("producer without id", 400, producer_epoch="0", producer_seq="0"),
    post("producer with empty id", 400, of=trio("", 0, 0)),
    post("producer with a long id", 400, of=trio("p" * 257, 0, 0)),
    post("epoch that is not a number", 400, of=trio("p", "1e3", 0)),
    post("epoch with a sign", 400, of=trio("p", "-1", 0)),
    post("seq that is not a number", 400, of=trio("p", 0, "1abc")),
    post("seq beyond 2^53 - 1", 400, of=trio("p", 0, 2**53)),
    post("unknown producer that begins late", 409, of=trio("q", 0, 3)),
    post("gap", 409, of=trio("p", 1, 3)),
    post("stale epoch", 403, of=trio("p", 0, 0)),
    post("new epoch that begins late", 400, of=trio("p", 2, 1)),
    post("next number, bad JSON", 400, b"{", of=trio("p", 1, 2)),
    post("next number, wrong order", 409, stream_seq="a", of=trio("p", 1, 2)),
    Bad("next number, other type", 409, "POST", STREAM, TEXT | producer("p", 1, 2), b"1"),
    # Order of writers
    post("same Stream-Seq", 409, stream_seq="m"),
    post("lower Stream-Seq", 409, stream_seq="M"),
    post("empty Stream-Seq", 400, stream_seq=""),
    post("long Stream-Seq", 400, stream_seq="z" * 257),
    # Closed streams
    post("append to a closed stream", 409, path=CLOSED),
    post("append and close a closed stream", 409, path=CLOSED, stream_closed="true"),
    post("producer on a closed stream", 409, path=CLOSED, of=trio("p", 0, 0)),
    post("producer closes a closed stream", 409, b"", CLOSED, stream_closed="true", of=trio("p", 0, 0)),
    put("open again", 409, CLOSED, content_type="application/json"),
    put("close by PUT", 409, STREAM, content_type="application/json", stream_closed="true"),
    # Creation
    put("two lifetimes", 400, stream_ttl="1", stream_expires_at="2040-01-01T00:00:00Z"),
    put("ttl with leading zero", 400, stream_ttl="01"),
    put("ttl with sign", 400, stream_ttl="+1"),
    put("ttl with fraction", 400, stream_ttl="1.0"),
    put("ttl with exponent", 400, stream_ttl="1e3"),
    put("expiry without zone", 400, stream_expires_at="2040-01-01T00:00:00"),
    put("expiry that is not a date", 400, stream_expires_at="2040-02-30T00:00:00Z"),
    put("another ttl", 409, STREAM, content_type="application/json", stream_ttl="5"),
    put("another type", 409, STREAM, content_type="text/plain"),
    put("trim-on-snapshot that is neither", 400, stream_trim_on_snapshot="maybe"),
    put("content type without end", 400, content_type="a/" + "b" * 300),
    Bad("JSON stream with bad first content", 400, "PUT", "/v1/stream/new", JSON, b"{"),
    Bad("more first messages than fit", 413, "PUT", "/v1/stream/new", JSON, MANY),
    # Forks
    put("fork of nothing", 404, stream_forked_from="/v1/stream/none"),
    put("fork of an invalid path", 404, stream_forked_from="nonsense"),
    put("fork of a part", 404, stream_forked_from=f"{STREAM}/snapshot"),
    put("fork into another bucket", 400, stream_forked_from="/other-bucket/x"),
    put("fork beyond the tail", 400, stream_forked_from=STREAM, stream_fork_offset=NEVER),
    put("fork at a malformed offset", 400, stream_forked_from=STREAM, stream_fork_offset="abc"),
    put("fork with another type", 409, stream_forked_from=STREAM, content_type="text/plain"),
    put("fork offset without fork", 400, stream_fork_offset=token(0)),
    put("sub-offset without fork", 400, stream_fork_sub_offset="0"),
    put("negative sub-offset", 400, at=0, stream_fork_sub_offset="-1"),
    put("sub-offset past the append", 400, at=0, stream_fork_sub_offset="2"),
    put("sub-offset at the tail", 400, stream_forked_from=STREAM, stream_fork_sub_offset="1"),
    # Names and methods
    put("control name", 404, "/v1/stream/__ds/x"),
    put("name of a part", 400, "/v1/stream/snapshot"),
    put("name that climbs", 400, "/v1/stream/a/%2E%2E/b"),
    put("name that is not UTF-8", 400, "/v1/stream/%ff"),
    put("name without end", 400, "/v1/stream/" + "a" * 600),
    put("empty name", 400, "/v1/stream/"),
    put("short bucket", 400, "/abc/stream"),
    put("bucket in upper case", 400, "/Bucket/stream"),
    put("reserved bucket", 400, "/__reserved/stream"),
    Bad("unknown method", 405, "PATCH", STREAM),
    Bad("bucket that is not there", 404, "GET", "/some-bucket"),
    Bad("bucket cannot be deleted", 405, "DELETE", "/some-bucket"),
    Bad("snapshots cannot be posted", 405, "POST", f"{STREAM}/snapshot/1"),
]  # fmt: skip


async def state(web: httpx.AsyncClient) -> object:
    """Everything that a client can see of the three streams, and that the fourth is not there."""
    seen: list[object] = []
    for path in (STREAM, BYTES, CLOSED):
        read, head = await web.get(path), await web.head(path)
        seen += [read.content, *(head.headers.get(name) for name in ("etag", "stream-next-offset"))]
    return [*seen, (await web.head("/v1/stream/new")).status_code]


@pytest.mark.timeout(300)
async def test_bad_requests_are_refused_and_change_nothing(web: httpx.AsyncClient) -> None:
    await web.put(STREAM, headers=JSON)
    first = JSON | producer("p", 1, 0) | {"stream-seq": "m"}
    assert (await web.post(STREAM, headers=first, content=b"[0]")).status_code == 200
    assert (await web.post(STREAM, headers=JSON | producer("p", 1, 1), content=b"1")).is_success
    await web.put(BYTES, headers=OCTETS, content=b"bytes")
    await web.put(CLOSED, headers=JSON | {"stream-closed": "true"}, content=b"[1]")
    before = await state(web)
    wrong = []
    for bad in TABLE:
        answer = await web.request(bad.method, bad.path, headers=bad.headers, content=bad.body)
        if answer.status_code != bad.status:
            wrong.append(f"{bad.name}: {answer.status_code}, not {bad.status}: {answer.text[:200]}")
        if answer.headers.get("x-content-type-options") != "nosniff":
            wrong.append(f"{bad.name}: without nosniff")
        if await state(web) != before:
            wrong.append(f"{bad.name}: something changed")
            before = await state(web)
    assert wrong == []
    # The producer is where it was: its next number is accepted, and only that.
    following = await web.post(STREAM, headers=JSON | producer("p", 1, 2), content=b"2")
    assert (following.status_code, following.headers["producer-seq"]) == (200, "2")
    late = await web.post(STREAM, headers=JSON | {"stream-seq": "n"}, content=b"3")
    assert late.status_code == 204
    assert (await web.get(STREAM)).json() == [0, 1, 2, 3]


async def test_a_body_that_is_not_compressed_may_say_so(web: httpx.AsyncClient) -> None:
    plain = OCTETS | {"content-encoding": "Identity"}
    assert (await web.put(BYTES, headers=plain, content=b"a")).status_code == 201
    assert (await web.post(BYTES, headers=plain, content=b"b")).status_code == 204
    close = {"content-encoding": "gzip", "stream-closed": "true"}
    assert (await web.post(BYTES, headers=close)).status_code == 204
    assert (await web.get(BYTES)).content == b"ab"


async def test_refusals_say_what_a_client_needs_to_continue(web: httpx.AsyncClient) -> None:
    await web.put(STREAM, headers=JSON)
    await web.post(STREAM, headers=JSON | producer("p", 3, 0), content=b"0")
    gap = await web.post(STREAM, headers=JSON | producer("p", 3, 5), content=b"5")
    assert gap.headers["producer-expected-seq"] == "1"
    assert gap.headers["producer-received-seq"] == "5"
    stale = await web.post(STREAM, headers=JSON | producer("p", 2, 0), content=b"0")
    assert stale.headers["producer-epoch"] == "3"
    beyond = await web.get(STREAM, params={"offset": token(9)})
    assert beyond.headers["stream-next-offset"] == token(1)
    await web.post(STREAM, headers={"stream-closed": "true"})
    closed = await web.post(STREAM, headers=JSON, content=b"1")
    assert (closed.headers["stream-closed"], closed.headers["stream-next-offset"]) == (
        "true",
        token(1),
    )


async def test_a_stream_seq_conflict_has_the_words_that_clients_look_for(
    web: httpx.AsyncClient,
) -> None:
    # The PHP client looks for "sequence conflict", the Elixir one for "sequence", both in any case.
    await web.put(STREAM, headers=JSON)
    await web.post(STREAM, headers=JSON | {"stream-seq": "b"}, content=b"0")
    repeated = await web.post(STREAM, headers=JSON | {"stream-seq": "a"}, content=b"1")
    assert repeated.status_code == 409
    assert "sequence conflict" in repeated.text


async def test_a_repetition_is_answered_with_the_highest_number(web: httpx.AsyncClient) -> None:
    await web.put(STREAM, headers=JSON)
    for seq in range(3):
        await web.post(STREAM, headers=JSON | producer("p", 0, seq), content=b"%d" % seq)
    again = await web.post(STREAM, headers=JSON | producer("p", 0, 1), content=b"other")
    assert (again.status_code, again.headers["producer-seq"]) == (204, "2")
    assert (await web.get(STREAM)).json() == [0, 1, 2]
