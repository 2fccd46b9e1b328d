"""The published examples of snapshots, retention and bootstrap over HTTP, by curl."""

from __future__ import annotations

import re

import pytest

from tests.server.curl import Response, curl

OCTETS = "application/octet-stream"


def offset(seq_num: int) -> str:
    return f"{seq_num:016d}_{0:016d}"


async def request(method: str, url: str, body: bytes = b"", *headers: str) -> Response:
    given = [word for header in headers for word in ("-H", header)]
    sent = ["--data-binary", "@-"] if method in ("PUT", "POST") else []
    return await curl("-X", method, *given, *sent, url, stdin=body)


@pytest.fixture
async def stream(endpoint: str, request: pytest.FixtureRequest) -> str:
    """A stream of text with four records."""
    return await make(endpoint, re.sub(r"\W", "-", request.node.name))


async def make(endpoint: str, name: str, *headers: str) -> str:
    url = f"{endpoint}/orders-bucket/{name}"
    made = await request("PUT", url, b"", "content-type: text/plain", *headers)
    assert made.status == 201, made.body
    for body in (b"a", b"b", b"c", b"d"):
        assert (await request("POST", url, body, "content-type: text/plain")).status == 204
    return url


async def test_e19_a_snapshot_is_published_and_read(stream: str) -> None:
    published = await request(
        "PUT", f"{stream}/snapshot/{offset(2)}", b"ab", f"content-type: {OCTETS}"
    )
    assert published.status == 204, published.body
    newest = await curl("--location", f"{stream}/snapshot")
    assert b"ab" in newest.body
    read = await curl(f"{stream}/snapshot/{offset(2)}")
    assert (read.status, read.body) == (200, b"ab")


@pytest.mark.parametrize(
    ("given", "expected"),
    [(["content-type: application/json"], "application/json"), (["content-type:"], OCTETS)],
    ids=["own", "default"],
)
async def test_e19_a_snapshot_has_a_type_of_its_own(
    stream: str, given: list[str], expected: str
) -> None:
    await request("PUT", f"{stream}/snapshot/{offset(2)}", b"{}", *given)
    read = await curl(f"{stream}/snapshot/{offset(2)}")
    assert read.headers["content-type"] == expected


async def test_e20_with_trim_on_snapshot_a_snapshot_trims_what_is_before_it(endpoint: str) -> None:
    url = await make(endpoint, "trimmed", "stream-trim-on-snapshot: true")
    assert (await request("PUT", f"{url}/snapshot/{offset(3)}", b"abc")).status == 204
    gone = await curl(f"{url}?offset={offset(1)}")
    assert gone.status == 410
    assert gone.headers["stream-next-offset"] == offset(3)
    assert "/orders-bucket/trimmed/bootstrap" in gone.headers["link"]
    assert (await curl(f"{url}?offset={offset(3)}")).body == b"d"


async def test_e21_snapshots_cannot_be_deleted(stream: str) -> None:
    for number, state in ((1, b"a"), (2, b"ab")):
        assert (await request("PUT", f"{stream}/snapshot/{offset(number)}", state)).status == 204
    assert (await request("DELETE", f"{stream}/snapshot/{offset(2)}")).status == 409
    for other in (1, 3):
        assert (await request("DELETE", f"{stream}/snapshot/{offset(other)}")).status == 404


async def test_e22_bootstrap_is_the_newest_snapshot_and_all_after_it(stream: str) -> None:
    await request("PUT", f"{stream}/snapshot/{offset(2)}", b"state-of-two")
    found = await curl(f"{stream}/bootstrap")
    assert found.status == 200
    assert found.headers["content-type"].startswith("multipart/mixed")
    boundary = found.headers["content-type"].partition("boundary=")[2].strip('"').encode()
    parts = found.body.split(b"--" + boundary)
    bodies = [part.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n") for part in parts[1:-1]]
    assert bodies == [b"state-of-two", b"c", b"d"]
