"""Failures around a saver: servers, tokens, foreign records, deleted threads, large states."""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import chain
from pathlib import Path
from typing import Annotated, TypedDict

import pytest
from langgraph.channels import DeltaChannel
from langgraph.graph import START, StateGraph
from s2_sdk import AccessTokenScope, ExactMatch, Operation, PrefixMatch
from saver_calls import config, newest, put, values
from tests.ports import free_port
from tests.server.conftest import ROOT, configuration, sdk

from streamfold import Record, connect
from streamfold.errors import (
    DataCorruptError,
    FormatUnsupportedError,
    InvalidError,
    NotFoundError,
    OutcomeUnknownError,
    PermissionDeniedError,
    RetryLaterError,
    UnauthenticatedError,
)
from streamfold.follow import Backoff, StreamClient, as_client
from streamfold.model.records import Header
from streamfold.server.main import Server, running_server
from streamfold_langgraph import StreamfoldSaver
from streamfold_langgraph.records import to_records
from streamfold_langgraph.thread import Drop


@asynccontextmanager
async def stream_of(endpoint: str, basin: str) -> AsyncIterator[StreamClient]:
    async with connect(endpoint) as s2:
        yield as_client(s2.basin(basin).stream("langgraph/shared"))


async def test_a_server_that_is_away_is_named_as_such() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    quick = Backoff(first=0.001, longest=0.002, attempts=2)
    async with StreamfoldSaver.connect(url, basin="any-basin", backoff=quick) as saver:
        with pytest.raises(RetryLaterError, match="cannot be reached"):
            await saver.aget_tuple(config())


async def test_a_saver_goes_on_when_its_server_is_back(tmp_path: Path, basin: str) -> None:
    port = free_port()
    settings = configuration(port=port, location=tmp_path.as_uri())
    quick = Backoff(first=0.001, longest=0.002, attempts=2)
    url = f"http://127.0.0.1:{port}"
    async with StreamfoldSaver.connect(url, basin=basin, backoff=quick) as saver:
        async with running_server(settings) as server:
            await server.store.create_basin(basin)
            at = await put(saver, config(), "before")
        with pytest.raises((RetryLaterError, OutcomeUnknownError)):
            await put(saver, at, "meanwhile")
        async with running_server(settings):
            await put(saver, at, "after")
            assert await values(saver) == ["after", "before"]


async def test_tokens_that_are_refused_or_do_not_suffice_are_named(
    guarded: Server, basin: str
) -> None:
    url = f"http://127.0.0.1:{guarded.port}"
    reader = AccessTokenScope(
        basins=ExactMatch(basin),
        streams=PrefixMatch("langgraph/"),
        ops=[Operation.READ, Operation.CHECK_TAIL],
    )
    async with sdk(guarded, token=ROOT) as root:
        token = await root.issue_access_token("reader", scope=reader)
        async with StreamfoldSaver.connect(url, basin=basin, token=token) as saver:
            assert await saver.aget_tuple(config()) is None
            with pytest.raises(PermissionDeniedError):
                await put(saver, config(), "first")
            async with StreamfoldSaver.connect(url, basin=basin, token=ROOT) as owner:
                await put(owner, config(), "first")
            assert await values(saver) == ["first"]
            await root.revoke_access_token("reader")  # a revoked token behaves like an expired one
            with pytest.raises(UnauthenticatedError):
                await saver.aget_tuple(config())


async def test_the_rights_that_the_guide_names_suffice(guarded: Server, basin: str) -> None:
    url = f"http://127.0.0.1:{guarded.port}"
    scope = AccessTokenScope(
        basins=ExactMatch(basin),
        streams=PrefixMatch("langgraph/"),
        ops=[
            Operation.READ,
            Operation.CHECK_TAIL,
            Operation.APPEND,
            Operation.TRIM,
            Operation.CREATE_STREAM,
            Operation.DELETE_STREAM,
            Operation.LIST_STREAMS,
        ],
    )
    async with sdk(guarded, token=ROOT) as root:
        token = await root.issue_access_token("agents", scope=scope)
    async with StreamfoldSaver.connect(url, basin=basin, token=token) as saver:
        at = await put(saver, config(), "first")
        await put(saver, at, "second")
        await saver.acopy_thread("shared", "copy")
        await saver.aprune(["shared"])
        assert [found.checkpoint["id"] async for found in saver.alist(None, limit=1)]
        await saver.adelete_thread("copy")
        assert await values(saver) == ["second"]


async def test_a_basin_that_is_missing_is_no_empty_thread(endpoint: str) -> None:
    async with StreamfoldSaver.connect(endpoint, basin="no-such-basin") as saver:
        with pytest.raises(NotFoundError, match="no-such-basin"):
            await saver.aget_tuple(config())


async def test_a_thread_id_that_no_stream_can_have_is_refused(saver: StreamfoldSaver) -> None:
    with pytest.raises(InvalidError, match="512 bytes"):
        await saver.aget_tuple(config("x" * 600))


