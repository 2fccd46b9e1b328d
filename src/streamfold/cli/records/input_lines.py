"""Lines of input as they arrive: all that are there at once, none held back for others."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Final

from streamfold.cli.exit_status import VerbFailedError

#: Bytes asked for at once; a pipe gives 64 KiB at most.
_CHUNK: Final = 1 << 20
#: Chunks read ahead of what is being sent.
_AHEAD: Final = 2
#: Bytes of one line: a record of 1 MiB with its headers, in base64 and JSON, is well below.
LINE_MAX: Final = 8 << 20


async def arriving_lines(descriptor: int) -> AsyncGenerator[list[bytes]]:
    """Lines without their newline, in groups as they arrive; a last line may do without one."""
    rest = b""
    async for chunk in _chunks(descriptor):
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > LINE_MAX:
            raise VerbFailedError(
                "invalid", f"a line of input has more than {LINE_MAX} bytes: no record is that long"
            )
        if lines:
            yield lines
    if rest:
        yield [rest]


async def _chunks(descriptor: int) -> AsyncGenerator[bytes]:
    """What a descriptor gives, to its end, read by a thread that nobody has to wait for.

    An event loop cannot wait for a file, and a read from a terminal cannot be called off: a daemon
    thread can be left alone with it when the process ends.
    """
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[bytes | OSError] = asyncio.Queue()
    room = threading.Semaphore(_AHEAD)

    def read() -> None:
        with suppress(RuntimeError):  # the loop is closed: the verb has ended meanwhile
            while True:
                room.acquire()
                try:
                    chunk: bytes | OSError = os.read(descriptor, _CHUNK)
                except OSError as error:
                    chunk = error
                loop.call_soon_threadsafe(arrived.put_nowait, chunk)
                if not chunk or isinstance(chunk, OSError):
                    return

    threading.Thread(target=read, name="input", daemon=True).start()
    while chunk := await arrived.get():
        if isinstance(chunk, OSError):
            raise VerbFailedError("input", f"the input cannot be read: {chunk.strerror}")
        room.release()
        yield chunk
