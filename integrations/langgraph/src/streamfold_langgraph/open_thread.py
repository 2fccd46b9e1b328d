"""A thread in this process's memory, kept current and appended to under conditions."""

from __future__ import annotations

import asyncio
import enum
import logging
import secrets
from collections.abc import Callable

from s2_sdk import S2Basin, S2Error, StreamConfig

from streamfold.errors import (
    ConditionFailedError,
    ConflictError,
    DataCorruptError,
    NotFoundError,
    OutcomeUnknownError,
    RetryLaterError,
    StreamfoldError,
)
from streamfold.follow import Backoff, Follower, Outcome, SnapshotTaker, in_stream
from streamfold.follow.clients.s2 import translate
from streamfold_langgraph.errors import ThreadDeletingError
from streamfold_langgraph.records import Folding, ReplacedError, ThreadCodec, to_records
from streamfold_langgraph.thread import Event, Thread
from streamfold_langgraph.thread_stream import ThreadStream

logger = logging.getLogger(__name__)


class _Seen(enum.Enum):
    """How much of the stream this process has read."""

    ALL = enum.auto()
    PART = enum.auto()
    ANOTHER = enum.auto()


#: S2 error codes for streams that no longer have records, or never had any.
_GONE = {"stream_not_found", "stream_deletion_pending"}
#: Attempts at one append, each after reading the records that another writer appended first.
_ATTEMPTS = 8
#: Minimum bytes of new records that are worth a snapshot, however small the thread.
_SNAPSHOT_FROM = 256 << 10


