"""Storage of the attacked store: a local folder, or an S3 bucket behind a faulty proxy."""

from __future__ import annotations

import asyncio
import enum
import json
import random
import shutil
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

from streamfold.errors import InvalidError
from streamfold.testing.adversary.ledger import Ledger
from streamfold.testing.adversary.machine.faulty_disk import DiskFault
from streamfold.testing.adversary.proxy import StorageProxy, StorageWeather

#: Sends an order to the running servers.
Tell: TypeAlias = Callable[[dict[str, Any]], None]

_S3_SERVER = Path(__file__).parent / "machine" / "s3_server.py"
_BUCKET = "adversary"


class Storage(Protocol):
    """Storage of one store, and its faults."""

    @property
    def location(self) -> str: ...

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables of the server's process."""
        ...

    def running(self) -> AbstractAsyncContextManager[None]:
        """Provide the storage while the block runs."""
        ...

    def disturbed(
        self, dice: random.Random, ledger: Ledger, tell: Tell
    ) -> AbstractAsyncContextManager[None]:
        """Inject faults while the block runs. None is left afterwards."""
        ...

    def disk(self, *, powered: bool) -> dict[str, Any] | None:
        """Return the settings of the server's disk, if any. `powered`: whether power may be cut."""
        ...

    def image(self) -> Path:
        """Return the folder for the files that a power cut leaves."""
        ...

    def boot(self) -> None:
        """Restart the machine with the files of the image."""
        ...


class LocalFolder:
    """A folder on local disk. Its faults are injected in the server's process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._disk = self._folder / "disk"
        self._boots = 0
        self.location = (self._disk / "store").as_uri()
        self.environment: Mapping[str, str] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self._disk.mkdir(parents=True, exist_ok=True)
        yield

    def disk(self, *, powered: bool) -> dict[str, Any] | None:
        shutil.rmtree(self._folder / "spare", ignore_errors=True)
        spare = str(self._folder / "spare") if powered else None
        return {"root": str(self._disk), "boot": f"boot-{self._boots}", "spare": spare}

    def image(self) -> Path:
        return self._folder / "image"

    def boot(self) -> None:
        shutil.rmtree(self._disk)
        self.image().rename(self._disk)
        self._boots += 1

    @asynccontextmanager
    async def disturbed(
        self, dice: random.Random, ledger: Ledger, tell: Tell
    ) -> AsyncIterator[None]:
        async def turn(fault: DiskFault) -> None:
            tell({"fault": fault})

        async with _changing(DiskFault, DiskFault.NONE, turn, dice, ledger):
            yield


class FlakyBucket:
    """A bucket of an S3 server behind a faulty proxy. Needs the package moto."""

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

    def disk(self, *, powered: bool) -> dict[str, Any] | None:
        return None

    def image(self) -> Path:
        raise InvalidError("a bucket does not lose power")

    def boot(self) -> None:
        raise InvalidError("a bucket does not lose power")

    @asynccontextmanager
    async def disturbed(
        self, dice: random.Random, ledger: Ledger, tell: Tell
    ) -> AsyncIterator[None]:
        assert self._proxy is not None, "the storage is not running"
        turn = self._proxy.turn
        async with _changing(StorageWeather, StorageWeather.CLEAR, turn, dice, ledger):
            yield


F = TypeVar("F", bound=enum.StrEnum)


@asynccontextmanager
async def _changing(
    kind: type[F],
    none: F,
    turn: Callable[[F], Awaitable[None]],
    dice: random.Random,
    ledger: Ledger,
) -> AsyncIterator[None]:
    """Inject one fault after another while the block runs."""

    async def change() -> None:
        while True:
            fault = dice.choice([fault for fault in kind if fault is not none])
            ledger.event(f"storage {fault}")
            ledger.totals.storage_faults += 1
            await turn(fault)
            await asyncio.sleep(dice.uniform(0.05, 1.5))
            await turn(none)
            ledger.event(f"storage {none}")
            await asyncio.sleep(dice.uniform(0, 1))

    task = asyncio.create_task(change())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await turn(none)
        ledger.event(f"storage {none}")
