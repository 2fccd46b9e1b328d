"""Snapshots into the stream: as one record, or as frames once the state outgrows that."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TypeVar

from streamfold.errors import OutcomeUnknownError, RetryLaterError, SeqNumMismatchError
from streamfold.follow.clients.client import Appended, StreamClient, StreamRecord
from streamfold.follow.clients.feed import Backoff, retrying
from streamfold.follow.encoding.record_forms import (
    FRAME_OVERHEAD,
    HEADERS,
    HERE,
    Closing,
    Frame,
    Opening,
    RecordForm,
)
from streamfold.model.records import BATCH_BYTES_MAX, Record, fence_record, trim_record

T = TypeVar("T")
Piece = bytes | memoryview

#: Bytes of state that one record takes: a batch less the trim command and the headers.
RECORD_BYTES = BATCH_BYTES_MAX - FRAME_OVERHEAD
#: Bytes of state in one frame: half a batch, so that appends of others get in between soon.
FRAME_BYTES = BATCH_BYTES_MAX // 2


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much state goes into one record, and into one frame; smaller only in tests."""

    record: int = RECORD_BYTES
    frame: int = FRAME_BYTES


@dataclass(frozen=True, slots=True)
class Attempt:
    """One snapshot to write: it wins only if nothing was appended at its cursor before."""

    snapshot: str
    cursor: int
    codec: str
    fold: str | None = None

    @property
    def opening(self) -> Opening:
        return Opening(self.cursor, self.codec, self.fold)


class StreamWriter:
    """Writes snapshots into a stream; appends of unknown outcome are resolved by reading back."""

    def __init__(
        self,
        client: StreamClient,
        backoff: Backoff,
        fencing_token: str | None = None,
        sizes: Sizes | None = None,
        form: RecordForm = HEADERS,
        *,
        trims: bool = True,
    ) -> None:
        self._client = client
        self._backoff = backoff
        self._token = fencing_token
        self._sizes = sizes or Sizes()
        self._shape = form
        self._trims = trims

    def split(self, pieces: Iterable[Piece]) -> tuple[bytes | None, Iterator[Piece]]:
        """The state whole if it fits one record, or None and all its pieces."""
        left, head, size = iter(pieces), list[Piece](), 0
        for piece in left:
            head.append(piece)
            size += len(piece)
            if size > self._sizes.record:
                return None, chain(head, left)
        return b"".join(head), iter(())

    async def write_record(self, attempt: Attempt, state: bytes) -> bool:
        """Append the snapshot at its cursor, in one atomic batch with the trim command that makes it
        the head; False if another record was appended there first.
        """
        digest = hashlib.sha256(state).hexdigest()
        frame = Frame(attempt.snapshot, 0, attempt.opening, Closing(1, len(state), digest))
        record = self._shape.record(frame, state)
        batch = [trim_record(attempt.cursor + 1), record] if self._trims else [record]
        return await self._claim(attempt, batch)

    async def claim(self, attempt: Attempt) -> bool:
        """Append the first frame at the cursor, without any state: it is small, so that it gets there
        before others move the tail. False if another record was appended there first.
        """
        return await self._claim(attempt, [Frame(attempt.snapshot, 0, attempt.opening).record(b"")])

    async def open_anywhere(self, attempt: Attempt) -> int:
        """Append the first frame at any position; its seq_num is the cursor.

        Returns an upper bound of that seq_num: after a lost answer the frame may be in the stream
        twice, and readers take the first.
        """
        opening = Opening(HERE, attempt.codec, attempt.fold)
        return await self._insist([Frame(attempt.snapshot, 0, opening).record(b"")], self._token)

    async def write_frames(self, attempt: Attempt, pieces: Iterable[Piece]) -> None:
        """Append the state in frames after the first one, in between the appends of others; the trim
        comes last, so that a reader always has the frames or the records before them.
        """
        digest, size, index = hashlib.sha256(), 0, 0
        for index, body in enumerate(regroup(pieces, self._sizes.frame), 1):
            await self._insist([Frame(attempt.snapshot, index).record(body)], self._token)
            digest.update(body)
            size += len(body)
        count = index + 1
        closing = Closing(count, size, digest.hexdigest())
        final = Frame(attempt.snapshot, count, closing=closing)
        await self._insist([final.record(b"")], self._token)
        if self._trims:
            await self.trim(attempt.cursor)

    async def trim(self, seq_num: int) -> None:
        """Trim the stream up to `seq_num`."""
        await self._insist([trim_record(seq_num)], self._token)

    async def fence(self, token: str) -> None:
        """Set the stream's fencing token."""
        await self._insist([fence_record(token)], None)

    async def _claim(self, attempt: Attempt, records: Sequence[Record]) -> bool:
        """Append at the cursor and nowhere else; False if another record took its seq_num.

        After a lost answer, or a mismatch that its own first try may have caused, it reads back.
        """
        failures = 0
        while True:
            try:
                await self._append(records, self._token, attempt.cursor)
                return True
            except SeqNumMismatchError:
                return await self._is_there(attempt, records[-1])
            except OutcomeUnknownError as error:
                failures += 1
                if await self._is_there(attempt, records[-1]):
                    return True
                tail = await retrying(self._backoff, self._client.check_tail)
                if tail.seq_num != attempt.cursor:
                    return False
                # It may still arrive, but at this cursor only one of both can.
                await self._pause(failures, error)

    async def _is_there(self, attempt: Attempt, written: Record) -> bool:
        found = await retrying(self._backoff, partial(self._client.peek, attempt.cursor, 2))
        return any(_content(record) == _content(written) for record in found)

    async def _insist(self, records: Sequence[Record], token: str | None) -> int:
        """Append at least once, and return a seq_num of the batch: readers recognise a frame that comes
        twice by its index, and a repeated trim does no harm.
        """
        failures = 0
        while True:
            try:
                return (await self._append(records, token)).start
            except OutcomeUnknownError as error:
                failures += 1
                await self._pause(failures, error)

    async def _append(
        self, records: Sequence[Record], token: str | None, match_seq_num: int | None = None
    ) -> Appended:
        append: Callable[[], Awaitable[Appended]] = partial(
            self._client.append,
            records,
            match_seq_num=match_seq_num,
            fencing_token=token,
        )
        return await retrying(self._backoff, append)

    async def _pause(self, failures: int, error: OutcomeUnknownError) -> None:
        try:
            await self._backoff.pause(failures, RetryLaterError(error.message))
        except RetryLaterError:
            raise error from None


def _content(record: Record | StreamRecord) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """What a record is recognised by; headers have the id of its snapshot."""
    return [(bytes(name), bytes(value)) for name, value in record.headers], record.body


def regroup(pieces: Iterable[Piece], size: int) -> Iterator[bytes]:
    """The same bytes in pieces of exactly `size`, the last one shorter; one empty piece if empty."""
    buffer, given = io.BytesIO(), False
    for piece in pieces:
        rest = memoryview(piece)
        while len(rest):
            room = size - buffer.tell()
            buffer.write(rest[:room])
            rest = rest[room:]
            if buffer.tell() == size:
                given = True
                yield buffer.getvalue()
                buffer = io.BytesIO()
    if buffer.tell() or not given:
        yield buffer.getvalue()