class OpenThread:
    """One thread, used by one task at a time, which holds `lock`."""

    def __init__(self, basin: S2Basin, stream: str, thread_id: str, backoff: Backoff) -> None:
        self._basin, self._name, self._thread_id = basin, stream, thread_id
        self._backoff = backoff
        self.lock = asyncio.Lock()
        #: Tasks that hold the lock or wait for it.
        self.users = 0
        #: Checkpoints that were read by id, each with its namespace.
        self.forkable: set[tuple[str, str | None]] = set()
        #: Namespaces that had no checkpoint when their newest one was requested.
        self.read_empty: set[str] = set()
        self._taker: SnapshotTaker[Thread] | None = None
        self._reset()

    @property
    def thread(self) -> Thread:
        """The stored thread, as far as this process has read it."""
        return self._taker.state.value if self._taker else Thread()

    @property
    def is_loaded(self) -> bool:
        return self._taker is not None

    async def close(self) -> None:
        taker = self._taker
        self._reset()
        if taker is not None:
            await taker.__aexit__(None, None, None)

    def _reset(self) -> None:
        self._taker = None
        self._stream = ThreadStream(self._basin.stream(self._name))
        self._folding = Folding(self._name)
        #: Timestamp of the last record, if known.
        self._timestamp: int | None = None

    async def catch_up(self) -> Thread:
        """Read all stored records and return the thread."""
        began_here = self._taker is None
        try:
            try:
                await self._catch_up()
            except (NotFoundError, ConflictError) as error:
                if getattr(error.__cause__, "code", "") not in _GONE:
                    raise
                await self.close()
            except ReplacedError:
                await self.close()
                if began_here:
                    raise
                await self._catch_up()
        except ReplacedError:
            raise DataCorruptError(
                f"stream {self._name} has records of two threads: it was copied to, or a writer "
                "went on after the thread was deleted; copy one thread's records to another stream"
            ) from None
        return self.thread

    async def _catch_up(self) -> None:
        if self._taker is not None:
            match await self._compare(self._taker.state.cursor):
                case _Seen.ALL:
                    return
                case _Seen.ANOTHER:
                    await self.close()
                case _Seen.PART:
                    pass
        if self._taker is None:
            taker = SnapshotTaker(
                self._stream,
                fold=self._folding,
                initial=Thread,
                snapshots=in_stream(codec=ThreadCodec()),
                fold_name="langgraph-1",
                backoff=self._backoff,
                progress=lambda _: None,
            )
            await taker.__aenter__()
            self._taker = taker
        await self._taker.state.catch_up()

    async def _compare(self, cursor: int) -> _Seen:
        """Compare the stream with the records read so far: a new one may have taken its name."""
        tail = await self._stream.check_tail()
        if tail.seq_num != cursor:  # the next records show whether it is a new stream
            return _Seen.PART if tail.seq_num > cursor else _Seen.ANOTHER
        if self._timestamp is None and cursor:
            last = await self._stream.peek(cursor - 1, 1)
            if not last or not self._folding.may_be_newest(last[-1]):
                return _Seen.ANOTHER
        elif self._timestamp != tail.timestamp:
            return _Seen.ANOTHER
        self._timestamp = tail.timestamp
        return _Seen.ALL

    async def append(
        self, make: Callable[[Thread], Event | None], is_stored: Callable[[Thread], bool]
    ) -> None:
        """Append the event that `make` returns for the newest state, or nothing if it returns None.

        An attempt that loses to another writer is repeated on the newest state, which `make` may
        then reject. `is_stored` tells whether an attempt with an unknown outcome was stored. Raises
        OutcomeUnknownError if that cannot be determined.
        """
        event_id = secrets.token_hex(8)
        unknown: OutcomeUnknownError | None = None
        for attempt in range(_ATTEMPTS):
            try:
                follower = await self._open(again=attempt > 0)
                if attempt and is_stored(self.thread):
                    return
                event = make(self.thread)
                if event is not None:
                    await self._append(follower, event, event_id)
                return
            except ConditionFailedError:
                continue
            except ConflictError:
                raise  # the stream has moved on, so no earlier attempt can still succeed
            except OutcomeUnknownError as error:
                unknown = error
            except StreamfoldError as error:
                if unknown is not None:
                    raise unknown from error
                raise
        raise unknown or RetryLaterError(
            f"other writers were faster {_ATTEMPTS} times at appending to thread "
            f"{self._thread_id!r}: try again"
        )

    async def _open(self, *, again: bool) -> Follower[Thread]:
        """Load the thread and create its stream if needed. With `again`, read new records too."""
        if again or self._taker is None:
            await self.catch_up()
        if self._taker is None:
            await self._create()
            await self.catch_up()
        if self._taker is None:
            raise ThreadDeletingError(self._thread_id)
        return self._taker.state

    async def _append(self, state: Follower[Thread], event: Event, event_id: str) -> None:
        for record in to_records(event, self.thread.incarnation or secrets.token_hex(8), event_id):
            self._timestamp = None
            done = await self._stream.append([record], match_seq_num=state.cursor)
            while state.cursor < done.end:
                await state.advance()

    async def _create(self) -> None:
        """Create the stream with infinite retention: a fold needs every record."""
        try:
            await self._basin.create_stream(
                self._name, config=StreamConfig(retention_policy="infinite")
            )
        except S2Error as error:
            code = getattr(error, "code", "")
            if code == "stream_deletion_pending":
                raise ThreadDeletingError(self._thread_id) from error
            if code != "resource_already_exists":
                raise translate(error) from error

    async def delete(self) -> None:
        """Delete the stream if it exists."""
        try:
            await self._basin.delete_stream(self._name, ignore_not_found=True)
        except S2Error as error:
            raise translate(error) from error
        self.forkable.clear()
        self.read_empty.clear()
        await self.close()

    async def snapshot_if_due(self) -> None:
        """Take a snapshot if the thread has doubled since the last one.

        So all snapshots together cost at most twice the last one. A failed snapshot is retried
        later: the records are stored without it.
        """
        if self._taker is None:
            return
        if self._taker.since().bytes < max(_SNAPSHOT_FROM, self.thread.size() / 2):
            return
        try:
            await self.snapshot()
        except StreamfoldError as error:
            logger.warning("no snapshot of stream %s: %s", self._name, error)

    async def snapshot(self) -> None:
        """Store a snapshot in the stream, which makes all earlier records unnecessary."""
        if self._taker is None:
            return
        taken = await self._taker.take()
        if taken.outcome is Outcome.TAKEN:
            self._timestamp = None
            await self._taker.state.catch_up()
