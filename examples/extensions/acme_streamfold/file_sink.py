"""An event sink that appends each event to a file, as a line of JSON."""

import os
from pathlib import Path
from typing import Annotated

import msgspec

from streamfold.archive import events
from streamfold.extensions import Options


class FileOptions(Options, frozen=True, kw_only=True):
    path: Annotated[str, msgspec.Meta(description="file that gets a line for each event")]


class FileSink(events.EventSink):
    def __init__(self, path: Path) -> None:
        self._path, self._thread = path, events.WorkerThread(f"file {path}")

    async def send(self, event: events.Event) -> None:
        try:
            await self._thread.run(self._append, events.encode_event(event) + b"\n")
        except OSError as error:
            raise events.EventUnconfirmedError(f"file {self._path}: {error.strerror}") from None

    async def close(self) -> None:
        await self._thread.close()

    def _append(self, line: bytes) -> None:
        with self._path.open("ab", buffering=0) as file:
            file.write(line)
            os.fsync(file.fileno())  # when `send` returns, the receiver has the event durably


FILE = events.SinkType(
    id="file", summary="a file on local disk", options=FileOptions, target=("path",),
    open=lambda options, context: FileSink(Path(options.path)),
)  # fmt: skip
