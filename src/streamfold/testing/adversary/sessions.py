"""Sessions: many appends on one connection, and followers at the tail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

from streamfold.records.protobuf import delimited, fields, varint
from streamfold.testing.adversary.client import (
    Answer,
    Client,
    LostError,
    chunk,
    read_chunks,
    read_head,
)
from streamfold.testing.adversary.ledger import (
    Append,
    Breach,
    BrokenPromiseError,
    Ledger,
    Outcome,
    StreamHistory,
)
from streamfold.testing.adversary.reading import (
    Recognizer,
    decode_records,
    observe,
    outcome_of,
    stream_headers,
)
from streamfold.wire.s2.frames import FrameDecoder, encode_frame

#: Seconds without an ack after which a session counts as lost.
_SILENCE = 20.0


def encode_append(append: Append) -> bytes:
    """An AppendInput of S2's protobuf: records, match_seq_num, fencing_token."""
    message = b""
    for command, body in append.records():
        record = delimited(b"\x12", delimited(b"\x12", command.encode())) if command else b""
        content = record + delimited(b"\x1a", body)
        message += b"\x0a" + varint(len(content)) + content
    if append.match is not None:
        message += b"\x10" + varint(append.match)
    if append.token is not None:
        token = append.token.encode()
        message += b"\x1a" + varint(len(token)) + token
    return message


def _ack_start(message: bytes) -> int:
    """The first seq_num of an AppendAck."""
    for tag, start, end in fields(message, 0, len(message)):
        if tag == 0x0A:
            return next((value for tag, value, _ in fields(message, start, end) if tag == 8), 0)
    raise ValueError("an ack without a start")


async def append_all(
    client: Client, ledger: Ledger, history: StreamHistory, appends: Sequence[Append]
) -> None:
    """Send appends without waiting for acks; those without an ack may or may not have happened."""
    headers = {"s2-basin": history.basin, "content-type": "s2s/proto"}
    waiting = list(appends)
    path = f"/v1/streams/{history.name}/records"
    reason = "the session ended"
    try:
        async with (
            asyncio.timeout(_SILENCE),
            client.streaming("POST", path, headers) as (reader, writer),
        ):
            for append in appends:
                writer.write(chunk(encode_frame(encode_append(append))))
            writer.write(chunk(b""))
            status, answered = await read_head(reader)
            if status != 200:
                body = await reader.readexactly(int(answered.get("content-length", 0)))
                answer = Answer(status, answered, body)
                for append in waiting:
                    ledger.end(append, outcome_of(answer), None, f"session: {answer}")
                return
            decoder = FrameDecoder()
            async for piece in read_chunks(reader):
                decoder.feed(piece)
                while waiting and (frame := decoder.next_frame()) is not None:
                    if frame.terminal:
                        reason = repr(frame.body[:120])
                        return
                    ledger.end(waiting.pop(0), Outcome.KEPT, _ack_start(frame.body), "session")
    except (LostError, TimeoutError) as error:
        reason = str(error)
        raise LostError(reason, sent=True) from None
    finally:
        for append in waiting:
            if append.outcome is Outcome.PENDING:
                ledger.end(append, Outcome.UNKNOWN, None, f"session: {reason}")


def may_lose_records(history: StreamHistory) -> bool:
    """Whether records may disappear while somebody reads: by retention, a trim or a snapshot."""
    life = history.life
    return (
        history.age is not None
        or life is None
        or any(snapshot.trims for ancestor in life.ancestors() for snapshot in ancestor.snapshots)
        or any(append.trim is not None for append in history.appends)
    )


async def follow(client: Client, ledger: Ledger, history: StreamHistory, start: int) -> None:
    """Follow a stream by server-sent events: every record counts as seen."""
    headers = stream_headers(history.basin) | {"accept": "text/event-stream"}
    path = f"/v1/streams/{history.name}/records?seq_num={start}&clamp=true"
    changes = history.changes
    recognizer = Recognizer(ledger, history)
    position: int | None = None
    async with client.streaming("GET", path, headers) as (reader, _):
        status, _answered = await read_head(reader)
        if status != 200:
            raise LostError(str(status), sent=True)
        unread = b""
        async for piece in read_chunks(reader):
            *events, unread = (unread + piece).split(b"\n\n")
            for event in events:
                if not event.startswith(b"event: batch"):
                    continue
                batch = json.loads(event[event.index(b"\ndata: ") + 7 :])
                for record in decode_records(batch):
                    if position is not None and record.seq_num < position:
                        raise BrokenPromiseError(
                            history, f"a follower of {history} is sent {record.seq_num} again"
                        )
                    skipped = position is not None and record.seq_num > position
                    if skipped and not may_lose_records(history):
                        raise BrokenPromiseError(
                            history,
                            f"a follower of {history} waits for {position}, and is sent "
                            f"{record.seq_num}",
                            Breach.LOST,
                        )
                    position = record.seq_num + 1
                    named = recognizer.recognize(record)
                    if named is None:
                        continue
                    observe(ledger, *named, record.seq_num)
                    ledger.totals.followed += 1
                    life = history.living
                    if life is not None and history.changes == changes:
                        life.tail = max(life.tail, position)
