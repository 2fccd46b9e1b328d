"""The replication protocol: messages of a slot as they come, and answers that only the ingester gives.

| message | bytes |
|---|---|
| `w` from the server | its position, the end of the log, the time; then a message of pgoutput |
| `k` from the server | the end of the log that was sent, the time, whether it wants an answer |
| `r` to the server | positions written, flushed and applied, the time, whether we want an answer |
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from streamfold.errors import MalformedError
from streamfold.ingest.postgres.libpq import CopyConnection
from streamfold.ingest.postgres.pgoutput import EPOCH_US, LSN_ZERO, Lsn

if TYPE_CHECKING:
    # Only for types: at run time this would load the compiler.
    from streamfold.ingest.postgres.encoding.runs import Run, RunReader

#: Bytes before the message of pgoutput, and of a keepalive.
DATA_HEAD, KEEPALIVE_BYTES = 25, 18
_DATA, _KEEPALIVE = ord("w"), ord("k")
_DATA_END, _KEEPALIVE_END = struct.Struct(">8xQ"), struct.Struct(">Q")
_STATUS: Final = struct.Struct(">cQQQq?")
#: Messages, and their bytes, that Python takes at once.
_MESSAGES: Final = 2000
_MESSAGES_BYTES: Final = 1 << 20


class Messages(Protocol):
    """Messages of pgoutput, by number."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int, /) -> bytes: ...


class Gathered(NamedTuple):
    """What came, with the heads of messages."""

    messages: int
    size: int
    #: Whether that was all for now; otherwise there may be no room for more.
    drained: bool


class Received(NamedTuple):
    """Messages of pgoutput that were gathered."""

    messages: Messages
    #: End of the log as the last message has it; 0 without one.
    wal_end: Lsn
    #: Whether the server wants an answer.
    asked: bool
    #: The messages as the kernel takes them; None if Python read them.
    run: Run | None = None


def split_messages(found: Sequence[bytes]) -> Received:
    """Return the messages of pgoutput within those of the protocol; MalformedError if it is none."""
    messages, wal_end, asked = [], 0, False
    for message in found:
        kind = message[0] if message else -1
        if kind == _DATA and len(message) >= DATA_HEAD:
            (wal_end,) = _DATA_END.unpack_from(message, 1)
            messages.append(message[DATA_HEAD:])
        elif kind == _KEEPALIVE and len(message) == KEEPALIVE_BYTES:
            (wal_end,) = _KEEPALIVE_END.unpack_from(message, 1)
            asked = asked or message[-1] != 0
        else:
            raise unexpected(message[:1])
    return Received(messages, Lsn(wal_end), asked)


def unexpected(kind: bytes) -> MalformedError:
    return MalformedError(
        f"a message {kind!r} of the replication protocol is cut off, or of an unknown kind: check that "
        "the server is PostgreSQL, with no program in between that changes what it sends"
    )


class Replication:
    """A connection that follows a slot; opened by `Database.connect_replication`."""

    def __init__(self, connection: Any, slot: str, publication: str) -> None:
        # Not by psycopg2, which takes letters beyond ASCII for Latin-1: from version 18 on, PostgreSQL
        # sends nothing of a publication that does not exist, and only warns.
        slot, name = (text.replace('"', '""') for text in (slot, publication))
        names = f'"{name}"'.replace("'", "''")
        self._cursor = connection.cursor()
        self._cursor.start_replication_expert(
            f'START_REPLICATION SLOT "{slot}" LOGICAL 0/0 '
            f"(proto_version '1', publication_names '{names}')",
            decode=False,
        )
        self._copying = CopyConnection(connection)
        #: What Python gathered.
        self._messages: list[bytes] = []
        #: The end of the log that the server named last, in what was taken.
        self.wal_end = LSN_ZERO
        #: Whether the server wants an answer.
        self.asked = False

    def fileno(self) -> int:
        return self._copying.fileno()

    def gather(self, reader: RunReader | None) -> Gathered:
        """Take what has come; by the kernel, if there is a reader. Never waits.

        Raises psycopg2's error if the connection is broken, or the server has ended it.
        """
        if reader is None:
            pulled = self._copying.pull(_MESSAGES, _MESSAGES_BYTES)
            self._messages += pulled.messages
            size = sum(map(len, pulled.messages))
            return Gathered(len(pulled.messages), size, pulled.drained)
        count, size = len(reader), reader.size
        drained = reader.pull(self._copying)
        return Gathered(len(reader) - count, reader.size - size, drained)

    def take(self, reader: RunReader | None) -> Received:
        """Return what was gathered; with a reader, what it gathered."""
        if self._messages or reader is None:
            received, self._messages = split_messages(self._messages), []
        else:
            received = reader.take_run()
        self.wal_end = received.wal_end or self.wal_end
        self.asked = self.asked or received.asked
        return received

    def confirm(self, lsn: Lsn, *, ask: bool) -> None:
        """Tell the server that everything before a position is durable, and `ask` it for an answer."""
        now = time.time_ns() // 1000 - EPOCH_US
        self._copying.send(_STATUS.pack(b"r", lsn, lsn, lsn, now, ask))
        self.asked = False
