"""PyPI `durable-streams`, as published: its handles, blocking and not, against a server of ours."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from itertools import islice

import pytest
from durable_streams import (
    AsyncDurableStream,
    DurableStream,
    RetentionGoneError,
    SeqConflictError,
    StreamExistsError,
    StreamNotFoundError,
    stream,
)

from streamfold.server.main import running_server
from tests.interop.serving import serving
from tests.server.conftest import configuration

JSON = "application/json"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving("--host", "127.0.0.1", "--no-access-log", "--long-poll", "2") as exports:
        yield exports["S2_ACCOUNT_ENDPOINT"] + "/v1/stream/python/"


@contextmanager
def created(url: str, content_type: str = JSON) -> Iterator[DurableStream]:
    with DurableStream.create(url, content_type=content_type) as handle:
        yield handle


def test_json_is_appended_and_read_back(url: str) -> None:
    with created(url + "json") as handle:
        handle.append({"n": 1})
        last = handle.append([2, 3])
        assert handle.head().offset == last.next_offset
        assert handle.head().content_type == JSON
        with handle.stream(live=False) as response:
            assert response.read_json() == [{"n": 1}, [2, 3]]
            assert response.up_to_date
            assert response.offset == last.next_offset


def test_bytes_are_appended_and_read_back(url: str) -> None:
    with created(url + "bytes", "application/octet-stream") as handle:
        handle.append(bytes(range(256)))
        handle.append(b"\r\n")
        with handle.stream(live=False) as response:
            assert response.read_bytes() == bytes(range(256)) + b"\r\n"


def test_a_sequence_that_does_not_grow_is_refused(url: str) -> None:
    with created(url + "seq") as handle:
        handle.append(1, seq="01")
        handle.append(2, seq="02")
        for seq in ("01", "02"):
            with pytest.raises(SeqConflictError):
                handle.append(3, seq=seq)
        with handle.stream(live=False) as response:
            assert response.read_json() == [1, 2]


@pytest.mark.parametrize("live", ["long-poll", "sse"])
def test_a_live_read_continues_with_what_comes(url: str, live: str) -> None:
    with created(url + live) as handle:
        handle.append("first")
        with stream(handle.url, offset="-1", live=live) as response:
            items = response.iter_json()
            assert next(items) == "first"
            handle.append("second")
            handle.append("third")
            assert list(islice(items, 2)) == ["second", "third"]


def test_text_comes_by_server_sent_events(url: str) -> None:
    with created(url + "text", "text/plain") as handle:
        handle.append("one\ntwo")
        with stream(handle.url, offset="-1", live="sse") as response:
            assert next(response.iter_text()) == "one\ntwo"


def test_failures_have_the_names_that_the_client_gives_them(url: str) -> None:
    with created(url + "taken") as handle:
        with pytest.raises(StreamExistsError):
            DurableStream.create(handle.url, content_type="text/plain")
        handle.delete()
        with pytest.raises(StreamNotFoundError):
            handle.head()
        with pytest.raises(StreamNotFoundError):
            stream(handle.url, live=False)


def test_what_retention_took_is_gone(url: str) -> None:
    with created(url + "retained") as handle:
        handle.append(1)
        handle.append(2)
        covered = "0000000000000001_0000000000000000"
        put = handle._client.put
        assert put(f"{handle.url}/snapshot/{covered}", content=b"state").status_code == 204
        assert put(f"{handle.url}/retention/{covered}").status_code == 204
        with pytest.raises(RetentionGoneError):
            stream(handle.url, offset="-1", live=False)
        with stream(handle.url, offset=covered, live=False) as response:
            assert response.read_json() == [2]


@pytest.fixture
async def async_url() -> AsyncIterator[str]:
    async with running_server(configuration(long_poll=2.0)) as server:
        yield f"http://127.0.0.1:{server.port}/v1/stream/asynchronous/"


async def test_the_async_handle_appends_and_reads(async_url: str) -> None:
    url = async_url + "json"
    async with await AsyncDurableStream.create(url, content_type=JSON) as handle:
        await handle.append({"n": 1}, seq="a")
        await handle.append({"n": 2}, seq="b")
        with pytest.raises(SeqConflictError):
            await handle.append({"n": 3}, seq="a")
        async with handle.stream(live=False) as response:
            assert await response.read_json() == [{"n": 1}, {"n": 2}]
        assert (await handle.head()).content_type == JSON


@pytest.mark.parametrize("live", ["long-poll", "sse"])
async def test_the_async_handle_follows(async_url: str, live: str) -> None:
    async with await AsyncDurableStream.create(async_url + live, content_type=JSON) as handle:
        await handle.append("first")
        async with handle.stream(offset="-1", live=live) as response:
            items = response.iter_json()
            assert await anext(items) == "first"
            await handle.append("second")
            assert await anext(items) == "second"


async def test_the_async_handle_reads_bytes_and_deletes(async_url: str) -> None:
    url = async_url + "bytes"
    async with await AsyncDurableStream.create(url, content_type="image/png") as handle:
        await handle.append(b"\x00\xff")
        async with handle.stream(live=False) as response:
            assert await response.read_bytes() == b"\x00\xff"
        await handle.delete()
        with pytest.raises(StreamNotFoundError):
            await handle.head()
