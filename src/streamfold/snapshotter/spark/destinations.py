"""Picklable destinations of tables and dead letters, opened where they are used.

A dead letter is an undecodable record with the reason, durable before later records are published. It
is written at least once: a repair must deduplicate by seq_num, since a repeated batch may write it
again.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import msgspec
import pyarrow as pa

from streamfold.archive.destinations.aws_credentials import AwsAccess, Profile, Profiles
from streamfold.archive.destinations.destination import Destination
from streamfold.archive.destinations.mirrors import Mirrors
from streamfold.archive.manifest.positions import SEQ_NUM
from streamfold.errors import InvalidError, OutcomeUnknownError
from streamfold.model.records import (
    BATCH_BYTES_MAX,
    BATCH_RECORDS_MAX,
    Header,
    Record,
    metered_size,
)
from streamfold.records.protobuf import encode_append
from streamfold.spark.stream.client import Endpoint, RetryDeadline, ServerConnection, StreamCalls

#: Most bytes of a reason in a header: it may quote the record.
_REASON_BYTES = 1000
#: Metered bytes reserved for a letter's headers; longer bodies are cut.
_HEADER_RESERVE = 4096


@dataclass(frozen=True, slots=True)
class DestinationSpec:
    """A destination's location and credentials; pickled with tasks, never shown whole."""

    url: str
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    #: Where credentials come from; None for the storage's own variables.
    profile: Profile | None = None

    def __post_init__(self) -> None:
        if self.url.startswith("memory:"):
            raise InvalidError(
                "a destination in memory is seen by one process only, and parts are written by "
                "several: give file:///, s3://, gs:// or az://"
            )

    @property
    def uri(self) -> str:
        """The URI of the destination."""
        return self.url.rstrip("/") + "/"

    def open(self) -> Destination:
        """Open the destination; credentials are fetched and renewed as needed."""
        provider, options = None, dict(self.options)
        if self.profile is not None:
            access = _access(self.profile).blob_options()
            provider = access["credential_provider"]
            options = {n: str(v) for n, v in access.items() if isinstance(v, str)} | options
        return Destination.open(self.url, credential_provider=provider, **options)


@lru_cache(maxsize=64)
def _access(profile: Profile) -> AwsAccess:
    """Return the process's access for a profile, so that its role is assumed once."""
    return Profiles({"destination": profile}).access("destination", path="credentials")


def open_mirrors(specs: Sequence[DestinationSpec]) -> Mirrors:
    """Return all destinations of a table, the primary first; a process opens each once."""
    opened = (_opened(s.url, tuple(sorted(s.options.items())), s.profile) for s in specs)
    return Mirrors(list(opened), SEQ_NUM)


@lru_cache(maxsize=256)
def _opened(url: str, options: tuple[tuple[str, str], ...], profile: Profile | None) -> Destination:
    return DestinationSpec(url, dict(options), profile).open()


class DeadLetters(Protocol):
    """Writes dead letters; pickled with tasks."""

    @property
    def location(self) -> str:
        """Where the letters are, for people."""
        ...

    def write(self, letters: pa.Table) -> None:
        """Write the letters of one batch (`seq_num, reason, body`), durable when this returns."""
        ...


@dataclass(frozen=True, slots=True)
class DeadLetterFolder:
    """Writes a file of JSON lines per batch: table, stream, seq_num, reason, body in base64."""

    destination: DestinationSpec
    table: str
    stream: str
    prefix: str = "dead-letters/"

    @property
    def location(self) -> str:
        return f"{self.destination.uri}{self.prefix}"

    def write(self, letters: pa.Table) -> None:
        rows = letters.to_pylist()
        name = f"{self.prefix}{rows[0]['seq_num']:020d}-{rows[-1]['seq_num']:020d}.jsonl"
        content = b"".join(self._line(row) for row in rows)
        asyncio.run(self._put(name, content))

    def _line(self, row: dict[str, Any]) -> bytes:
        body = base64.b64encode(row["body"]).decode()
        origin = {"table": self.table, "stream": self.stream}
        return msgspec.json.encode({**origin, **row, "body": body}) + b"\n"

    async def _put(self, name: str, content: bytes) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            yield content

        await self.destination.open().put(name, pieces)


@dataclass(frozen=True, slots=True)
class DeadLetterStream:
    """Appends the record unchanged, with headers for its origin and the reason."""

    endpoint: Endpoint = field(repr=False)
    target: str
    table: str
    stream: str

    @property
    def location(self) -> str:
        return f"stream {self.target}"

    def write(self, letters: pa.Table) -> None:
        with ServerConnection(self.endpoint) as connection:
            for batch in _appends(self._record(row) for row in letters.to_pylist()):
                self._append(connection, batch)

    def _append(self, connection: ServerConnection, batch: bytes) -> None:
        deadline = RetryDeadline(self.endpoint.retry_timeout)
        while True:
            try:
                StreamCalls(connection).append(self.target, batch)
                return
            except OutcomeUnknownError as error:
                deadline.wait(self.endpoint, error)

    def _record(self, row: dict[str, Any]) -> Record:
        headers = {
            "table": self.table.encode(),
            "stream": self.stream.encode(),
            "seq_num": b"%d" % row["seq_num"],
            "reason": row["reason"].encode()[:_REASON_BYTES],
        }
        # The letter must fit into an append; the source stream has the whole body.
        body = row["body"][: BATCH_BYTES_MAX - _HEADER_RESERVE]
        return Record(body, tuple(Header(name.encode(), value) for name, value in headers.items()))


def _appends(records: Iterator[Record]) -> Iterator[bytes]:
    """Yield the records as append inputs, each as large as possible."""
    inputs: list[bytes] = []
    size = 0
    for record in records:
        metered = metered_size(record)
        if inputs and (len(inputs) == BATCH_RECORDS_MAX or size + metered > BATCH_BYTES_MAX):
            yield b"".join(inputs)
            inputs, size = [], 0
        inputs.append(encode_append(record))
        size += metered
    if inputs:
        yield b"".join(inputs)
