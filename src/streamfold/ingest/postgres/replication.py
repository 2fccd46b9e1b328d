"""The replication protocol: reads a slot's messages, and sends the ingester's own status updates.

| message | bytes |
|---|---|
| `w` from the server | its position, the end of the log, the time, then a pgoutput message |
| `k` from the server | the end of the log sent so far, the time, whether it wants an answer |
| `r` to the server | positions written, flushed and applied, the time, whether we want an answer |
"""

from __future__ import annotations

import struct
import time
from typing import Any, Final, NamedTuple

from streamfold._native import CodecError, Run
from streamfold.errors import MalformedError
from streamfold.ingest.postgres.connection import CopyConnection
from streamfold.ingest.postgres.pgoutput import EPOCH_US, LSN_ZERO, Lsn

_STATUS: Final = struct.Struct(">cQQQq?")


class Gathering(NamedTuple):
    """The messages that arrived, and their bytes including headers."""

    messages: int
    size: int
    #: Whether nothing more is available now. If False, there may be no room for more.
    drained: bool


class MessageRun(NamedTuple):
    """Gathered pgoutput messages."""

    run: Run
    #: End of the log according to the last message, or 0.
    wal_end: Lsn
    #: Whether the server wants a reply.
    asked: bool


def _unexpected(kind: int) -> MalformedError:
    shown = bytes((kind,)) if kind < 256 else b""
    return MalformedError(
        f"a message {shown!r} of the replication protocol is cut off, or of an unknown kind: check "
        "that the server is PostgreSQL, with no program in between that changes what it sends"
    )


class Replication:
    """A connection that follows a slot, opened by `Database.connect_replication`."""

    def __init__(self, connection: Any, slot: str, publication: str) -> None:
        # psycopg2's own method encodes names as Latin-1. From version 18 on, PostgreSQL only warns
        # about a missing publication, and sends nothing.
        slot, name = (text.replace('"', '""') for text in (slot, publication))
        names = f'"{name}"'.replace("'", "''")
        self._cursor = connection.cursor()
        self._cursor.start_replication_expert(
            f'START_REPLICATION SLOT "{slot}" LOGICAL 0/0 '
            f"(proto_version '1', publication_names '{names}')",
            decode=False,
        )
        self._copying = CopyConnection(connection)
        self._reader = self._copying.reader()
        #: The last end of the log returned by `take`.
        self.wal_end = LSN_ZERO
        #: Whether the server wants a reply.
        self.asked = False

    def fileno(self) -> int:
        return self._copying.fileno()

    def gather(self) -> Gathering:
        """Gather what has arrived, without waiting.

        If the connection is broken or the server has ended it, raises psycopg2's error, but only after
        everything before that has been taken.
        """
        reader = self._reader
        count, size = len(reader), reader.size
        drained = reader.pull(self._copying.pointer)
        if drained is None and not len(reader):
            raise self._copying.failure()
        return Gathering(len(reader) - count, reader.size - size, bool(drained))

    def take(self) -> MessageRun:
        """Return what was gathered. Raises MalformedError for bytes that violate the protocol."""
        try:
            run, wal_end, asked = self._reader.take()
        except CodecError as error:
            raise _unexpected(error.args[1]) from None
        self.wal_end = Lsn(wal_end) or self.wal_end
        self.asked = self.asked or asked
        return MessageRun(run, Lsn(wal_end), asked)

    def confirm(self, lsn: Lsn, *, ask: bool) -> None:
        """Confirm that everything before `lsn` is durable. With `ask`, request a reply."""
        now = time.time_ns() // 1000 - EPOCH_US
        self._copying.send(_STATUS.pack(b"r", lsn, lsn, lsn, now, ask))
        self.asked = False
