"""Simulated blobs: writes arrive in pieces, late, torn or not at all, and their answers get lost."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime

from streamfold.blob.blob_store import DEFAULT_CHUNK_SIZE, BlobMeta, BlobStore
from streamfold.errors import BlobNotFoundError, BlobOutcomeUnknownError, BlobUnavailableError
from streamfold.testing.simulation.loop import chance
from streamfold.testing.simulation.storage import SimulatedStorage, Weather


class SimulatedBlobs(BlobStore):
    """Blobs on simulated storage, below a prefix.

    A write whose outcome is unknown leaves all of the blob, none of it, or half. The contract of a blob
    store excludes the half: nothing may read a blob whose write was never acknowledged.
    """

    def __init__(self, storage: SimulatedStorage, weather: Weather, prefix: str) -> None:
        self._blobs = storage.blobs
        self._weather = weather
        self._prefix = prefix

    async def put(self, key: str, data: bytes | AsyncIterator[bytes]) -> None:
        weather = self._weather
        if weather.fails("blob writes refused"):
            raise BlobUnavailableError("simulated: the write was refused")
        whole = data if isinstance(data, bytes) else await self._gather(data)
        if weather.fails("answers to blob writes lost"):
            await self._lose(key, whole)
            raise BlobOutcomeUnknownError("simulated: the answer to a write was lost")
        await weather.perform(lambda: self._blobs.__setitem__(self._prefix + key, whole))
        await weather.pass_time()

    async def _gather(self, pieces: AsyncIterator[bytes]) -> bytes:
        """What arrives; an error of the sender ends the write without an effect."""
        parts = []
        async for piece in pieces:
            parts.append(piece)
            await self._weather.pass_time()
        return b"".join(parts)

    async def _lose(self, key: str, whole: bytes) -> None:
        choice = chance().random()
        if choice < 0.4:
            return
        if choice < 0.6:
            self._weather.injected["blobs torn"] += 1
            whole = whole[: len(whole) // 2]
        await self._weather.perform(lambda: self._blobs.__setitem__(self._prefix + key, whole))

    async def put_if_absent(self, key: str, data: bytes) -> str:
        raise NotImplementedError

    async def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        raise NotImplementedError

    async def get_with_etag(self, key: str) -> tuple[bytes, str]:
        return await self.get(key), ""

    async def get(self, key: str) -> bytes:
        await self._weather.pass_time()
        data = self._blobs.get(self._prefix + key)
        await self._weather.pass_time()
        if self._weather.fails("blob reads failed"):
            raise BlobUnavailableError("simulated: the read failed")
        if data is None:
            raise BlobNotFoundError(key)
        return data

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        return (await self.get(key))[start : start + length]

    async def stream(self, key: str, chunk_size: int = DEFAULT_CHUNK_SIZE) -> AsyncIterator[bytes]:
        data = await self.get(key)
        for start in range(0, len(data), chunk_size):
            yield data[start : start + chunk_size]
            await self._weather.pass_time()

    async def head(self, key: str) -> BlobMeta:
        return self._meta(key, await self.get(key))

    async def list(self, prefix: str = "") -> AsyncIterator[BlobMeta]:
        await self._weather.pass_time()
        if self._weather.fails("blob reads failed"):
            raise BlobUnavailableError("simulated: the listing failed")
        start = self._prefix + prefix
        for key in sorted(key for key in self._blobs if key.startswith(start)):
            if (data := self._blobs.get(key)) is not None:
                yield self._meta(key.removeprefix(self._prefix), data)
            await self._weather.pass_time()

    async def delete(self, key: str) -> None:
        await self._weather.pass_time()
        if self._weather.fails("blob deletions failed"):
            if chance().random() < 0.5:
                await self._weather.perform(lambda: self._remove(key))
            raise BlobUnavailableError("simulated: the deletion failed")
        await self._weather.perform(lambda: self._remove(key))

    def _remove(self, key: str) -> None:
        self._blobs.pop(self._prefix + key, None)

    def _meta(self, key: str, data: bytes) -> BlobMeta:
        return BlobMeta(key, len(data), None, datetime.fromtimestamp(0, UTC))
