"""A thread's stream, read by single requests, not a session: idle threads hold no connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from s2_sdk import S2Stream

from streamfold.follow import Appended, StreamClient, StreamRecord, as_client
from streamfold.model.positions import SeqNum, StreamPosition, Timestamp
from streamfold.model.records import Record, SequencedRecord

#: Records per request: more than fit into the 1 MiB that it returns.
_PEEK = 1000


class ThreadStream:
    """A `StreamClient` whose reads wait until `check_tail` or `append` reveals new records.

    A reader that wants new records checks the tail first, as a follower's `catch_up` does.
    """

    def __init__(self, stream: S2Stream) -> None:
        self._client: StreamClient = as_client(stream)
        self._more = asyncio.Event()
        self._tail = 0
        #: Records appended here, which need not be read back.
        self._own: Sequence[SequencedRecord] = ()

    @property
    def name(self) -> str:
        return self._client.name

    async def check_tail(self) -> StreamPosition:
        tail = await self._client.check_tail()
        self._note_tail(tail.seq_num)
        return tail

    async def peek(self, seq_num: int, count: int) -> Sequence[StreamRecord]:
        return await self._client.peek(seq_num, count)

    async def read(self, seq_num: int) -> AsyncGenerator[Sequence[StreamRecord]]:
        while True:
            self._more.clear()
            batch: Sequence[StreamRecord] = ()
            if self._own and self._own[0].seq_num == seq_num:
                batch, self._own = self._own, ()
            elif seq_num < self._tail:
                batch = await self._client.peek(seq_num, _PEEK)
            if batch:
                seq_num = batch[-1].seq_num + 1
                yield batch
            else:
                await self._more.wait()

    async def append(
        self,
        records: Sequence[Record],
        *,
        match_seq_num: int | None = None,
        fencing_token: str | None = None,
    ) -> Appended:
        done = await self._client.append(
            records, match_seq_num=match_seq_num, fencing_token=fencing_token
        )
        self._own = [
            SequencedRecord(SeqNum(seq_num), Timestamp(0), record.headers, record.body)
            for seq_num, record in enumerate(records, done.start)
        ]
        self._note_tail(done.end)
        return done

    def _note_tail(self, seq_num: int) -> None:
        self._tail = max(self._tail, seq_num)
        self._more.set()
