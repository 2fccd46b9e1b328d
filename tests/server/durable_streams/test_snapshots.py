"""Publishing, redirecting to, reading and listing snapshots, with the documented order of checks."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from blake3 import blake3

from streamfold.server.main import running_server
from streamfold.store.settings import StoreSettings
from tests.server.conftest import configuration
from tests.server.durable_streams.conftest import JSON, OCTETS, browsing, token

JSON_STREAM, BYTE_STREAM = "/v1/stream/app/json", "/shop-bucket/bytes"


def digest_of(content_type: str, blob: bytes) -> str:
    prefix = len(content_type).to_bytes(8, "little") + content_type.encode()
    return str(blake3(prefix + blob).hexdigest())


@pytest.fixture
async def stream(web: httpx.AsyncClient) -> str:
    """A JSON stream with the messages 0 to 4."""
    assert (await web.put(JSON_STREAM, headers=JSON, content=b"[0,1,2,3,4]")).status_code == 201
    return JSON_STREAM


@pytest.fixture
async def byte_stream(web: httpx.AsyncClient) -> str:
    """A byte stream with an append of three records, and one of a single record."""
    await web.put(BYTE_STREAM, headers=OCTETS)
    for body in (b"x" * 2_500_000, b"end"):
        assert (await web.post(BYTE_STREAM, headers=OCTETS, content=body)).status_code == 204
    return BYTE_STREAM


async def publish(
    web: httpx.AsyncClient, stream: str, position: str, blob: bytes = b"state", **headers: str
) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await web.put(f"{stream}/snapshot/{position}", content=blob, headers=named)


async def test_a_published_snapshot_is_read_with_its_type_and_digest(
    web: httpx.AsyncClient, stream: str
) -> None:
    kind = "application/x.state; v=1"
    published = await publish(web, stream, token(3), b"the state", content_type=kind)
    assert published.status_code == 204
    digest = digest_of(kind, b"the state")
    assert published.headers["stream-snapshot-offset"] == token(3)
    assert published.headers["stream-snapshot-digest"] == digest
    read = await web.get(f"{stream}/snapshot/{token(3)}")
    assert (read.status_code, read.content) == (200, b"the state")
    assert read.headers["content-type"] == kind
    assert read.headers["stream-snapshot-digest"] == digest
    assert read.headers["stream-next-offset"] == token(3)
    assert read.headers["x-content-type-options"] == "nosniff"
    assert "stream-up-to-date" not in read.headers


async def test_a_snapshot_at_the_tail_is_up_to_date_and_an_empty_one_is_fine(
    web: httpx.AsyncClient, stream: str
) -> None:
    assert (await publish(web, stream, token(5), b"")).status_code == 204
    read = await web.get(f"{stream}/snapshot/{token(5)}")
    assert (read.status_code, read.content) == (200, b"")
    assert read.headers["stream-up-to-date"] == "true"
    assert read.headers["content-type"] == "application/octet-stream"


async def test_a_position_may_be_a_plain_number(web: httpx.AsyncClient, stream: str) -> None:
    assert (await publish(web, stream, "3")).headers["stream-snapshot-offset"] == token(3)
    assert (await web.get(f"{stream}/snapshot/3")).content == b"state"


async def test_the_newest_snapshot_is_led_to(web: httpx.AsyncClient, stream: str) -> None:
    assert (await web.get(f"{stream}/snapshot")).status_code == 404
    await publish(web, stream, token(2), b"two")
    await publish(web, stream, token(4), b"four")
    led = await web.get(f"{stream}/snapshot")
    assert led.status_code == 307
    assert led.headers["location"] == f"{web.base_url}{stream}/snapshot/{token(4)}"
    assert led.headers["cache-control"] == "no-store"
    assert (await web.get(led.headers["location"])).content == b"four"


async def test_head_shows_the_newest_snapshot(web: httpx.AsyncClient, stream: str) -> None:
    assert "stream-snapshot-offset" not in (await web.head(stream)).headers
    digest = (await publish(web, stream, token(2))).headers["stream-snapshot-digest"]
    head = await web.head(stream)
    assert head.headers["stream-snapshot-offset"] == token(2)
    assert head.headers["stream-snapshot-digest"] == digest
    assert head.headers["stream-retained-offset"] == token(0)


async def test_snapshots_are_listed_newest_first(web: httpx.AsyncClient, stream: str) -> None:
    assert (await web.get(f"{stream}/snapshots")).json() == {"snapshots": []}
    await publish(web, stream, token(1), b"one", content_type="text/plain")
    await publish(web, stream, token(3), b"three")
    items = (await web.get(f"{stream}/snapshots")).json()["snapshots"]
    assert [(item["offset"], item["size_bytes"]) for item in items] == [
        (token(3), 5),
        (token(1), 3),
    ]
    assert items[1]["content_type"] == items[1]["snapshot_content_type"] == "text/plain"
    assert items[1]["digest"] == digest_of("text/plain", b"one")


async def test_only_the_newest_sixteen_are_kept(web: httpx.AsyncClient) -> None:
    await web.put(JSON_STREAM, headers=JSON, content=str(list(range(20))).encode())
    for position in range(1, 20):
        assert (await publish(web, JSON_STREAM, str(position))).status_code == 204
    items = (await web.get(f"{JSON_STREAM}/snapshots")).json()["snapshots"]
    assert [item["offset"] for item in items] == [token(at) for at in range(19, 3, -1)]
    assert (await web.get(f"{JSON_STREAM}/snapshot/3")).status_code == 404
    assert (await web.get(f"{JSON_STREAM}/snapshot/4")).content == b"state"


async def test_the_same_snapshot_again_changes_nothing(web: httpx.AsyncClient, stream: str) -> None:
    first = await publish(web, stream, token(3))
    again = await publish(web, stream, token(3))
    assert again.status_code == 204
    assert again.headers["stream-snapshot-digest"] == first.headers["stream-snapshot-digest"]
    assert len((await web.get(f"{stream}/snapshots")).json()["snapshots"]) == 1


@pytest.mark.parametrize(
    ("blob", "headers"),
    [(b"other", {}), (b"state", {"content_type": "text/plain"})],
    ids=["other bytes", "another type"],
)
async def test_a_snapshot_is_never_replaced_by_another(
    web: httpx.AsyncClient, stream: str, blob: bytes, headers: dict[str, str]
) -> None:
    await publish(web, stream, token(3))
    refused = await publish(web, stream, token(3), blob, **headers)
    assert (refused.status_code, refused.json()["code"]) == (409, "snapshot_conflict")
    assert (await web.get(f"{stream}/snapshot/3")).content == b"state"


async def test_publishing_may_depend_on_the_newest_snapshot(
    web: httpx.AsyncClient, stream: str
) -> None:
    refused = await publish(web, stream, token(1), stream_snapshot_match="0" * 64)
    assert refused.status_code == 409  # there is none
    digest = (await publish(web, stream, token(1))).headers["stream-snapshot-digest"]
    refused = await publish(web, stream, token(2), stream_snapshot_match="0" * 64)
    assert (refused.status_code, refused.json()["code"]) == (409, "snapshot_conflict")
    assert (await publish(web, stream, token(2), stream_snapshot_match=digest)).status_code == 204


@pytest.mark.parametrize(
    "position", ["-1", "now", "x", "1.5", "1_0", "%20", "18446744073709551616"]
)
async def test_a_position_that_is_none_is_refused(
    web: httpx.AsyncClient, stream: str, position: str
) -> None:
    for method, part in (("PUT", "snapshot"), ("GET", "snapshot"), ("PUT", "retention")):
        refused = await web.request(method, f"{stream}/{part}/{position}", content=b"")
        assert refused.status_code == 400, (method, part, refused.text)


async def test_refusals_come_in_the_documented_order(web: httpx.AsyncClient, stream: str) -> None:
    wrong = "0" * 64
    assert (await publish(web, "/v1/stream/none", "-1")).status_code == 400
    assert (await publish(web, "/v1/stream/none", "0")).status_code == 404
    await publish(web, stream, "2")
    await web.put(f"{stream}/retention/2")
    gone = await publish(
        web, stream, "1", stream_snapshot_match=wrong
    )  # also older than the newest, and no match
    assert (gone.status_code, gone.headers["stream-next-offset"]) == (410, token(2))
    await publish(web, stream, "4", b"four")
    beyond = await publish(
        web, stream, "6", stream_snapshot_match=wrong
    )  # a match is not looked at then
    assert (beyond.status_code, "ends at 5" in beyond.text) == (409, True)
    unmatched = await publish(
        web, stream, "3", stream_snapshot_match=wrong
    )  # nor is the position of a snapshot
    assert (unmatched.status_code, "not 000" in unmatched.text) == (409, True)
    older = await publish(web, stream, "3")
    assert (older.status_code, "newer snapshot" in older.text) == (409, True)


async def test_in_a_byte_stream_a_snapshot_stands_where_an_append_ends(
    web: httpx.AsyncClient, byte_stream: str
) -> None:
    tail = (await web.head(byte_stream)).headers["stream-next-offset"]
    assert tail == token(4)
    for position in (1, 2):
        refused = await publish(web, byte_stream, str(position))
        assert (refused.status_code, refused.json()["code"]) == (400, "invalid")
    for position in (0, 3, 4):
        assert (await publish(web, byte_stream, str(position))).status_code == 204


async def test_in_a_json_stream_a_snapshot_stands_after_any_message(
    web: httpx.AsyncClient, stream: str
) -> None:
    for position in range(6):
        assert (await publish(web, stream, str(position))).status_code == 204


async def test_a_snapshot_cannot_be_deleted(web: httpx.AsyncClient, stream: str) -> None:
    await publish(web, stream, "1", b"one")
    await publish(web, stream, "2", b"two")
    for position, status in (("2", 409), ("1", 404), ("3", 404), ("x", 400)):
        refused = await web.delete(f"{stream}/snapshot/{position}")
        assert refused.status_code == status, refused.text
    assert (await web.get(f"{stream}/snapshot/2")).content == b"two"
    name = quote(stream.removeprefix("/v1/stream/"), safe="")
    basin = {"s2-basin": "durable-streams"}
    for position, status in (("2", 409), ("1", 404), ("3", 404)):
        refused = await web.delete(f"/v1/streams/{name}/snapshot/{position}", headers=basin)
        assert refused.status_code == status, refused.text


async def test_publishing_alone_trims_nothing(web: httpx.AsyncClient, stream: str) -> None:
    await publish(web, stream, "3")
    assert (await web.get(stream)).json() == [0, 1, 2, 3, 4]


async def first_kept(web: httpx.AsyncClient, stream: str) -> str:
    head = await web.head(stream)
    return str(head.headers["stream-retained-offset"])


async def configure(web: httpx.AsyncClient, stream: str, trims: bool | None) -> httpx.Response:
    """Set trim_on_snapshot through the S2 API."""
    change = {"trim_on_snapshot": trims}
    return await web.patch(
        f"/v1/streams/{stream}", json=change, headers={"s2-basin": "durable-streams"}
    )


async def test_an_existing_stream_can_be_configured_to_trim_on_snapshots(
    web: httpx.AsyncClient, stream: str
) -> None:
    await publish(web, stream, "1", b"one")
    assert await first_kept(web, stream) == token(0)
    changed = await configure(web, "app%2Fjson", True)
    assert (changed.status_code, changed.json()["trim_on_snapshot"]) == (200, True)
    await publish(web, stream, "2", b"two")
    assert await first_kept(web, stream) == token(2)
    assert (await configure(web, "app%2Fjson", False)).json()["trim_on_snapshot"] is False
    await publish(web, stream, "3", b"three")
    assert await first_kept(web, stream) == token(2)
    assert "trim_on_snapshot" not in (await configure(web, "app%2Fjson", None)).json()


async def test_a_stream_that_s2_created_lets_snapshots_trim_if_it_says_so(
    web: httpx.AsyncClient,
) -> None:
    within = {"s2-basin": "durable-streams"}
    await web.put(JSON_STREAM, headers=JSON)  # makes the basin
    config = {"stream": "s2-made", "config": {"trim_on_snapshot": True}}
    assert (await web.post("/v1/streams", json=config, headers=within)).status_code == 201
    records = {"records": [{"body": "a"}, {"body": "b"}, {"body": "c"}]}
    await web.post("/v1/streams/s2-made/records", json=records, headers=within)
    await web.put("/v1/streams/s2-made/snapshot/2", content=b"state", headers=within)
    left = await web.get("/v1/streams/s2-made/records?seq_num=0", headers=within)
    assert [record["seq_num"] for record in left.json()["records"]] == [2]
    shown = await web.get("/v1/streams/s2-made", headers=within)
    assert shown.json()["trim_on_snapshot"] is True


async def test_a_single_snapshot_may_trim_or_not_whatever_its_stream_says(
    web: httpx.AsyncClient, stream: str
) -> None:
    await publish(web, stream, "2", b"two", stream_trim_on_snapshot="true")
    assert await first_kept(web, stream) == token(2)
    await configure(web, "app%2Fjson", True)
    await publish(web, stream, "4", b"four", stream_trim_on_snapshot="false")
    assert await first_kept(web, stream) == token(2)
    await publish(web, stream, "4", b"four")  # the same again: now it trims
    assert await first_kept(web, stream) == token(4)
    bad = await publish(web, stream, "5", b"five", stream_trim_on_snapshot="perhaps")
    assert bad.status_code == 400


async def test_a_server_may_let_all_snapshots_trim_but_those_of_streams_that_say_no() -> None:
    settings = configuration(store=StoreSettings(trim_on_snapshot=True))
    async with running_server(settings) as server, browsing(server) as web:
        await web.put("/v1/stream/plain", headers=JSON, content=b"[0,1,2]")
        no = JSON | {"stream-trim-on-snapshot": "false"}
        await web.put("/v1/stream/kept", headers=no, content=b"[0,1,2]")
        for stream in ("/v1/stream/plain", "/v1/stream/kept"):
            await publish(web, stream, "2")
        assert await first_kept(web, "/v1/stream/plain") == token(2)
        assert await first_kept(web, "/v1/stream/kept") == token(0)


async def test_a_stream_may_let_snapshots_trim(web: httpx.AsyncClient) -> None:
    headers = JSON | {"stream-trim-on-snapshot": "true"}
    await web.put(JSON_STREAM, headers=headers, content=b"[0,1,2]")
    await publish(web, JSON_STREAM, "1", b"one")
    await publish(web, JSON_STREAM, "2", b"two")
    assert (await web.get(JSON_STREAM)).status_code == 410
    assert (await web.head(JSON_STREAM)).headers["stream-retained-offset"] == token(2)
    assert (await web.get(JSON_STREAM, params={"offset": token(2)})).json() == [2]
    items = (await web.get(f"{JSON_STREAM}/snapshots")).json()["snapshots"]
    assert [item["offset"] for item in items] == [token(2)]
    assert (await web.put(JSON_STREAM, headers=headers)).status_code == 200
    assert (await web.put(JSON_STREAM, headers=JSON)).status_code == 409


async def test_snapshots_do_not_outlive_their_stream(web: httpx.AsyncClient, stream: str) -> None:
    await publish(web, stream, "3")
    assert (await web.delete(stream)).status_code == 204
    assert (await web.get(f"{stream}/snapshot/3")).status_code == 404
    await web.put(stream, headers=JSON, content=b"[0,1,2,3]")
    assert (await web.get(f"{stream}/snapshot")).status_code == 404
    assert (await web.get(f"{stream}/snapshots")).json() == {"snapshots": []}


@pytest.mark.parametrize("flipped", [0, 1 << 20, (5 << 19) - 1], ids=["first", "middle", "last"])
async def test_a_damaged_snapshot_never_arrives_whole(tmp_path: Path, flipped: int) -> None:
    state = bytes(5 << 19)  # two pieces and a half
    async with (
        running_server(configuration(location=tmp_path.as_uri())) as server,
        browsing(server) as web,
    ):
        await web.put(JSON_STREAM, headers=JSON, content=b"[0]")
        assert (await publish(web, JSON_STREAM, token(1), state)).status_code == 204
        assert (await web.get(f"{JSON_STREAM}/snapshot/{token(1)}")).content == state
        (blob,) = (tmp_path / "snapshots").glob("*/*-*")
        blob.write_bytes(state[:flipped] + b"\1" + state[flipped + 1 :])
        for path in (f"snapshot/{token(1)}", "bootstrap"):
            with pytest.raises(httpx.RemoteProtocolError):
                await web.get(f"{JSON_STREAM}/{path}")
