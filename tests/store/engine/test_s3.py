"""The store on S3-compatible storage, and on a network that fails."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from streamfold.errors import (
    InvalidError,
    OutcomeUnknownError,
    StorageError,
    StoreRecoveringError,
    StreamDeletingError,
)
from streamfold.model.records import Record, trim_record
from streamfold.store import store as store_module
from streamfold.store.engine import location as location_module
from streamfold.store.engine.location import Location, open_location
from streamfold.store.engine.slatedb import SlateEngine
from streamfold.store.settings import StoreSettings
from streamfold.store.store import open_store
from streamfold.testing.adversary.proxy import StorageProxy, StorageWeather
from tests.s3 import S3Server, s3_client
from tests.store.crash.ledger import Event, Ledger, OutcomeUnknown, Stored
from tests.store.crash.load import STREAMS, Load, prepare
from tests.store.crash.verify import BASIN, read_all, verify

STREAM = STREAMS[0]
#: A store that does not wait long for an answer, nor for its recovery. Seconds.
IMPATIENT = StoreSettings(commit_timeout=2, recovery_timeout=0.2, trim_grace=0)
#: One that waits for its recovery, and for an answer as long as one takes on a slow machine.
PATIENT = StoreSettings(commit_timeout=5, recovery_timeout=60, trim_grace=0)
#: One whose storage answers: a commit may take long on a busy machine.
CALM = StoreSettings(recovery_timeout=60, trim_grace=0)


@pytest.fixture
def location(s3_server: S3Server, request: pytest.FixtureRequest) -> Location:
    return _location(s3_server, request, s3_server.endpoint)


@pytest.fixture
async def proxy(s3_server: S3Server) -> AsyncIterator[StorageProxy]:
    async with StorageProxy(s3_server.endpoint).running() as proxy:
        yield proxy


@pytest.fixture
def far(s3_server: S3Server, proxy: StorageProxy, request: pytest.FixtureRequest) -> Location:
    """The same location, reached through the proxy."""
    return _location(s3_server, request, proxy.endpoint)


def _location(server: S3Server, request: pytest.FixtureRequest, endpoint: str) -> Location:
    environment = {**server.environment(), "AWS_ENDPOINT_URL_S3": endpoint}
    return open_location(f"s3://{server.bucket}/{request.node.name}", environment)


async def test_records_outlive_the_store_that_took_them(location: Location) -> None:
    async with open_store(location) as store:
        await prepare(store)
        ack = await store.append(BASIN, STREAM, [Record(b"a"), Record(b"b")])
        assert (ack.start.seq_num, ack.end.seq_num) == (0, 2)
        assert [record.body for record in await read_all(store, STREAM)] == [b"a", b"b"]
    for tail in (2, 3):
        async with open_store(location) as store:
            assert (await store.check_tail(BASIN, STREAM)).seq_num == tail
            await store.append(BASIN, STREAM, [Record(b"%d" % tail)])
            bodies = [record.body for record in await read_all(store, STREAM)]
            assert bodies == [b"a", b"b", b"2", b"3"][: tail + 1]


async def test_large_chunks_are_objects_of_their_own_and_go_with_their_records(
    location: Location, s3_server: S3Server, request: pytest.FixtureRequest
) -> None:
    settings = StoreSettings(trim_grace=0, chunk_file_bytes=1000, recent_bytes=0)
    prefix = f"{request.node.name}/chunks/"

    def objects() -> int:
        found = s3_client(s3_server).list_objects_v2(Bucket=s3_server.bucket, Prefix=prefix)
        return int(found["KeyCount"])

    bodies = [bytes([number]) + bytes(range(256)) * 5 for number in range(3)]
    async with open_store(location, settings) as store:
        await prepare(store)
        for body in bodies:
            await store.append(BASIN, STREAM, [Record(body)])
        assert await asyncio.to_thread(objects) == 3
    async with open_store(location, settings) as store:
        assert [record.body for record in await read_all(store, STREAM)] == bodies
        await store.append(BASIN, STREAM, [trim_record(2)])
        await store.upkeep()
        assert await asyncio.to_thread(objects) == 1
        assert (await read_all(store, STREAM))[0].body == bodies[2]


async def test_everything_is_below_the_prefix(location: Location, s3_server: S3Server) -> None:
    async with open_store(location) as store:
        await prepare(store)
    prefix = location.path.removesuffix("db")
    listed = s3_client(s3_server).list_objects_v2(Bucket=s3_server.bucket, Prefix=prefix)
    assert listed["KeyCount"] > 0
    assert all(item["Key"].startswith(f"{location.path}/") for item in listed["Contents"])


async def test_trimmed_and_deleted_streams_stay_so(location: Location) -> None:
    async with open_store(location) as store:
        await prepare(store)
        await store.append(BASIN, STREAM, [Record(b"a"), Record(b"b"), trim_record(2)])
        await store.append(BASIN, "beta", [Record(b"x")])
        await store.delete_stream(BASIN, "beta")
        with pytest.raises(StreamDeletingError):
            await store.append(BASIN, "beta", [Record(b"y")])
        await store.upkeep()
    async with open_store(location) as store:
        assert [int(record.seq_num) for record in await read_all(store, STREAM)] == [2]
        await store.upkeep()
        await store.create_stream(BASIN, "beta")
        assert (await store.check_tail(BASIN, "beta")).seq_num == 0


async def test_a_bucket_that_does_not_exist_is_an_error(s3_server: S3Server) -> None:
    location = open_location("s3://no-such-bucket/prefix", s3_server.environment())
    with pytest.raises(StorageError, match=r"s3://no-such-bucket/prefix: .* does not exist"):
        async with open_store(location):
            pass


@pytest.mark.parametrize("url", ["s3://", "s3:///prefix"])
def test_a_location_without_bucket_is_refused(url: str) -> None:
    with pytest.raises(InvalidError, match="bucket"):
        open_location(url)


BAD_WEATHER = [StorageWeather.REFUSED, StorageWeather.SILENT, StorageWeather.ANSWERS_LOST]


@pytest.mark.parametrize("weather", BAD_WEATHER)
async def test_an_endpoint_that_goes_away_is_an_error_and_not_an_ack(
    far: Location, proxy: StorageProxy, weather: StorageWeather
) -> None:
    async with open_store(far, CALM) as store:
        await prepare(store)
        await store.append(BASIN, STREAM, [Record(b"before")])
    async with asyncio.timeout(120), open_store(far, IMPATIENT) as store:
        await proxy.turn(weather)
        with pytest.raises(OutcomeUnknownError):
            await store.append(BASIN, STREAM, [Record(b"during")])
        with pytest.raises(StoreRecoveringError):
            await store.append(BASIN, STREAM, [Record(b"never")])
        with pytest.raises(StoreRecoveringError):
            await store.check_tail(BASIN, STREAM)
        await proxy.turn(StorageWeather.CLEAR)
    async with open_store(far, CALM) as store:
        await store.append(BASIN, STREAM, [Record(b"after")])
        bodies = [record.body for record in await read_all(store, STREAM)]
    assert bodies in ([b"before", b"after"], [b"before", b"during", b"after"])


async def test_a_lost_answer_is_not_taken_for_another_writer(
    far: Location, proxy: StorageProxy
) -> None:
    """The repeated request finds the object that the first one made: still our own."""
    async with asyncio.timeout(120), open_store(far, CALM) as store:
        await prepare(store)
        for number in range(5):
            lost = asyncio.create_task(proxy.lost_answer(b"PUT", b"/wal/"))
            await proxy.turn(StorageWeather.ANSWERS_LOST)
            append = asyncio.create_task(store.append(BASIN, STREAM, [Record(b"%d" % number)]))
            await lost
            await proxy.turn(StorageWeather.CLEAR)
            assert (await append).start.seq_num == number
        bodies = [record.body for record in await read_all(store, STREAM)]
        assert bodies == [b"%d" % number for number in range(5)]


@pytest.mark.parametrize("weather", BAD_WEATHER)
async def test_the_store_recovers_without_help_with_everything_acknowledged(
    far: Location, proxy: StorageProxy, weather: StorageWeather
) -> None:
    watch = Watch()
    async with open_store(far, CALM) as store:
        await prepare(store)
    async with asyncio.timeout(300), open_store(far, PATIENT) as store:
        load = Load(store, "load", 1, watch.note)
        async with asyncio.TaskGroup() as group:
            group.create_task(load.run(writers=3))
            for _ in range(2):
                await watch.more(Stored, 20)
                await proxy.turn(weather)
                await watch.more(OutcomeUnknown, 1)
                await proxy.turn(StorageWeather.CLEAR)
            await watch.more(Stored, 20)
            load.stop()
        assert load.ended_by is None
        assert bool(proxy.answers_lost) == (weather is StorageWeather.ANSWERS_LOST)
        for event in await verify(store, watch.ledger):
            watch.ledger.apply(event)
    async with open_store(far, CALM) as store:
        await verify(store, watch.ledger)


@pytest.mark.parametrize("weather", BAD_WEATHER)
async def test_a_store_cannot_be_opened_while_its_endpoint_is_away(
    far: Location, proxy: StorageProxy, weather: StorageWeather, monkeypatch: pytest.MonkeyPatch
) -> None:
    await proxy.turn(weather)
    with monkeypatch.context() as patched:
        patched.setattr(location_module, "_ACCESS_TIMEOUT", 1.0)
        with pytest.raises(StorageError, match=r"cannot open the store at .*: cannot read"):
            async with open_store(far):
                pass
    await proxy.turn(StorageWeather.CLEAR)
    async with open_store(far) as store:
        await prepare(store)


async def test_a_start_tries_again_to_open_storage_that_fails(
    location: Location, caplog: pytest.LogCaptureFixture
) -> None:
    failures = iter([StorageError("SlateDB failed: WAL is unavailable")] * 2)

    async def open_engine() -> SlateEngine:
        for failure in failures:
            raise failure
        return await SlateEngine.open(location)

    async with open_store(location, opener=open_engine) as store:
        await prepare(store)
    assert caplog.text.count("storage cannot be opened, trying again in") == 2


async def test_a_start_gives_up_storage_that_keeps_failing(
    location: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_BUCKET_PATIENCE", 0.5)

    async def open_engine() -> SlateEngine:
        raise StorageError("SlateDB failed: WAL is unavailable")

    with pytest.raises(StorageError, match="WAL is unavailable"):
        async with open_store(location, opener=open_engine):
            pass


#: Seconds that no test takes: what ends before was answered, and not given up.
SILENCE = StoreSettings(commit_timeout=3600, recovery_timeout=60)
#: The same for a store that does not wait for its recovery.
ANSWERED = replace(SILENCE, recovery_timeout=0.2)


async def test_a_write_that_storage_denies_is_answered_before_the_timeout_for_silence(
    far: Location, proxy: StorageProxy
) -> None:
    async with asyncio.timeout(120), open_store(far, SILENCE) as store:
        await prepare(store)
        await store.append(BASIN, STREAM, [Record(b"before")])
        await proxy.turn(StorageWeather.READ_ONLY)
        with pytest.raises(OutcomeUnknownError, match=r"403 Forbidden.*AccessDenied"):
            await store.append(BASIN, STREAM, [Record(b"denied")])
        waiting = asyncio.create_task(store.append(BASIN, STREAM, [Record(b"after")]))
        await proxy.turn(StorageWeather.CLEAR)
        assert (await waiting).start.seq_num == 1
        assert [record.body for record in await read_all(store, STREAM)] == [b"before", b"after"]


async def test_calls_do_not_wait_for_storage_that_is_known_to_refuse(
    far: Location, proxy: StorageProxy
) -> None:
    async with open_store(far, CALM) as store:
        await prepare(store)
    async with asyncio.timeout(120), open_store(far, ANSWERED) as store:
        await proxy.turn(StorageWeather.READ_ONLY)
        with pytest.raises(OutcomeUnknownError):
            await store.append(BASIN, STREAM, [Record(b"denied")])
        with pytest.raises(StoreRecoveringError):
            await store.check_tail(BASIN, STREAM)  # waits for the recovery, in vain
        with pytest.raises(StoreRecoveringError, match="403 Forbidden"):
            store.check_tail(BASIN, STREAM).send(
                None
            )  # raises at its first step: it waits for nothing


async def test_a_bucket_that_is_deleted_is_an_answer_too(s3_server: S3Server) -> None:
    client = s3_client(s3_server)
    client.create_bucket(Bucket="short-lived")
    location = open_location("s3://short-lived", s3_server.environment())
    async with asyncio.timeout(120), open_store(location, SILENCE) as store:
        await prepare(store)
        _delete_bucket(client, "short-lived")
        with pytest.raises(OutcomeUnknownError, match=r"404 Not Found|NoSuchBucket"):
            await store.append(BASIN, STREAM, [Record(b"lost")])


def _delete_bucket(client: Any, bucket: str) -> None:
    while True:
        for item in client.list_objects_v2(Bucket=bucket).get("Contents", ()):
            client.delete_object(Bucket=bucket, Key=item["Key"])
        try:
            client.delete_bucket(Bucket=bucket)
        except client.exceptions.ClientError:
            continue  # SlateDB has written an object meanwhile
        return


class Watch:
    """Lets a test wait for what happens to the load."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self._seen: Counter[type[Event]] = Counter()
        self._changed = asyncio.Event()

    def note(self, event: Event) -> None:
        self.ledger.apply(event)
        self._seen[type(event)] += 1
        self._changed.set()

    async def more(self, kind: type[Event], count: int) -> None:
        """Return after so many more events of that kind."""
        target = self._seen[kind] + count
        while self._seen[kind] < target:
            self._changed.clear()
            await self._changed.wait()
