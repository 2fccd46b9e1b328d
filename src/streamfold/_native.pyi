"""Type stubs of the native extension that `native/` builds."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt

Ends: TypeAlias = npt.NDArray[np.int32]
Texts: TypeAlias = tuple[Ends, npt.NDArray[np.uint8]]
Pairs: TypeAlias = tuple[Ends, Texts, Texts]
#: A stream, the index of its next change, whether a change is held, and a newly held change: its
#: message, table and index. None if the held change is the one that the caller passed.
LeftStream: TypeAlias = tuple[int, int, bool, tuple[int, int, int] | None]

@final
class Door:
    """A listening socket and the connections that it has accepted."""

    def __new__(
        cls, host: str, port: int, *, scope: int, backlog: int, user_timeout: float
    ) -> Door: ...
    @property
    def port(self) -> int: ...
    def fileno(self) -> int: ...
    def start(self, limits: object, tls: tuple[str, str] | None = None) -> None: ...
    def drain(self) -> list[tuple[Any, ...]]: ...
    def wake(self) -> None: ...
    def respond(
        self,
        exchange: int,
        status: int,
        headers: list[tuple[bytes, bytes]],
        body: bytes,
        /,
    ) -> None: ...
    def start_answer(
        self, exchange: int, status: int, headers: list[tuple[bytes, bytes]], /
    ) -> None: ...
    def send(self, exchanges: Sequence[int], data: bytes, /) -> None: ...
    def end(self, exchange: int, /) -> None: ...
    def watch(self, exchange: int, level: int, /) -> None: ...
    def taken(self, exchange: int, /) -> int: ...
    def ask(self, exchange: int, size: int, /) -> None: ...
    def discard_body(self, exchange: int, /) -> None: ...
    def close_exchange(self, exchange: int, /) -> None: ...
    def cut(self, connection: int) -> None: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...

# codec: conversions between the byte forms of records

class CodecError(Exception):
    """Undecodable bytes. `args` are a fault's code and its three fields."""

@final
class Batch:
    """Encoded records that wait for sequence numbers and timestamps."""

    metered: int
    match_seq_num: int | None
    fencing_token: str | None
    #: Index of the first record without a timestamp, or None.
    unstamped: int | None

    @staticmethod
    def of(records: list[Any]) -> Batch: ...
    @staticmethod
    def of_one(body: bytes, timestamp: int | None) -> Batch: ...
    def __len__(self) -> int: ...
    def nameless(self) -> list[tuple[int, int, bytes, bytes]]: ...
    def sequence(
        self, first: int, now: int, floor: int, arrival: bool, uncapped: bool
    ) -> tuple[bytes, int, int]: ...

@final
class Index:
    """The offsets, timestamps and metered bytes of a payload's records."""

    #: Byte offset of each record, and the payload's length.
    offsets: list[int]
    #: One per record, never decreasing.
    timestamps: list[int]
    #: Metered bytes before each record, and the total.
    metered: list[int]
    #: Sequence number of record 0; the others follow without gaps.
    first_seq_num: int
    count: int

    def index_of_timestamp(self, timestamp: int) -> int: ...
    def cut(self, first_index: int, *, count: int, metered: int, until: int | None) -> Cut: ...

@final
class Cut:
    """A half-open range of records within a payload, in records and in bytes."""

    end_index: int
    byte_start: int
    byte_end: int
    metered: int

