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
from streamfold.follow.client import StreamClient
from streamfold.follow.frames import (
    FRAME_OVERHEAD,
    Closing,
    Frame,
    Opening,
    find_snapshot,
)
from streamfold.follow.reading import Backoff, retrying
from streamfold.model.records import BATCH_BYTES_MAX, Record, fence_record, trim_record

T = TypeVar("T")
Piece = bytes | memoryview

#: Bytes of state that one record takes: a batch less the trim command and the headers.
RECORD_BYTES = BATCH_BYTES_MAX - FRAME_OVERHEAD
#: Bytes of state in one frame: half a batch, so that appends of others find a place in between soon.
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


class StreamWriter:
    """Writes snapshots into a stream; appends of unknown outcome are settled by reading back."""

    def __init__(
        self,
        client: StreamClient,
        backoff: Backoff,
        fencing_token: str | None = None,
        sizes: Sizes | None = None,
    ) -> None:
        self._client = client
        self._backoff = backoff
        self._token = fencing_token
        self._sizes = sizes or Sizes()

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
        """One atomic batch: the trim command, and the snapshot that is then the head."""
        closing = Closing(1, len(state), hashlib.sha256(state).hexdigest())
        opening = Opening(attempt.cursor, attempt.codec)
        frame = Frame(attempt.snapshot, 0, opening, closing)
        return await self._claim(attempt, [trim_record(attempt.cursor + 1), frame.record(state)])

    async def write_frames(self, attempt: Attempt, pieces: Iterable[Piece]) -> bool:
        """The first frame claims the cursor, the others follow wherever they find a place; the trim
        comes last, so that a reader always has the frames or the records before them.
        """
        digest, size, index = hashlib.sha256(), 0, 0
        for body in regroup(pieces, self._sizes.frame):
            if index == 0:
                first = Frame(attempt.snapshot, 0, Opening(attempt.cursor, attempt.codec))
                if not await self._claim(attempt, [first.record(body)]):
                    return False
            else:
                await self._insist([Frame(attempt.snapshot, index).record(body)], self._token)
            digest.update(body)
            size += len(body)
            index += 1
        closing = Closing(index, size, digest.hexdigest())
        final = Frame(attempt.snapshot, index, closing=closing)
        await self._insist([final.record(b"")], self._token)
        await self.trim(attempt.cursor)
        return True

    async def trim(self, seq_num: int) -> None:
        """Let the stream forget what is before `seq_num`."""
        await self._insist([trim_record(seq_num)], self._token)

    async def fence(self, token: str) -> None:
        """Have the stream ask for `token` from now on."""
        await self._insist([fence_record(token)], None)

    async def _claim(self, attempt: Attempt, records: Sequence[Record]) -> bool:
        """Append at the cursor and nowhere else; False if another record is there.

        A lost answer, or a repeated request that meets its own first try, is told by the id.
        """
        failures = 0
        while True:
            try:
                await self._append(records, self._token, attempt.cursor)
                return True
            except SeqNumMismatchError:
                return await self._is_there(attempt)
            except OutcomeUnknownError as error:
                failures += 1
                if await self._is_there(attempt):
                    return True
                tail = await retrying(self._backoff, self._client.check_tail)
                if tail.seq_num != attempt.cursor:
                    return False
                # It may still arrive, but at this cursor only one of both can.
                await self._pause(failures, error)

    async def _is_there(self, attempt: Attempt) -> bool:
        found = await retrying(self._backoff, partial(self._client.peek, attempt.cursor, 2))
        return find_snapshot(found, attempt.snapshot)

    async def _insist(self, records: Sequence[Record], token: str | None) -> None:
        """Append at least once: frames that come twice are told by their index, trims do no harm."""
        failures = 0
        while True:
            try:
                await self._append(records, token)
                return
            except OutcomeUnknownError as error:
                failures += 1
                await self._pause(failures, error)

    async def _append(
        self, records: Sequence[Record], token: str | None, match_seq_num: int | None = None
    ) -> None:
        append: Callable[[], Awaitable[object]] = partial(
            self._client.append,
            records,
            match_seq_num=match_seq_num,
            fencing_token=token,
        )
        await retrying(self._backoff, append)

    async def _pause(self, failures: int, error: OutcomeUnknownError) -> None:
        try:
            await self._backoff.pause(failures, RetryLaterError(error.message))
        except RetryLaterError:
            raise error from None


def regroup(pieces: Iterable[Piece], size: int) -> Iterator[bytes]:
    """The same bytes in pieces of exactly `size`, the last one shorter; one empty piece for none."""
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
