"""Basins and streams as the catalog describes them, and the traits of streams."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from streamfold.model.configs import Cipher
from streamfold.model.names import BasinName, StreamName
from streamfold.model.positions import SeqNum

Item = TypeVar("Item")
#: The content type of a stream that was created without one.
OCTETS = "application/octet-stream"


@dataclass(frozen=True, slots=True)
class BasinInfo:
    """A basin in a listing; `deleted_at` is set while its deletion is under way."""

    name: BasinName
    #: Milliseconds since the Unix epoch.
    created_at: int
    deleted_at: int | None
    #: Where its records are; None = the store's default.
    location: str | None = None


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """A stream in a listing; `deleted_at` is set while its deletion is under way."""

    name: StreamName
    #: Milliseconds since the Unix epoch.
    created_at: int
    deleted_at: int | None
    cipher: Cipher | None


class StreamStatus(msgspec.Struct, frozen=True):
    """The durable state of a stream."""

    id: int
    traits: StreamTraits
    #: The first record kept, and the seq_num of the next one.
    first: int
    tail: int
    closed: bool


class Provision(enum.StrEnum):
    """What a create or an ensure did."""

    CREATED = "created"
    UPDATED = "updated"
    NOOP = "noop"


@dataclass(frozen=True, slots=True)
class Page(Generic[Item]):
    """Part of a listing, in byte order of names; `has_more` says whether another follows."""

    items: tuple[Item, ...]
    has_more: bool


class Origin(msgspec.Struct, frozen=True):
    """Where a fork starts in its source, as requested and as found."""

    stream: str
    #: The position in the source; without `sub_offset`, where the fork's own records begin.
    seq_num: SeqNum
    #: Bytes or messages of the append after that position.
    sub_offset: int = 0


class StreamTraits(msgspec.Struct, frozen=True, omit_defaults=True):
    """Fixed when the stream is created."""

    #: As its creator wrote it.
    content_type: str = OCTETS
    #: Seconds after the last use at which the stream expires.
    ttl: int | None = None
    #: When the stream expires, ms since the Unix epoch.
    expires_at: int | None = None
    #: Whether a snapshot trims the records before it; the stream's configuration may override this.
    trim_on_snapshot: bool = False
    origin: Origin | None = None


class Fork(msgspec.Struct, frozen=True):
    """A stream that reads the first records of another, directly or through other forks."""

    name: StreamName
    origin: Origin
    #: Milliseconds since the Unix epoch.
    created_at: int
    #: Set while forks of the fork keep it.
    deleted_at: int | None


class ForkPage(msgspec.Struct, frozen=True):
    """Some forks of a stream, oldest first."""

    #: Where the stream itself was forked.
    origin: Origin | None
    forks: tuple[Fork, ...]
    #: What to start after for the next page; None on the last one.
    following: int | None


class ProducerProgress(msgspec.Struct, frozen=True):
    """How far a producer has come: its newest epoch, and what it appends next."""

    id: str
    epoch: int
    next_seq: int
    #: Time of its last append, ms since the Unix epoch.
    last_seen_at: int


class Producer(msgspec.Struct, frozen=True):
    """The producer, epoch and number of an append, by which repetitions are recognized."""

    id: str
    epoch: int
    seq: int


class Claim(msgspec.Struct, frozen=True):
    """The conditions and effects of an append."""

    #: In lower case and without parameters; None if there is no content.
    content_type: str | None = None
    producer: Producer | None = None
    #: Greater than that of all appends before.
    stream_seq: str | None = None
    #: Whether to close the stream.
    close: bool = False


def media_type(content_type: str) -> str:
    """`content_type` in lower case and without parameters: what must agree between appends."""
    return content_type.partition(";")[0].strip().lower()