def parse_append(raw: bytes, records_max: int) -> Batch: ...
def append_records(
    raw: bytes,
) -> list[tuple[int | None, list[tuple[bytes, bytes]], bytes]]: ...
def count_fields(raw: bytes, most: int) -> int: ...
def encode_ack(
    start: int, start_time: int, end: int, end_time: int, tail: int, tail_time: int
) -> bytes: ...
def encode_position(tag: int, seq_num: int, timestamp: int) -> bytes: ...
def measure(payload: bytes | memoryview) -> Index: ...
def decode(
    payload: bytes | memoryview,
) -> tuple[list[int], list[int], list[int], list[bytes], list[bytes], list[bytes]]: ...
def contents(payload: bytes | memoryview) -> tuple[list[int], list[bytes]]: ...
def write_records(payload: bytes | memoryview, base64: bool) -> bytes: ...
def read_columns(
    payload: npt.NDArray[np.uint8], headers: bool, bodies: bool
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64], Pairs | None, Texts | None]: ...
def encode_columns(
    timestamps: npt.NDArray[np.uint64],
    stamped: npt.NDArray[np.bool_],
    headers: Pairs,
    bodies: Texts,
) -> tuple[bytes, npt.NDArray[np.int64], npt.NDArray[np.int64]]: ...
def write_value(kind: int, raw: bytes) -> bytes: ...

@final
class LineWriter:
    """Encodes the COPY lines of one table as records."""

    def __new__(
        cls,
        columns: Sequence[tuple[bytes, int, bool]],
        closing: bytes,
        header: bytes,
        counter: bytes,
        overhead: int,
        key_max: int,
    ) -> LineWriter: ...
    def write(
        self, lines: bytes, at: int, number: int, records: int, room: int
    ) -> tuple[bytes, int, int, int, int, int]: ...

@final
class Run:
    """Messages in one contiguous buffer."""

    @staticmethod
    def of(messages: Sequence[bytes]) -> Run: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> bytes: ...

#: An error message from PostgreSQL or libpq, and its SQLSTATE if it has one.
PostgresFailure: TypeAlias = tuple[bytes, bytes | None]

@final
class Libpq:
    """Functions of libpq on psycopg2's connections, which are passed as addresses."""

    def __new__(cls, path: str) -> Libpq: ...
    def end(self, connection: int) -> PostgresFailure | None: ...
    def send(self, connection: int, message: bytes) -> bool: ...

@final
class MessageReader:
    """Gathers replication messages from one libpq connection."""

    size: int

    def __new__(cls, library: Libpq) -> MessageReader: ...
    def __len__(self) -> int: ...
    def pull(self, connection: int) -> bool | None: ...
    def take(self) -> tuple[Run, int, bool]: ...

def split_messages(messages: Sequence[bytes]) -> tuple[Run, int, bool]: ...

@final
class Encoded:
    """The result of encoding messages."""

    #: The next message. Python must handle it, unless none is left.
    next: int
    #: Records by table.
    counts: list[int]
    touched: list[LeftStream]
    #: Indices of the last messages that began the open transaction, ended one, ended one with a
    #: record, and began one before any record.
    marks: list[int | None]
    #: Stream, record count, metered bytes, and encoded records.
    batches: list[tuple[int, int, int, bytes]]

@final
class ChangeEncoder:
    """Encodes the changes of a replication slot's tables as records."""

    def __new__(
        cls,
        relations: Sequence[tuple[int, int | None]],
        tables: Sequence[Any],
        streams: int,
        names: tuple[bytes, bytes],
    ) -> ChangeEncoder: ...
    def encode(
        self,
        run: Run,
        at: int,
        commit: tuple[int, int] | None,
        touched: Sequence[tuple[int, int, tuple[bytes, int, int] | None]],
        limits: tuple[int, int],
    ) -> Encoded: ...

def trim_memory() -> None: ...
def tune_memory(mapped: int, kept: int, arenas: int) -> None: ...
def end_with_parent(signal: int) -> bool: ...
def write_range(descriptor: int, start: int, size: int) -> None: ...

# engine: SlateDB. Every method that takes `Calls` returns a call number and None, or 0 and its
# result

class EngineError(Exception):
    """A failed engine call. `args` are a code, a message, and the system's error number or None."""

@final
class Calls:
    """The calls of one event loop, and their results."""

    def __new__(cls) -> Calls: ...
    def fileno(self) -> int: ...
    def drain(self) -> list[tuple[int, Any, BaseException | None]]: ...
    def cancel(self, number: int, /) -> None: ...

