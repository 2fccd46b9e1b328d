"""A commit's contents are built without blocking the event loop."""

from __future__ import annotations

from threading import get_ident

import pytest

from streamfold.store.catalog.documents import DOCUMENT_MAX
from streamfold.store.engine.engine import Op, WriteBatch
from tests.store.conftest import Bench


async def test_large_rows_are_copied_in_a_thread(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench.store() as store:
        prepare, threads = bench.engine.prepare, dict[int, int]()

        def watched(ops: list[Op]) -> WriteBatch:
            threads[max(len(value or b"") for _, value in ops)] = get_ident()
            return prepare(ops)

        monkeypatch.setattr(bench.engine, "prepare", watched)
        for size in (1_000, DOCUMENT_MAX):
            await store.documents.put("kind", "id", bytes(size))
        assert await store.documents.get("kind", "id") == bytes(DOCUMENT_MAX)
    assert threads[1_000] == get_ident()
    assert threads[DOCUMENT_MAX] != get_ident()
