"""The REST part with curl: JSON over HTTP/1.1 and HTTP/2."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import zstandard

from streamfold.model.records import Record
from streamfold.server.main import Server
from tests.server.conftest import BASIN, STREAM
from tests.server.curl import Response, curl

JSON = ("-H", "content-type: application/json")
IN_BASIN = ("-H", f"s2-basin: {BASIN}")
TO_RECORDS = (*IN_BASIN, *JSON)
PROTO = (*IN_BASIN, "-H", "content-type: application/protobuf")
RECORDS = f"/v1/streams/{STREAM}/records"
ONE = ("-d", '{"records":[{}]}')


def url(server: Server, path: str) -> str:
    return f"http://127.0.0.1:{server.port}{path}"


async def append(server: Server, body: object, *more: str) -> Response:
    text = body if isinstance(body, str) else json.dumps(body)
    path = f"/v1/streams/{STREAM}/records"
    return await curl(url(server, path), *JSON, *IN_BASIN, "-d", text, *more)


async def read(server: Server, query: str, *more: str) -> Response:
    return await curl(url(server, f"/v1/streams/{STREAM}/records?{query}"), *IN_BASIN, *more)


@pytest.mark.parametrize("version", ["--http1.1", "--http2-prior-knowledge"])
async def test_a_first_append_and_read(server: Server, version: str) -> None:
    acked = await append(server, {"records": [{"body": "hello", "headers": [["k", "v"]]}]}, version)
    assert acked.status == 200
    assert acked.json()["start"]["seq_num"] == 0
    assert acked.json()["end"] == acked.json()["tail"]
    batch = await read(server, "seq_num=0", version)
    assert batch.headers["content-type"] == "application/json"
    (record,) = batch.json()["records"]
    assert (record["body"], record["headers"]) == ("hello", [["k", "v"]])
    tail = await curl(url(server, f"/v1/streams/{STREAM}/records/tail"), *IN_BASIN, version)
    assert tail.json() == {"tail": acked.json()["tail"]}


async def test_base64_carries_every_byte(server: Server) -> None:
    await append(server, {"records": [{"body": "AP+A"}]}, "-H", "s2-format: base64")
    batch = await read(server, "seq_num=0", "-H", "s2-format: base64")
    assert batch.json()["records"][0]["body"] == "AP+A"
    raw = await read(server, "seq_num=0")
    assert raw.json()["records"][0]["body"] == "\0\ufffd\ufffd"


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
async def test_bodies_are_compressed_both_ways(server: Server, coding: str, tmp_path: Path) -> None:
    text = json.dumps({"records": [{"body": "again " * 1000}]}).encode()
    packed = gzip.compress(text) if coding == "gzip" else zstandard.compress(text)
    (tmp_path / "body").write_bytes(packed)
    sent = await curl(
        url(server, f"/v1/streams/{STREAM}/records"), *JSON, *IN_BASIN,
        "-H", f"content-encoding: {coding}", "--data-binary", f"@{tmp_path / 'body'}",
    )  # fmt: skip
    assert sent.status == 200
    got = await read(server, "seq_num=0", "-H", f"accept-encoding: {coding}")
    assert got.headers["content-encoding"] == coding
    assert got.headers["vary"] == "accept-encoding, origin"
    inflate = gzip.decompress if coding == "gzip" else zstandard.decompress
    assert json.loads(inflate(got.body))["records"][0]["body"] == "again " * 1000


async def test_short_answers_are_not_compressed(server: Server) -> None:
    await server.store.append(BASIN, STREAM, [Record(b"short")])
    got = await read(server, "seq_num=0", "-H", "accept-encoding: gzip")
    assert "content-encoding" not in got.headers


async def test_creation_says_what_it_did(server: Server) -> None:
    create = (url(server, "/v1/basins"), *JSON, "-d", '{"basin":"curled-basin"}')
    first = await curl(*create, "-H", "s2-request-token: t1")
    assert (first.status, first.headers["s2-provision-result"]) == (201, "created")
    again = await curl(*create, "-H", "s2-request-token: t1")
    assert (again.status, again.headers["s2-provision-result"]) == (201, "noop")
    assert again.json() == first.json()
    assert (await curl(*create, "-H", "s2-request-token: t2")).status == 409
    ensured = await curl("-X", "PUT", url(server, "/v1/basins/curled-basin"))
    assert (ensured.status, ensured.headers["s2-provision-result"]) == (200, "noop")
    deleted = await curl("-X", "DELETE", url(server, "/v1/basins/curled-basin"))
    assert (deleted.status, deleted.body) == (202, b"")


async def test_a_stream_is_ensured_with_and_without_a_body(server: Server) -> None:
    path = url(server, "/v1/streams/a%2Fb%20c")
    made = await curl("-X", "PUT", path, *IN_BASIN)
    assert (made.status, made.json()["name"]) == (201, "a/b c")
    changed = await curl(
        "-X", "PUT", path, *IN_BASIN, *JSON, "-d", '{"retention_policy":{"infinite":{}}}'
    )
    assert (changed.status, changed.headers["s2-provision-result"]) == (200, "updated")
    patched = await curl("-X", "PATCH", path, *IN_BASIN, *JSON, "-d", '{"retention_policy":null}')
    assert patched.json()["retention_policy"] == {"age": 604_800}


@pytest.mark.parametrize(
    ("method", "path", "arguments", "status", "code"),
    [
        ("GET", "/v1/streams", (), 400, "bad_header"),
        ("GET", "/v1/streams", ("-H", "s2-basin: UPPER"), 400, "bad_header"),
        ("GET", "/v1/streams/orders/records?count=-1", IN_BASIN, 400, "bad_query"),
        ("GET", "/v1/streams/orders/records", (*IN_BASIN, "-H", "s2-format: hex"), 400, "bad_header"),
        ("GET", "/v1/streams/%FF/records", IN_BASIN, 400, "bad_path"),
        ("GET", "/v1/basins/x", (), 400, "bad_path"),
        ("GET", "/v1/basins?prefix=UPPER", (), 400, "bad_query"),
        ("POST", "/v1/basins", (*JSON, "-d", "{"), 400, "bad_json"),
        ("POST", "/v1/basins", ("-H", "content-type: text/plain", "-d", "{}"), 400, "bad_json"),
        ("POST", "/v1/basins", (*JSON, "-d", '{"basin":"x"}'), 400, "bad_json"),
        ("POST", RECORDS, (*TO_RECORDS, "-d", '{"records":[]}'), 422, "invalid"),
        ("POST", RECORDS, (*TO_RECORDS, "-d", '{"records":1}'), 400, "bad_json"),
        ("POST", RECORDS, (*PROTO, "-d", "zz"), 400, "bad_proto"),
        ("POST", RECORDS, (*TO_RECORDS, "-H", "content-encoding: br", *ONE), 400, "bad_header"),
        ("POST", RECORDS, (*TO_RECORDS, "-H", "content-encoding: gzip", *ONE), 400, "bad_json"),
        ("POST", RECORDS, (*TO_RECORDS, "-H", "s2-encryption-key: short", *ONE), 400, "bad_header"),
        ("POST", RECORDS, (*TO_RECORDS, "-H", "s2-stream-config: {", *ONE), 400, "bad_header"),
        ("GET", "/v1/nowhere", (), 404, "not_found"),
        ("GET", "/v1/streams/a/b/records", IN_BASIN, 404, "not_found"),
        ("DELETE", "/v1/basins", (), 405, "method_not_allowed"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_named(
    server: Server, method: str, path: str, arguments: tuple[str, ...], status: int, code: str
) -> None:
    answer = await curl("-X", method, url(server, path), *arguments)
    assert (answer.status, answer.json()["code"]) == (status, code)
    assert answer.json()["message"]
    assert answer.headers["content-type"] == "application/json"


async def test_unmet_conditions_and_unwritten_positions_have_their_own_bodies(
    server: Server,
) -> None:
    await append(server, {"records": [{"body": "x"}]})
    seq = await append(server, {"records": [{}], "match_seq_num": 5})
    assert (seq.status, seq.json()) == (412, {"seq_num_mismatch": 1})
    token = await append(server, {"records": [{}], "fencing_token": "nope"})
    assert (token.status, token.json()) == (412, {"fencing_token_mismatch": ""})
    ahead = await read(server, "seq_num=7")
    assert ahead.status == 416
    assert ahead.json()["tail"]["seq_num"] == 1
