"""Writes snapshots into the stream: as one record, or as frames once the state outgrows it."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TypeVar

from streamfold.backoff import Backoff
from streamfold.errors import OutcomeUnknownError, RetryLaterError, SeqNumMismatchError
from streamfold.follow.clients.client import Appended, StreamClient, StreamRecord
from streamfold.follow.clients.feed import retrying
from streamfold.follow.encoding.record_forms import (
    FRAME_OVERHEAD,
    HEADERS,
    HERE,
    Closing,
    Opening,
    RecordForm,
    SnapshotFrame,
)
from streamfold.model.records import BATCH_BYTES_MAX, Record, fence_record, trim_record

T = TypeVar("T")
Piece = bytes | memoryview

#: Bytes of state that fit one record: a batch minus the trim command and the headers.
RECORD_BYTES = BATCH_BYTES_MAX - FRAME_OVERHEAD
#: Bytes of state in one frame: half a batch, so other writers' appends soon get in between.
FRAME_BYTES = BATCH_BYTES_MAX // 2


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of state per record and per frame. Smaller only in tests."""

    record: int = RECORD_BYTES
    frame: int = FRAME_BYTES


@dataclass(frozen=True, slots=True)
class Attempt:
    """A snapshot to write. Written at a cursor, it succeeds only if nothing else was appended there."""

    snapshot: str
    cursor: int
    codec: str
    fold: str | None = None

    @property
    def opening(self) -> Opening:
        return Opening(self.cursor, self.codec, self.fold)


class StreamWriter:
    """Writes snapshots into a stream. Reads back or repeats appends whose outcome is unknown."""

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
        """Return the whole state if it fits one record, else None and all its pieces."""
        left, head, size = iter(pieces), list[Piece](), 0
        for piece in left:
            head.append(piece)
            size += len(piece)
            if size > self._sizes.record:
                return None, chain(head, left)
        return b"".join(head), iter(())

    async def write_record(self, attempt: Attempt, state: bytes) -> bool:
        """Append the snapshot at its cursor. Returns False if another record was appended there first.

        If this writer trims, the trim command that makes the snapshot the head of the stream is in
        the same atomic batch.
        """
        digest = hashlib.sha256(state).hexdigest()
        frame = SnapshotFrame(attempt.snapshot, 0, attempt.opening, Closing(1, len(state), digest))
        record = self._shape.record(frame, state)
        batch = [trim_record(attempt.cursor + 1), record] if self._trims else [record]
        return await self._claim(attempt, batch)

    async def claim(self, attempt: Attempt) -> bool:
        """Append the first frame at the cursor. Returns False if another record was appended first.

        The frame carries no state. Being small, it arrives before others move the tail.
        """
        return await self._claim(
            attempt, [SnapshotFrame(attempt.snapshot, 0, attempt.opening).record(b"")]
        )

    async def open_anywhere(self, attempt: Attempt) -> int:
        """Append the first frame at any position. Its seq_num becomes the cursor.

        Returns an upper bound for that seq_num: after a lost response, the frame may be in the
        stream twice, and readers use the first.
        """
        opening = Opening(HERE, attempt.codec, attempt.fold)
        return await self._insist(
            [SnapshotFrame(attempt.snapshot, 0, opening).record(b"")], self._token
        )

    async def write_frames(self, attempt: Attempt, pieces: Iterable[Piece]) -> None:
        """Append the state in frames after the first one, interleaved with others' appends.

        Trims last, so that a reader always has either the frames or the records before them.
        """
        digest, size, index = hashlib.sha256(), 0, 0
        for index, body in enumerate(regroup(pieces, self._sizes.frame), 1):
            await self._insist([SnapshotFrame(attempt.snapshot, index).record(body)], self._token)
            digest.update(body)
            size += len(body)
        count = index + 1
        closing = Closing(count, size, digest.hexdigest())
        final = SnapshotFrame(attempt.snapshot, count, closing=closing)
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
        """Append at the cursor and nowhere else. Returns False if another record took its seq_num.

        Reads back after a lost response, and after a mismatch that its own first attempt may have
        caused.
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
                # The append may still arrive, but at this cursor only it or its repetition can
                # succeed.
                await self._pause(failures, error)

    async def _is_there(self, attempt: Attempt, written: Record) -> bool:
        records = await retrying(self._backoff, partial(self._client.peek, attempt.cursor, 2))
        return any(_content(record) == _content(written) for record in records)

    async def _insist(self, records: Sequence[Record], token: str | None) -> int:
        """Append at least once and return the seq_num of one of the copies.

        Repeating is safe: readers recognise a duplicate frame by its index, and a repeated trim does
        no harm.
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
            await self._backoff.wait(failures, RetryLaterError(error.message))
        except RetryLaterError:
            raise error from None


def _content(record: Record | StreamRecord) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Return the content that identifies a record. Its headers contain the snapshot id."""
    return [(bytes(name), bytes(value)) for name, value in record.headers], record.body


def regroup(pieces: Iterable[Piece], size: int) -> Iterator[bytes]:
    """Yield the bytes in pieces of `size`, the last one shorter. Empty input yields one empty piece."""
    buffer, yielded = io.BytesIO(), False
    for piece in pieces:
        rest = memoryview(piece)
        while len(rest):
            room = size - buffer.tell()
            buffer.write(rest[:room])
            rest = rest[room:]
            if buffer.tell() == size:
                yielded = True
                yield buffer.getvalue()
                buffer = io.BytesIO()
    if buffer.tell() or not yielded:
        yield buffer.getvalue()