@final
class Storage:
    """Storage for database files."""

    @staticmethod
    def memory() -> Storage: ...
    @staticmethod
    def local(folder: str, syncs_log: bool) -> Storage: ...
    @staticmethod
    def s3(options: dict[str, str], credentials: Credentials | None = None) -> Storage: ...

@final
class Credentials:
    """The current keys for a bucket."""

    def __new__(cls) -> Credentials: ...
    def wait(self) -> bool: ...
    def provide(self, key_id: str, secret_key: str, token: str | None, until: float) -> None: ...
    def refuse(self, reason: str) -> None: ...
    def close(self) -> None: ...

@final
class Clock:
    """SlateDB's clock, which stamps writes and names tables."""

    def __new__(cls, start: int) -> Clock: ...

@final
class Database:
    """An open database. Dropping it unclosed closes it without a flush."""

    @staticmethod
    def default_settings() -> str: ...
    @staticmethod
    def open(
        calls: Calls,
        storage: Storage,
        path: str,
        settings: str,
        clock: Clock,
        cache: int,
        /,
    ) -> tuple[int, Any]: ...
    @staticmethod
    def open_reader(
        calls: Calls,
        storage: Storage,
        path: str,
        *,
        poll: int,
        lifetime: int,
        memory: int,
        retries: int,
        replay_log: bool,
        follow: bool,
    ) -> tuple[int, Any]: ...
    def commit(self, calls: Calls, rows: Rows, tables: bool = False) -> tuple[int, Any]: ...
    def get_many(self, calls: Calls, keys: Sequence[bytes]) -> tuple[int, Any]: ...
    def scan(
        self,
        calls: Calls,
        start: bytes,
        end: bytes,
        *,
        descending: bool,
        read_ahead: int,
        fetches: int,
    ) -> tuple[int, Any]: ...
    def close(self, calls: Calls, flush: bool) -> tuple[int, Any]: ...

@final
class Rows:
    """Rows that can be committed once."""

    def __new__(cls, ops: list[tuple[bytes, bytes | None]]) -> Rows: ...

@final
class Scan:
    """A running scan."""

    def next(self, calls: Calls, rows: int, size: int) -> tuple[int, Any]: ...

@final
class LogReader:
    """Reads the log files of a database, open or not."""

    def __new__(cls, storage: Storage, path: str) -> LogReader: ...
    def files(self, calls: Calls, after: int) -> tuple[int, Any]: ...
    def rows(self, calls: Calls, number: int) -> tuple[int, Any]: ...
    def check(self, calls: Calls, number: int) -> tuple[int, Any]: ...

@final
class Admin:
    """Inspects a database and changes its manifest."""

    def __new__(cls, storage: Storage, path: str, clock: Clock | None = None) -> Admin: ...
    def manifest(self, calls: Calls, number: int | None = None) -> tuple[int, Any]: ...
    def create_checkpoint(
        self, calls: Calls, name: str, lifetime: int | None = None
    ) -> tuple[int, Any]: ...
    def refresh_checkpoint(
        self, calls: Calls, checkpoint: str, lifetime: int, /
    ) -> tuple[int, Any]: ...
    def delete_checkpoint(self, calls: Calls, checkpoint: str, /) -> tuple[int, Any]: ...
    def compactions(self, calls: Calls) -> tuple[int, Any]: ...
    def submit_compaction(
        self, calls: Calls, young: list[str], runs: list[int], destination: int
    ) -> tuple[int, Any]: ...
    def collect(self, calls: Calls, options: str) -> tuple[int, Any]: ...

@final
class FaultyDisk:
    """A fault-injecting disk for tests: it affects the stores of this process below `root`."""

    def __new__(cls, root: str | os.PathLike[str], seed: int) -> FaultyDisk: ...
    def turn(
        self,
        steps: int = 0,
        number: int = 0,
        rate: float = 1.0,
        delay: float = 0.0,
        hangs: bool = False,
    ) -> None: ...
    def watch(self) -> None: ...
    def next_sync(self) -> Path | None: ...
    def close(self) -> None: ...
