"""Durable Streams over HTTP: create, append exactly once, read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import chain, repeat
from typing import Any, TypeVar

import httpx

T = TypeVar("T")
JSON = {"content-type": "application/json"}


class SupersededError(Exception):
    """Another writer has claimed the stream with a higher epoch, or has closed it."""


class Producer:
    """Numbers the appends of one writer. A higher epoch shuts out the writers before it."""

    def __init__(self, name: str, epoch: int = 0) -> None:
        self.name, self.epoch, self.seq = name, epoch, 0

    def headers(self) -> dict[str, str]:
        return {
            "producer-id": self.name,
            "producer-epoch": str(self.epoch),
            "producer-seq": str(self.seq),
        }


class Streams:
    """The streams below one URL, `http://localhost:8080/v1/stream/` for example."""

    def __init__(self, url: str, token: str = "") -> None:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        timeout = httpx.Timeout(10, read=60)  # a live read hears from the server every 15 s
        limits = httpx.Limits(max_connections=None)  # each page that reads an answer has one
        self.http = httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout, limits=limits)

    async def create(self, path: str) -> None:
        (await self.http.put(path, headers=JSON)).raise_for_status()

    async def append(
        self, path: str, entry: Any, producer: Producer | None = None, *, close: bool = False
    ) -> int:
        """Append an entry, or a list of them at once; returns the next position.

        With a producer, repeat it after an unknown outcome: the server stores it once.
        """
        headers = JSON | (producer.headers() if producer else {})
        if close:
            headers["stream-closed"] = "true"
        answer = await self.http.post(path, json=entry, headers=headers)
        if answer.status_code in (403, 409):
            raise SupersededError(answer.text)
        answer.raise_for_status()
        if producer:
            producer.seq += 1
        return int(answer.headers["stream-next-offset"].partition("_")[0])

    async def read(self, path: str) -> tuple[list[Any], bool]:
        """All entries, and whether the stream is closed. A stream that does not exist has none."""
        entries: list[Any] = []
        offset = "-1"
        while True:
            answer = await self.http.get(path, params={"offset": offset})
            if answer.status_code == 404:
                return [], False
            answer.raise_for_status()
            entries += answer.json()
            offset = answer.headers["stream-next-offset"]
            if "stream-up-to-date" in answer.headers:
                return entries, "stream-closed" in answer.headers


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """The result of a call, which is repeated while the server is away or overloaded."""
    for pause in chain((0.1, 0.2, 0.5, 1.0), repeat(2.0)):
        try:
            return await call()
        except httpx.TransportError:
            pass
        except httpx.HTTPStatusError as error:
            if error.response.status_code < 500 and error.response.status_code != 429:
                raise
        await asyncio.sleep(pause)
    raise AssertionError("pauses never end")
