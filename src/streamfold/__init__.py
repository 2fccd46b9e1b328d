"""Streamfold: a durable stream store with built-in snapshots.

Applications use the names exported here, which are imported on first use. Everything else is
private by convention. A store inside this process:

    import asyncio
    import streamfold

    async def main() -> None:
        async with streamfold.open_store("memory:") as store:
            await store.ensure_basin("my-basin")
            await store.ensure_stream("my-basin", "orders")
            await store.append("my-basin", "orders", [streamfold.Record(b"order 1")])

    asyncio.run(main())

- `open_store` opens a store. Its methods take `Record`, `ReadRequest` and `from_seq_num`,
  `from_tail` or `from_timestamp`.
- `connect` returns a client for a server: Streamfold's, or any S2 endpoint.
- `streamfold.follow` restores a state from its newest snapshot and follows its stream.
- `streamfold.ingest` fills streams from PostgreSQL tables.
- `streamfold.archive` reads and writes tables published as files: `streamfold.archive.open(url)`.
- `streamfold.spark` has the data sources for Spark, `streamfold.testing` the conformance kits.
- `streamfold.errors` has every error, with stable codes.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any
from zipimport import zipimporter

if TYPE_CHECKING:
    from streamfold import archive, errors, follow, spark, testing
    from streamfold.follow.clients.s2 import connect
    from streamfold.model.records import Record, fence_record, trim_record
    from streamfold.store import (
        ReadRequest,
        StoreSettings,
        StreamStore,
        from_seq_num,
        from_tail,
        from_timestamp,
        open_store,
    )

__version__ = "0.1.0"

__all__ = [
    "open_store",
    "StreamStore",
    "StoreSettings",
    "Record",
    "fence_record",
    "trim_record",
    "ReadRequest",
    "from_seq_num",
    "from_tail",
    "from_timestamp",
    "connect",
    "follow",
    "archive",
    "spark",
    "testing",
    "errors",
]

_MODULES = frozenset(("follow", "archive", "spark", "testing", "errors"))
_SOURCES = {
    "connect": "streamfold.follow.clients.s2",
    "Record": "streamfold.model.records",
    "fence_record": "streamfold.model.records",
    "trim_record": "streamfold.model.records",
}


if __spec__ is not None and isinstance(__spec__.loader, zipimporter):
    import_module("streamfold.zipped").install(__spec__.loader)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"streamfold.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'streamfold' has no attribute {name!r}")
    value = getattr(import_module(_SOURCES.get(name, "streamfold.store")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted((*globals(), *__all__))
