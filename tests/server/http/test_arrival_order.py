"""Appends of one connection get their slots in the order in which their bodies have arrived.

Each is sent in one write: a body that comes 20 ms after its head counts as late, and a busy machine
may pause for that long between two writes.
"""

from __future__ import annotations

import gzip
import json

from streamfold.server.main import Server
from tests.server.conftest import BASIN, STREAM
from tests.server.frames import PATH
from tests.server.raw_h2 import H2Client

#: So many parts that it is parsed in a thread, which takes longer than to parse what follows; so few
#: bytes that it arrives at once.
LARGE = json.dumps([0] * 5_000, separators=(",", ":")).encode()


def sized(body: bytes, **headers: str) -> list[tuple[str, str]]:
    named = [(name.replace("_", "-"), value) for name, value in headers.items()]
    return [*named, ("content-length", str(len(body)))]


async def test_a_producer_may_send_on_behind_a_large_append(server: Server, h2: H2Client) -> None:
    stream = "/v1/stream/ordered"
    made = await h2.exchange("PUT", stream, sized(b"", content_type="application/json"))
    assert made.status == 201
    requests = []
    for seq, body in enumerate((LARGE, b"1", LARGE, b"2", b"3") * 4):
        producer = {"producer_id": "p", "producer_epoch": "0", "producer_seq": str(seq)}
        head = sized(body, content_type="application/json", **producer)
        requests.append(await h2.ask("POST", stream, head, body))
    answers = [await h2.whole(request) for request in requests]
    assert [answer.status for answer in answers] == [200] * 20
    tails = [answer.headers["stream-next-offset"] for answer in answers]
    assert tails == sorted(tails)
    assert tails[-1].startswith(f"{4 * 10_003:016d}")


async def test_an_append_by_s2_stays_behind_a_large_one(server: Server, h2: H2Client) -> None:
    headers = [["a", "b"]] * 20_000
    bodies = [
        gzip.compress(json.dumps({"records": [{"body": str(number), "headers": given}]}).encode())
        for number, given in enumerate((headers, [], headers, [], []))
    ]
    requests = []
    for body in bodies:
        head = sized(body, s2_basin=BASIN, content_type="application/json", content_encoding="gzip")
        requests.append(await h2.ask("POST", PATH, head, body))
    answers = [json.loads((await h2.whole(request)).body) for request in requests]
    assert [answer["start"]["seq_num"] for answer in answers] == [0, 1, 2, 3, 4]
    assert (await server.store.check_tail(BASIN, STREAM)).seq_num == 5


async def test_small_bodies_that_arrive_together_keep_their_order(
    server: Server, h2: H2Client
) -> None:
    """Whatever their sizes: each comes with its request, in the order in which they were sent."""
    bodies = [
        json.dumps({"records": [{"body": str(number) + "x" * size}]}).encode()
        for number, size in enumerate((0, 12_000, 0, 4_000, 1, 9_000, 2) * 10)
    ]
    requests = []
    for body in bodies:
        head = sized(body, s2_basin=BASIN, content_type="application/json")
        requests.append(await h2.ask("POST", PATH, head, body))
    answers = [json.loads((await h2.whole(request)).body) for request in requests]
    assert [answer["start"]["seq_num"] for answer in answers] == list(range(70))
