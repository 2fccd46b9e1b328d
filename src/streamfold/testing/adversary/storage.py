"""Where the attacked store is: a local folder, or an S3 bucket behind a proxy that fails."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from streamfold.errors import InvalidError
from streamfold.testing.adversary.ledger import Ledger
from streamfold.testing.adversary.proxy import StorageProxy, StorageWeather

_S3_SERVER = Path(__file__).with_name("s3_server.py")
_BUCKET = "adversary"


class Storage(Protocol):
    """A place for one store, and the faults that it can have."""

    @property
    def location(self) -> str: ...

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables of the server's process."""
        ...

    def running(self) -> AbstractAsyncContextManager[None]:
        """The storage exists while the block runs."""
        ...

    def disturbed(self, dice: random.Random, ledger: Ledger) -> AbstractAsyncContextManager[None]:
        """Faults come and go while the block runs; none is left afterwards."""
        ...


class LocalFolder:
    """A folder on local disk; it has no faults of its own."""

    def __init__(self, folder: Path) -> None:
        self.location = folder.resolve().as_uri()
        self.environment: Mapping[str, str] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        yield

    @asynccontextmanager
    async def disturbed(self, dice: random.Random, ledger: Ledger) -> AsyncIterator[None]:
        yield


class FlakyBucket:
    """A bucket of an S3 server, behind a proxy that fails; needs the package moto."""

    location = f"s3://{_BUCKET}/store"

    def __init__(self) -> None:
        if find_spec("moto") is None:
            raise InvalidError(
                "an S3 server needs the package moto: run pip install 'moto[server]'"
            )
        self._proxy: StorageProxy | None = None

    @property
    def environment(self) -> Mapping[str, str]:
        assert self._proxy is not None, "the storage is not running"
        return {
            "AWS_ENDPOINT_URL_S3": self._proxy.endpoint,
            "AWS_ACCESS_KEY_ID": "AKIAADVERSARYADVERSA",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", str(_S3_SERVER), _BUCKET, stdout=PIPE
        )
        try:
            assert process.stdout is not None
            where = json.loads(await process.stdout.readline())
            self._proxy = StorageProxy(f"http://{where['host']}:{where['port']}")
            async with self._proxy.running():
                yield
        finally:
            process.kill()
            await process.wait()

    @asynccontextmanager
    async def disturbed(self, dice: random.Random, ledger: Ledger) -> AsyncIterator[None]:
        assert self._proxy is not None, "the storage is not running"
        task = asyncio.create_task(self._disturb(self._proxy, dice, ledger))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self._proxy.turn(StorageWeather.CLEAR)
            ledger.event("storage works")

    async def _disturb(self, proxy: StorageProxy, dice: random.Random, ledger: Ledger) -> None:
        faults = [weather for weather in StorageWeather if weather is not StorageWeather.CLEAR]
        while True:
            weather = dice.choice(faults)
            ledger.event(f"storage {weather}")
            ledger.totals.storage_faults += 1
            await proxy.turn(weather)
            await asyncio.sleep(dice.uniform(0.05, 1.5))
            await proxy.turn(StorageWeather.CLEAR)
            ledger.event("storage works")
            await asyncio.sleep(dice.uniform(0, 1))
