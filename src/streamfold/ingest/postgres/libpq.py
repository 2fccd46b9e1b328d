"""The library of PostgreSQL's protocol that psycopg2 uses, called past psycopg2.

psycopg2 makes an object of each message and each row, and answers PostgreSQL by itself, with positions
that the ingester has not noted. Here a connection of psycopg2 is read many messages at once
(`libpq_kernel`, or message by message in Python), and only the ingester answers.

A connection that is used here is not used through psycopg2 until it is closed, and by one thread.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final, NamedTuple

from streamfold.extras import needing_extra

with needing_extra("postgres"):
    import psycopg2
    import psycopg2.errors
    from psycopg2 import _psycopg

_POINTER, _INT, _TEXT = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p
#: By name: what it returns, and what it takes.
_SIGNATURES: Final[dict[str, tuple[Any, list[Any]]]] = {
    "PQexec": (_POINTER, [_POINTER, _TEXT]),
    "PQresultStatus": (_INT, [_POINTER]),
    "PQgetCopyData": (_INT, [_POINTER, _POINTER, _INT]),
    "PQconsumeInput": (_INT, [_POINTER]),
    "PQputCopyData": (_INT, [_POINTER, _TEXT, _INT]),
    "PQflush": (_INT, [_POINTER]),
    "PQfreemem": (None, [_POINTER]),
    "PQgetResult": (_POINTER, [_POINTER]),
    "PQresultErrorMessage": (_TEXT, [_POINTER]),
    "PQresultErrorField": (_TEXT, [_POINTER, _INT]),
    "PQclear": (None, [_POINTER]),
    "PQerrorMessage": (_TEXT, [_POINTER]),
}
#: The field of an error that has its SQLSTATE.
_SQLSTATE: Final = ord("C")
#: States of a result: the statement has ended, COPY sends rows.
_COMMAND_OK, _COPY_OUT = 1, 3


class _Library:
    """The functions of libpq, from the file of psycopg2, which links to it."""

    def __init__(self) -> None:
        loaded = ctypes.CDLL(_psycopg.__file__)
        for name, (returned, taken) in _SIGNATURES.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = returned, taken
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name} is not among the functions of libpq that are used")


LIBRARY: Final = _Library()


class Pulled(NamedTuple):
    """Messages of COPY that were received."""

    messages: list[bytes]
    #: Whether those were all for now.
    drained: bool


class CopyConnection:
    """A connection of psycopg2 that is within COPY, or in the replication protocol, which is one."""

    def __init__(self, connection: Any) -> None:
        #: Keeps it open.
        self._connection = connection
        self.pointer: int = connection.pgconn_ptr

    @classmethod
    def copying(cls, connection: Any, query: str) -> CopyConnection:
        """Start a COPY to the client; raises psycopg2's error if it is refused."""
        copying = cls(connection)
        result = LIBRARY.PQexec(copying.pointer, query.encode())
        if LIBRARY.PQresultStatus(result) != _COPY_OUT:
            raise copying._error_of(result)
        LIBRARY.PQclear(result)
        return copying

    def fileno(self) -> int:
        """Return the socket; raises psycopg2's error if libpq has closed it, as a failed send does."""
        number = int(self._connection.fileno())
        if number < 0:
            raise self.failure()
        return number

    def pull(self, count: int, size: int) -> Pulled:
        """Return what has been received, until it is so many messages, or so many bytes.

        Never waits. Raises psycopg2's error when the connection, or COPY, has ended; what came before
        the end is returned first.
        """
        messages: list[bytes] = []
        consumed, found = False, _POINTER()
        while len(messages) < count and size > 0:
            length = LIBRARY.PQgetCopyData(self.pointer, ctypes.byref(found), 1)
            ended = length < 0
            if length > 0:
                messages.append(self.take(found.value, length))
                size -= length
                consumed = False
            elif consumed and not ended:
                return Pulled(messages, drained=True)
            elif ended or not LIBRARY.PQconsumeInput(self.pointer):
                if messages:
                    break
                raise self.failure()
            else:
                consumed = True
        return Pulled(messages, drained=False)

    def pull_lines(self, size: int) -> bytes:
        """Return lines of COPY, until they have so many bytes, or are the last; waits for them.

        Returns nothing after the last. Raises psycopg2's error if COPY fails.
        """
        lines: list[bytes] = []
        found = _POINTER()
        while size > 0:
            length = LIBRARY.PQgetCopyData(self.pointer, ctypes.byref(found), 0)
            if length < 0:
                if not lines:
                    self.check_end()
                break
            lines.append(self.take(found.value, length))
            size -= length
        return b"".join(lines)

    def check_end(self) -> None:
        """Raise psycopg2's error unless COPY has ended with its last line."""
        result = LIBRARY.PQgetResult(self.pointer)
        if not result or LIBRARY.PQresultStatus(result) != _COMMAND_OK:
            raise self._error_of(result)
        LIBRARY.PQclear(result)

    @staticmethod
    def take(address: int | None, length: int) -> bytes:
        """Return a message that libpq has allocated, and free it."""
        try:
            return ctypes.string_at(address or 0, length)
        finally:
            LIBRARY.PQfreemem(address)

    def send(self, message: bytes) -> None:
        """Send a message; raises psycopg2's error if the connection is broken."""
        sent = LIBRARY.PQputCopyData(self.pointer, message, len(message))
        if sent != 1 or LIBRARY.PQflush(self.pointer) != 0:
            raise self.failure()

    def failure(self) -> psycopg2.Error:
        """Return why nothing more can be read, as psycopg2 would raise it."""
        return self._error_of(LIBRARY.PQgetResult(self.pointer))

    def _error_of(self, result: int | None) -> psycopg2.Error:
        text, code = LIBRARY.PQerrorMessage(self.pointer), None
        if result:
            text = LIBRARY.PQresultErrorMessage(result) or text
            code = LIBRARY.PQresultErrorField(result, _SQLSTATE)
            LIBRARY.PQclear(result)
        message = text.decode(errors="replace") or "the server ended the connection"
        return _error(message, None if code is None else code.decode())


def _error(message: str, code: str | None) -> psycopg2.Error:
    try:
        kind = psycopg2.OperationalError if code is None else psycopg2.errors.lookup(code)
    except KeyError:
        kind = psycopg2.DatabaseError
    error = kind(message)
    error.__setstate__({"pgcode": code, "pgerror": message})
    return error
