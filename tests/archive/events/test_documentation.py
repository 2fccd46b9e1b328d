"""The program in docs/reference/archive-events.md sends to a real queue under an assumed role."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest

from streamfold.archive import Destination
from streamfold.archive.events import decode_event
from tests.archive.events.receivers import Queue
from tests.archive.tables import changes, open_writer, rows
from tests.docs.markdown import blocks_of
from tests.s3 import S3Server, s3_client

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "archive-events.md"


async def run_block(text: str, names: dict[str, Any]) -> None:
    """Run a block as `python -m asyncio` does: it may await."""
    code = compile(text, PAGE.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    awaited = eval(code, names)
    if inspect.isawaitable(awaited):
        await awaited


async def test_the_program_of_the_page_sends_a_diff_to_its_queue(
    ambient: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.setenv(name, ambient.endpoint)
    s3_client(ambient).create_bucket(Bucket="bucket")
    writer = await open_writer(Destination.open("s3://bucket/public.users"))
    await writer.write_base(rows({}), "1041", reason="first")
    queue = Queue(ambient, fifo=True)
    [program] = [block.text for block in blocks_of(PAGE) if block.language == "python"]
    written = "https://sqs.eu-west-1.amazonaws.com/123456789012/orders.fifo"
    assert written in program
    program = program.replace(written, queue.url).replace("eu-west-1", ambient.region)
    names: dict[str, Any] = {"writer": writer, "changes": changes(("INSERT", 5, "e"))}
    await run_block(program, names)
    names["task"].cancel()
    sent = [decode_event(message["Body"]) for message in await queue.receive(2)]
    assert [(event.kind, event.to_position) for event in sent] == [
        ("snapshot", "1041"),
        ("diff", "1099"),
    ]
