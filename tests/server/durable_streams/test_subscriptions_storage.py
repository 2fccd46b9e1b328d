"""Rows written by subscription changes, and documents of earlier versions."""

from __future__ import annotations

from streamfold.store import keys
from streamfold.store.engine.engine import Op
from streamfold.store.store import open_store
from streamfold.testing.engine_faults import CommitFault
from streamfold.wire.durable_streams.offsets import format_offset
from tests.server.durable_streams.subscribing import (
    BASIN,
    Bench,
    Clock,
    append,
    create,
    read_subscription,
    serving,
)
from tests.server.durable_streams.test_subscriptions import pull
from tests.server.durable_streams.test_subscriptions_pull import of
from tests.server.durable_streams.test_subscriptions_restart import Engines, prepare, restarted

#: A subscription as earlier versions stored it: with two links in the document. The first names a
#: stream that does not exist, the second is at 1 of the stream with id 2.
OLD_DOCUMENT = (
    b"\x86\xa6config\x87\xa4type\xa9pull-wake\xa7pattern\xa8events/*\xa7streams\xc4 \xa1W\xd3js\x91\x91"
    b"\xc1\x82d\x19\xda\\\x87\xae\xdf=\xd0\xcdh(VZ\xda*8\xa6\xb6\x8e\xd7A\xe5\xa3url\xc0\xabwake_stream"
    b"\xa5wakes\xaclease_ttl_ms\xcdu0\xabdescription\xa4kept\xaacreated_at\xcf\x00\x00\x01\x9bv\xda\xa8"
    b"\x00\xa8base_url\xd9%http://127.0.0.1:46325/v1/stream/__ds\xa5links\x82\xa5named\x93\x00\xc3\xc0"
    b"\xa8events/a\x93\x01\xc2\x02\xaageneration\x01\xa4wake\x84\xa2id\xd90wake_tsJ3J-2ekeePb9moYjNnUrl"
    b"w6g2l3w6VItzqR1kgRU8\xa5token\xc4 \x14\xeb\xff\xc1@9=\xd9~yp\x08@8\xbb:i\xea\xb8c1\x03\xfb\xee"
    b"\xc2F\xcf!\xa5\xe8\x0c\xfd\xa6holder\xa8worker-1\xablease_until\xcf\x00\x00\x01\x9bv\xdb\x1d0"
)
#: Streams whose names take about 64 bytes each.
NAMES = [
    f"tenant-{number:04d}/documents-of-a-tenant/changes-of-a-document" for number in range(2000)
]


def written(commits: list[list[Op]]) -> int:
    """Bytes of the documents in some commits."""
    kinds = tuple(
        keys.document(kind, "")
        for kind in (f"ds-subscription/{BASIN}", f"ds-subscription-link/{BASIN}")
    )
    ops = [op for commit in commits for op in commit if op[0].startswith(kinds)]
    return sum(len(key) + len(value or b"") for key, value in ops)


async def names(bench: Bench) -> list[str]:
    return [link["path"] for link in (await bench.get("s"))["streams"]]


async def test_a_change_of_one_link_writes_that_link() -> None:
    engines = Engines()
    async with open_store(engines.location, opener=engines.open) as store:
        await prepare(store)
        async with serving(store, Clock()) as bench:
            assert (await bench.put("s", **pull(streams=NAMES))).is_success
            assert engines.last is not None
            before = len(engines.last.commits)
            for name in NAMES[:20]:
                gone = await bench.client.delete(f"/subscriptions/s/streams/{name}")
                assert gone.status_code == 204
            assert 0 < written(engines.last.commits[before:]) < 4_000
            before = len(engines.last.commits)
            await create(store, NAMES[50], 1)
            claimed = await bench.claim("s")
            ack = of(claimed, (NAMES[50], 1), done=True)
            assert (await bench.post("s", "ack", ack, claimed["token"])).is_success
            assert written(engines.last.commits[before:]) < 4_000
            kept = await names(bench)
    assert kept == NAMES[20:]
    async with restarted(engines, Clock()) as bench:
        assert await names(bench) == kept
        assert await bench.acked("s", NAMES[50]) == format_offset(1)


async def test_a_document_of_an_earlier_version_keeps_its_links_and_acks() -> None:
    engines, clock = Engines(), Clock()
    async with open_store(engines.location, opener=engines.open) as store:
        await prepare(store)
        await create(store, "events/a", 1, 2)
        assert (await store.stream(BASIN, "events/a").status()).id == 2
        await store.documents.put(f"ds-subscription/{BASIN}", "s", OLD_DOCUMENT)
    async with restarted(engines, clock) as bench:
        assert await names(bench) == ["events/a", "named"]
        assert await bench.acked("s", "events/a") == format_offset(1)
        assert (
            await bench.put("s", **pull(streams=["named"], description="kept"))
        ).status_code == 200
        clock.now += 60_000
        await append(bench.store, "events/a", 3)
        claimed = await bench.claim("s")
        assert claimed["generation"] > 1
        ack = of(claimed, ("events/a", 3), done=True)
        assert (await bench.post("s", "ack", ack, claimed["token"])).is_success
    async with restarted(engines, clock) as bench:
        assert await names(bench) == ["events/a", "named"]
        assert await bench.acked("s", "events/a") == format_offset(3)
        document = await bench.store.documents.get(f"ds-subscription/{BASIN}", "s")
        assert document is not None
        assert b"events/a" not in document, "links are in rows of their own by now"
        await bench.client.delete("/subscriptions/s/streams/named")
    async with restarted(engines, clock) as bench:
        assert await names(bench) == ["events/a"]


async def test_a_subscription_that_is_deleted_leaves_no_links_to_the_next_of_its_name() -> None:
    engines = Engines()
    async with open_store(engines.location, opener=engines.open) as store:
        await prepare(store)
        async with serving(store, Clock()) as bench:
            await bench.put("s", **pull(streams=["first"]))
            await bench.put("st", **pull(streams=["neighbour"]))
            assert (await bench.client.delete("/subscriptions/s")).status_code == 204
            await bench.put("s", **pull(streams=["second"]))
    async with restarted(engines, Clock()) as bench:
        assert await names(bench) == ["second"]
        neighbour = await read_subscription(bench.store, "st")
        assert neighbour is not None
        assert list(neighbour.links) == ["neighbour"]


async def test_a_change_of_unknown_outcome_is_read_back_with_its_links() -> None:
    engines = Engines()
    async with open_store(engines.location, opener=engines.open) as store:
        await prepare(store)
        async with serving(store, Clock()) as bench:
            await bench.put("s", **pull(streams=["first", "second"]))
            engines.fail_next(CommitFault.AFTER)
            unknown = await bench.client.delete("/subscriptions/s/streams/first")
            assert unknown.status_code >= 500
            assert await names(bench) == ["second"], "it had happened"
            assert (await bench.client.delete("/subscriptions/s/streams/second")).status_code == 204
    async with restarted(engines, Clock()) as bench:
        assert await names(bench) == []