async def test_records_of_others_are_ignored_with_one_warning(
    saver: StreamfoldSaver, other: StreamfoldSaver, endpoint: str, basin: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    at = await put(saver, config(), "first")
    async with stream_of(endpoint, basin) as stream:
        await stream.append(
            [Record(b"\xff\x00 not ours"), Record(b"", (Header(b"langgraph2", b"1"),))]
        )
    await put(saver, at, "second")
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert await values(other) == ["second", "first"]
    own = [each for each in caplog.records if each.name.startswith("streamfold_langgraph")]
    assert [each.getMessage() for each in own] == [
        "record 1 of stream langgraph/shared is not a checkpoint: it is ignored, as are others like it"
    ]


@pytest.mark.parametrize(
    ("mark", "error"),
    [
        (b"2 something new", FormatUnsupportedError),
        (b"1 of two", DataCorruptError),
        (b"\xff\xfe", FormatUnsupportedError),
        (b"1 {incarnation} e 0 0", DataCorruptError),
        (b"1 another e 0 0", DataCorruptError),
    ],
)
async def test_a_record_that_claims_to_be_a_checkpoint_and_is_none_is_never_skipped(
    mark: bytes, error: type[Exception], saver: StreamfoldSaver, endpoint: str, basin: str
) -> None:
    await put(saver, config(), "first")
    async with stream_of(endpoint, basin) as stream:
        [first] = await stream.peek(0, 1)
        incarnation = first.headers[0][1].split()[1]
        mark = mark.replace(b"{incarnation}", incarnation)
        await stream.append([Record(b"nonsense", (Header(b"langgraph", mark),))])
    for _ in range(2):
        with pytest.raises(error, match="langgraph/shared"):
            await saver.aget_tuple(config())


async def test_a_thread_that_was_deleted_and_begun_anew_elsewhere_is_read_anew(
    saver: StreamfoldSaver, other: StreamfoldSaver, server: Server
) -> None:
    at = await put(saver, config(), "old")
    await put(saver, at, "older")
    await other.adelete_thread("shared")
    assert await saver.aget_tuple(config()) is None
    await server.store.upkeep()
    at = await put(saver, config(), "new")
    await put(saver, at, "newer")
    await other.adelete_thread("shared")
    await server.store.upkeep()
    at = await put(other, config(), "newest")
    await put(other, at, "of the same length")
    assert await values(saver) == ["of the same length", "newest"]


async def test_states_above_a_record_are_stored_in_parts(
    saver: StreamfoldSaver, other: StreamfoldSaver, endpoint: str, basin: str
) -> None:
    large = random.Random(1).randbytes(3 << 20)
    at = await put(saver, config(), large)
    await put(saver, at, large + b"!")
    assert await values(other) == [large + b"!", large]
    async with stream_of(endpoint, basin) as stream:
        tail = await stream.check_tail()
        # A writer that dies between two parts leaves this: the next one starts over.
        thread = (await other.aget_tuple(config())) and other._threads["shared"].thread
        assert thread is not None
        parts = to_records(Drop({"": ["x" * (2 << 20)]}), thread.incarnation, "broken")
        assert len(parts) == 3
        await stream.append(parts[:1], match_seq_num=tail.seq_num)
    await put(other, (await newest(other)).config, "small")
    async with stream_of(endpoint, basin) as stream:
        await stream.append(parts[1:2])
    assert await values(saver) == ["small", large + b"!", large]


async def test_snapshots_replace_the_records_before_them(
    saver: StreamfoldSaver, other: StreamfoldSaver, endpoint: str, basin: str
) -> None:
    rng, at = random.Random(1), config()
    kept = [rng.randbytes(40 << 10) for _ in range(20)]
    for value in kept:
        at = await put(saver, at, value)
    assert await values(other) == kept[::-1]
    restored = other._threads["shared"]._taker
    assert restored is not None
    assert restored.state.plan.records < 12
    await saver.aprune(["shared"])
    assert await values(other) == kept[-1:]
    async with stream_of(endpoint, basin) as stream:
        assert (await stream.check_tail()).seq_num > 20
    async with StreamfoldSaver.connect(endpoint, basin=basin) as third:
        assert await values(third) == kept[-1:]
        restored = third._threads["shared"]._taker
        assert restored is not None
        assert restored.state.plan.records <= 1  # the snapshot


class Deltas(TypedDict):
    log: Annotated[
        list[str], DeltaChannel(lambda log, writes: [*log, *chain.from_iterable(writes)])
    ]


async def test_a_pruned_thread_keeps_what_its_delta_channels_are_rebuilt_from(
    saver: StreamfoldSaver,
) -> None:
    builder = StateGraph(Deltas)
    builder.add_node("note", lambda state: {"log": [f"note {len(state['log'])}"]})
    builder.add_edge(START, "note")
    app = builder.compile(checkpointer=saver)
    for _ in range(5):
        await app.ainvoke({"log": ["input"]}, config())
    before = (await app.aget_state(config())).values
    assert len(before["log"]) == 10
    await saver.aprune(["shared"])
    assert (await app.aget_state(config())).values == before


async def test_threads_beyond_the_limit_leave_memory_and_come_back(
    endpoint: str, basin: str
) -> None:
    async with StreamfoldSaver.connect(endpoint, basin=basin, open_threads=2) as saver:
        for number in range(6):
            await put(saver, config(f"t{number}"), number)
        assert list(saver._threads) == ["t4", "t5"]
        found = [found.checkpoint["channel_values"]["value"] async for found in saver.alist(None)]
        assert found == [5, 4, 3, 2, 1, 0]
