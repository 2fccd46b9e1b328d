"""Bounds what clients send: the memory and the files for bodies that are arriving, and how slowly they
may arrive.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable
from heapq import nsmallest
from typing import Any, Final

from streamfold.errors import RetryLaterError, ServerBusyError
from streamfold.server.http.problems import RequestTimeoutError
from streamfold.store.log.admission import Admission

#: Bytes of bodies in memory, over all requests.
BODIES_MAX: Final = 256 << 20
#: Files that uploads keep open, over all requests, where the limit of descriptors is unknown.
UPLOAD_FILES_MAX: Final = 64
#: Part of the window for which an upload waits for a file: longer than a silent one may keep its file.
_FILE_WAIT: Final = 0.5
#: Bytes from which a body needs a reservation: smaller ones are most appends, and cost little.
RESERVED_FROM: Final = 8 << 10
#: Bodies that may wait for memory, with up to `listener.STREAM_WINDOW` bytes each that have arrived.
WAITING_MAX: Final = 128
#: Bodies of one address that may wait, for each that others can still have wait: all but a quarter.
_WAITING_PER_FREE: Final = 3
#: Seconds over which the pace of a body is measured. Also the time limit of a small body.
BODY_TIMEOUT: Final = 30.0
#: Bytes per second that a body must arrive with: 64 kbit/s, less than any usable network.
PACE_MIN: Final = 8 << 10
#: Checks per window: an interruption comes at most an eighth late. A timer for each request would be
#: exact, and cost as much as all else that reading a small body takes.
_LOOKS: Final = 8
#: Checks that a client may stay silent while other bodies wait for memory.
_LOOKS_UNDER_PRESSURE: Final = 1
#: Bytes per second that a body must bring while others wait for memory; the same as for answers.
PACE_UNDER_PRESSURE: Final = 128 << 10


class RequestBudget:
    """Reserves memory and files for bodies, and interrupts those that arrive too slowly.

    A body that is arriving must bring `PACE_MIN` bytes per second, measured over windows of `seconds`.
    While other bodies wait for memory or a file that it holds, a client that sends nothing is cut off
    after a quarter of that. So are those that stay below `PACE_UNDER_PRESSURE`, the slowest first: at
    each check one that holds memory, and as many that hold a file as others wait for one.
    """

    def __init__(
        self,
        seconds: float = BODY_TIMEOUT,
        capacity: int = BODIES_MAX,
        files: int = UPLOAD_FILES_MAX,
    ) -> None:
        self.room = Admission(capacity)
        #: Bodies that may wait for memory, and those that do, by client (`connections.client_of`).
        self.waiting_max = WAITING_MAX
        self._waiting_for_room: Counter[str] = Counter()
        #: Files that uploads keep open while the rest of their body arrives.
        self.files = Admission(files)
        #: Seconds that an upload waits for a file.
        self.file_wait = seconds * _FILE_WAIT
        #: Bodies that were cut off.
        self.cut_off = 0
        self._seconds = seconds
        self._enough = int(PACE_MIN * seconds)
        #: Bodies for which the server waits.
        self.waiting: dict[Upload, None] = {}
        #: Checks so far.
        self.looks = 0
        self._timer: asyncio.TimerHandle | None = None

    async def reserve(self, client: str, size: int) -> None:
        """Wait for memory; ServerBusyError if too many bodies, or too many of this client, wait."""
        if self.room.acquire_at_once(size):
            return
        waiting = self._waiting_for_room
        most = _WAITING_PER_FREE * (self.waiting_max - waiting.total())
        if waiting[client] >= most:
            self.cut_off += 1
            raise ServerBusyError(waiting[client], "address", "wait for memory for their bodies")
        waiting[client] += 1
        try:
            await self.room.acquire(size)
        finally:
            waiting[client] -= 1
            if not waiting[client]:
                del waiting[client]

    def wait(self, upload: Upload) -> None:
        self.waiting[upload] = None
        if self._timer is None:
            self._set_timer(upload.task.get_loop())

    def end_window(self, upload: Upload) -> None:
        """Begin a new window; RequestTimeoutError if the last one brought too little."""
        if upload.in_window < self._enough:
            self.cut_off += 1
            raise self.too_slow()
        upload.begin_window(self.looks)

    def too_slow(self) -> RequestTimeoutError:
        return RequestTimeoutError(
            f"the body did not arrive at {PACE_MIN} bytes per second over {self._seconds:g} seconds: "
            "send it faster"
        )

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(self._seconds / _LOOKS, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        self.looks += 1
        if self.room.waiting:
            self._interrupt_slowest(1, lambda upload: upload.reserved_at)
        if self.files.waiting:
            self._interrupt_slowest(self.files.waiting, lambda upload: upload.file_at)
        for upload in tuple(self.waiting):
            silent = self.looks - upload.heard
            if silent > _LOOKS_UNDER_PRESSURE and self._is_in_the_way(upload):
                self._interrupt(upload)
            elif self.looks - upload.window > _LOOKS:
                if upload.in_window < self._enough:
                    self._interrupt(upload)
                else:
                    upload.begin_window(self.looks)
            upload.since_look = 0
        if self.waiting:
            self._set_timer(loop)

    def _is_in_the_way(self, upload: Upload) -> bool:
        """Whether others wait for what this body holds."""
        return bool(
            (self.room.waiting and upload.reserved) or (self.files.waiting and upload.holds_file)
        )

    def _interrupt_slowest(self, count: int, held_since: Callable[[Upload], int]) -> None:
        """Interrupt the `count` bodies that brought least since the last check, if that is little."""
        enough = PACE_UNDER_PRESSURE * self._seconds / _LOOKS
        slow = [
            upload
            for upload in self.waiting
            if held_since(upload) < self.looks - 1 and upload.since_look < enough
        ]
        for upload in nsmallest(count, slow, key=lambda upload: upload.since_look):
            self._interrupt(upload)

    def _interrupt(self, upload: Upload) -> None:
        self.cut_off += 1
        self.waiting.pop(upload, None)
        upload.interrupted = True
        upload.task.cancel()


class Upload:
    """A body, or a frame of a session, that is arriving; call `release` at its end."""

    __slots__ = (
        "_budget",
        "_client",
        "file_at",
        "heard",
        "in_window",
        "interrupted",
        "reserved",
        "reserved_at",
        "since_look",
        "task",
        "window",
    )

    #: The task that waits for the client.
    task: asyncio.Task[Any]

    def __init__(self, request_budget: RequestBudget, client: str) -> None:
        self._budget = request_budget
        self._client = client
        #: The check after which the window began, and the one after which the client last sent.
        self.window = self.heard = request_budget.looks
        #: Bytes since the window began.
        self.in_window = 0
        #: Bytes since the last check at which the server waited for this body.
        self.since_look = 0
        self.interrupted = False
        #: Bytes of memory that are reserved for this body, and the check after which they were.
        self.reserved = 0
        self.reserved_at = sys.maxsize
        #: The check after which this body got a file, if it holds one.
        self.file_at = sys.maxsize

    def wait(self, task: asyncio.Task[Any]) -> None:
        """The task begins to wait for the client; end this by `came` or `give_up`."""
        self.task = task
        self._budget.wait(self)

    def came(self, size: int) -> None:
        """Count what came; RequestTimeoutError if it came too slowly."""
        request_budget = self._budget
        request_budget.waiting.pop(self, None)
        self.in_window += size
        self.since_look += size
        self.heard = request_budget.looks
        if self.heard - self.window > _LOOKS:
            request_budget.end_window(self)

    def give_up(self) -> None:
        """The wait was cancelled: RequestTimeoutError if that was because the client is too slow."""
        self._budget.waiting.pop(self, None)
        if self.interrupted:
            self.interrupted = False
            self.task.uncancel()
            raise self._budget.too_slow() from None

    def begin_window(self, looks: int) -> None:
        self.window = looks
        self.in_window = 0

    async def reserve(self, size: int) -> None:
        """Wait until there is memory for `size` bytes; the client's pace is not judged meanwhile.

        ServerBusyError if too many wait already.
        """
        size = min(size, self._budget.room.capacity)
        if size > self.reserved:
            await self._budget.reserve(self._client, size - self.reserved)
            self.reserved = size
            self.reserved_at = self._budget.looks
            self._begin_anew()

    @property
    def holds_file(self) -> bool:
        return self.file_at != sys.maxsize

    async def hold_file(self) -> None:
        """Wait until this body may keep a file open; the client's pace is not judged meanwhile.

        RetryLaterError (`uploads_busy`) if none of the files becomes free in time.
        """
        if self.holds_file:
            return
        request_budget = self._budget
        try:
            async with asyncio.timeout(request_budget.file_wait):
                await request_budget.files.acquire(1)
        except TimeoutError:
            raise RetryLaterError(
                f"{request_budget.files.capacity} large uploads are running, which is the most at "
                f"once, and none ended within {request_budget.file_wait:g} seconds: nothing was "
                "stored; send it again later",
                code="uploads_busy",
            ) from None
        self.file_at = request_budget.looks
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Judge the client's pace from now on."""
        self.since_look = 0
        self.begin_window(self._budget.looks)
        self.heard = self._budget.looks

    def release(self) -> None:
        if self.reserved:
            self._budget.room.release(self.reserved)
            self.reserved = 0
            self.reserved_at = sys.maxsize
        if self.holds_file:
            self._budget.files.release(1)
            self.file_at = sys.maxsize
