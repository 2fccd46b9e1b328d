"""A process that appends while its files may not grow, and reports the results as JSON."""

from __future__ import annotations

import asyncio
import json
import re
import resource
import sys
from pathlib import Path

from streamfold.errors import OutcomeUnknownError
from streamfold.model.records import Record
from streamfold.store.settings import StoreSettings
from streamfold.store.store import open_store
from tests.store.conftest import BASIN, STREAM, incompressible

#: Bytes that a file may have, and of a record that does not fit into one.
LIMIT, LARGE = 64 << 10, 256 << 10
#: Seconds that the test does not take: an answer that comes was given, not waited for.
SETTINGS = StoreSettings(commit_timeout=3600, recovery_timeout=60)


def limit_files(size: int) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))


async def main(folder: Path) -> None:
    report: dict[str, object] = {}
    async with open_store(folder.as_uri(), SETTINGS) as store:
        await store.create_basin(BASIN)
        await store.create_stream(BASIN, STREAM)
        await store.append(BASIN, STREAM, [Record(b"a")])
        limit_files(LIMIT)
        try:
            await store.append(BASIN, STREAM, [Record(incompressible(LARGE))])
        except OutcomeUnknownError as error:
            report["refused"] = error.code
            report["why"] = found[0] if (found := re.search("the disk is full", str(error))) else ""
        ack = await store.append(BASIN, STREAM, [Record(b"small enough")])
        report["meanwhile"] = ack.end.seq_num
        limit_files(resource.RLIM_INFINITY)
        report["after"] = (
            await store.append(BASIN, STREAM, [Record(incompressible(LARGE))])
        ).end.seq_num
    print(json.dumps(report))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
