"""Any sequence of calls leaves a store equal to a dict."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamfold.blob import BlobStore, LocalBlobStore, open_blob_store
from streamfold.errors import BlobExistsError, BlobNotFoundError
from streamfold.testing.blob_kit import STALE, swap

KEYS = st.sampled_from(["a", "a-", "b/c", "b/c-d", "b/d/e", "b/d.", "b0"])
DATA = st.binary(max_size=20)
PREFIXES = st.sampled_from(["", "a", "b", "b/", "b/c", "b/d", "b/d/", "c"])
CALLS = st.one_of(
    st.tuples(st.just("put"), KEYS, DATA),
    st.tuples(st.just("put_if_absent"), KEYS, DATA),
    st.tuples(st.just("put_if_match"), KEYS, DATA),
    st.tuples(st.just("delete"), KEYS, st.just(b"")),
    st.tuples(st.just("get"), KEYS, st.just(b"")),
    st.tuples(st.just("list"), PREFIXES, st.just(b"")),
)
Steps = list[tuple[str, str, bytes]]


async def follow(store: BlobStore, steps: Steps) -> None:
    model: dict[str, bytes] = {}
    for call, key, data in steps:
        await check(store, model, call, key, data)
    async for meta in store.list():
        assert await store.get(meta.key) == model.pop(meta.key)
    assert model == {}


async def check(
    store: BlobStore, model: dict[str, bytes], call: str, key: str, data: bytes
) -> None:
    if call == "list":
        found = [(meta.key, meta.size) async for meta in store.list(key)]
        assert found == [(k, len(model[k])) for k in sorted(model) if k.startswith(key)]
    elif call == "get" and key not in model:
        with pytest.raises(BlobNotFoundError):
            await store.get(key)
    elif call == "get":
        assert await store.get(key) == model[key]
    elif call == "delete":
        await store.delete(key)
        model.pop(key, None)
    elif call == "put_if_match" and key not in model:
        with pytest.raises(BlobNotFoundError):
            await store.put_if_match(key, data, STALE)
    elif call == "put_if_match":
        etag = await swap(store, key, data)
        assert await store.get_with_etag(key) == (data, etag)
        model[key] = data
    elif call == "put_if_absent" and key in model:
        with pytest.raises(BlobExistsError):
            await store.put_if_absent(key, data)
    else:
        await (store.put(key, data) if call == "put" else store.put_if_absent(key, data))
        model[key] = data


@given(st.lists(CALLS, max_size=30))
@settings(max_examples=60, deadline=None)
def test_a_memory_store_behaves_like_a_dict(steps: Steps) -> None:
    asyncio.run(follow(open_blob_store("memory:"), steps))


@given(st.lists(CALLS, max_size=30))
@settings(max_examples=40, deadline=None)
def test_a_local_store_behaves_like_a_dict(steps: Steps) -> None:
    with tempfile.TemporaryDirectory() as root:
        asyncio.run(follow(LocalBlobStore(Path(root)), steps))
