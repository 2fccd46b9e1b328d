"""Documents in Streamfold: where they are stored, and their compaction into snapshots."""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import dataclass
from typing import Final

import httpx

from streamfold_yjs.updates import MalformedUpdateError, compacted, unframed

log = logging.getLogger(__name__)

BINARY: Final = "application/octet-stream"
#: The basin of the streams below /v1/stream.
BASIN: Final = "durable-streams"
#: Appends behind the snapshot, however small, after which a document is compacted when it is opened.
MOST_APPENDS: Final = 500
_NAME = re.compile(r"[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*")


@dataclass(frozen=True)
class Document:
    """The streams of one document, with the names that npm's own Yjs server gives them."""

    service: str
    name: str

    @property
    def path(self) -> str:
        return f"/v1/stream/{self._folder}/.updates"

    @property
    def awareness_prefix(self) -> str:
        return f"{self._folder}/.awareness/"

    def awareness(self, name: str) -> str:
        return f"/v1/stream/{self.awareness_prefix}{name}"

    @property
    def _folder(self) -> str:
        return f"yjs/{self.service}/docs/{self.name}"


def is_name(text: str) -> bool:
    """Whether a text can be part of a stream's name, with slashes between its segments."""
    return len(text) <= 256 and _NAME.fullmatch(text) is not None


@dataclass(frozen=True)
class StoredSnapshot:
    offset: str
    body: bytes


async def newest_snapshot(
    http: httpx.AsyncClient, document: Document, headers: dict[str, str]
) -> StoredSnapshot | None:
    """The newest snapshot, if there is one."""
    answer = await http.get(f"{document.path}/snapshot", headers=headers, follow_redirects=True)
    if answer.status_code in (404, 410):
        return None
    answer.raise_for_status()
    return StoredSnapshot(answer.headers["stream-snapshot-offset"], answer.content)


class Compactor:
    """Replaces the updates of a document by a snapshot when they have become many.

    A snapshot trims what it covers. It is written at the position up to which it was read, and
    Streamfold refuses one that is older than the newest: two compactors cannot harm a document.
    """

    def __init__(self, http: httpx.AsyncClient, compact_after: int) -> None:
        self._http = http
        self._compact_after = compact_after
        self._sizes: dict[Document, int] = {}
        self._tasks: dict[Document, asyncio.Task[None]] = {}

    def appended(self, document: Document, size: int) -> None:
        """Count an append, and begin to compact if it is time."""
        self._sizes[document] = self._sizes.get(document, 0) + size
        if self._sizes[document] >= self._compact_after:
            self._begin(document)

    def opened(self, document: Document, tail: str, snapshot: str | None) -> None:
        """Compact a document that has many updates from before this process."""
        if _position(tail) - _position(snapshot or "0") >= MOST_APPENDS:
            self._begin(document)

    async def close(self) -> None:
        """Give up what is under way: it can be repeated."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _begin(self, document: Document) -> None:
        if document not in self._tasks:
            self._sizes.pop(document, None)
            task = asyncio.create_task(self._run(document))
            self._tasks[document] = task
            task.add_done_callback(lambda _: self._tasks.pop(document))

    async def _run(self, document: Document) -> None:
        try:
            await self._compact(document)
        except (httpx.HTTPError, MalformedUpdateError, ValueError) as error:
            log.warning("%s stays as it is: %s", document.path, error)

    async def _compact(self, document: Document) -> None:
        snapshot = await newest_snapshot(self._http, document, {})
        before = [snapshot.body] if snapshot else []
        body, offset = await self._read(document, snapshot.offset if snapshot else "-1")
        state = await asyncio.to_thread(lambda: compacted([*before, *unframed(body)]))
        if state is None:
            log.info("%s has updates that build on missing ones: not compacted", document.path)
            return
        answer = await self._http.put(
            f"{document.path}/snapshot/{offset}",
            content=state,
            headers={"content-type": BINARY, "stream-trim-on-snapshot": "true"},
        )
        if answer.status_code != 409:  # another compactor has written a newer one
            answer.raise_for_status()

    async def _read(self, document: Document, offset: str) -> tuple[bytes, str]:
        """Everything from an offset to the tail, and the tail."""
        body = b""
        while True:
            answer = await self._http.get(document.path, params={"offset": offset})
            answer.raise_for_status()
            body += answer.content
            offset = answer.headers["stream-next-offset"]
            if "stream-up-to-date" in answer.headers:
                return body, offset


def _position(offset: str) -> int:
    return int(offset.partition("_")[0])
