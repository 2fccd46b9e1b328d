"""The saver passes LangGraph's own conformance suite with every capability."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from itertools import count

from langgraph.checkpoint.conformance import checkpointer_test, validate

from streamfold.server.main import Server
from streamfold_langgraph import StreamfoldSaver


async def test_every_capability_of_langgraphs_suite_passes(server: Server, endpoint: str) -> None:
    numbers = count()

    async def saver_on_an_empty_basin() -> AsyncGenerator[StreamfoldSaver, None]:
        basin = f"conformance-{next(numbers)}"
        await server.store.create_basin(basin)
        async with StreamfoldSaver.connect(endpoint, basin=basin) as saver:
            yield saver

    registered = checkpointer_test(name="StreamfoldSaver")(saver_on_an_empty_basin)
    results = (await validate(registered)).results

    assert {name: result.failures for name, result in results.items() if result.failures} == {}
    assert {name: result.tests_passed for name, result in results.items()} == {
        "put": 17,
        "put_writes": 10,
        "get_tuple": 10,
        "list": 16,
        "delete_thread": 5,
        "delete_for_runs": 7,
        "copy_thread": 8,
        "prune": 8,
    }
