"""Opens files of an archive for a thread that reads beside an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import BinaryIO

from streamfold.archive.concurrency import finish_all
from streamfold.archive.manifest.model import Part
from streamfold.archive.read.part_files import PartFiles


class OpenFiles:
    """Opens verified files, some at a time; entered on the loop, used in a thread beside it.

    The loop closes what is still open at the end, however the thread ended.
    """

    def __init__(self, files: PartFiles) -> None:
        self._files = files
        self._held = AsyncExitStack()

    async def __aenter__(self) -> OpenFiles:
        self._loop = asyncio.get_running_loop()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._held.aclose()

    def open(self, parts: Sequence[Part]) -> list[BinaryIO]:
        """Open these concurrently, and close those of the last call; never called on the loop."""
        return asyncio.run_coroutine_threadsafe(self._open(parts), self._loop).result()

    async def _open(self, parts: Sequence[Part]) -> list[BinaryIO]:
        await self._held.aclose()
        self._held = held = AsyncExitStack()
        return await finish_all(held.enter_async_context(self._files.open(part)) for part in parts)
