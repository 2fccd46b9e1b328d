"""Basins and streams as listed in the catalog, and stream traits."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from streamfold.model.configs import Cipher
from streamfold.model.names import BasinName, StreamName
from streamfold.model.positions import SeqNum

Item = TypeVar("Item")
#: Default content type of streams.
OCTETS = "application/octet-stream"


@dataclass(frozen=True, slots=True)
class BasinInfo:
    """A listed basin. `deleted_at` is set while it is being deleted."""

    name: BasinName
    #: Milliseconds since the Unix epoch.
    created_at: int
    deleted_at: int | None
    #: Location of its records, or None for the store's default.
    location: str | None = None


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """A listed stream. `deleted_at` is set while it is being deleted."""

    name: StreamName
    #: Milliseconds since the Unix epoch.
    created_at: int
    deleted_at: int | None
    cipher: Cipher | None


class StreamStatus(msgspec.Struct, frozen=True):
    """The durable state of a stream."""

    id: int
    traits: StreamTraits
    #: seq_nums of the first remaining record and of the next one to append.
    first: int
    tail: int
    closed: bool


class Provision(enum.StrEnum):
    """The effect of a create or ensure."""

    CREATED = "created"
    UPDATED = "updated"
    NOOP = "noop"


@dataclass(frozen=True, slots=True)
class Page(Generic[Item]):
    """Part of a listing, in byte order of names. `has_more`: whether another follows."""

    items: tuple[Item, ...]
    has_more: bool


class Origin(msgspec.Struct, frozen=True):
    """Where a fork starts in its source, as requested and as resolved."""

    stream: str
    #: The position in the source, where the fork's own records begin unless `sub_offset` is set.
    seq_num: SeqNum
    #: Bytes or messages of the append after that position.
    sub_offset: int = 0


class StreamTraits(msgspec.Struct, frozen=True, omit_defaults=True):
    """Properties fixed when the stream is created."""

    #: As sent by its creator.
    content_type: str = OCTETS
    #: Seconds after the last use at which the stream expires.
    ttl: int | None = None
    #: When the stream expires, in ms since the Unix epoch.
    expires_at: int | None = None
    #: Whether a snapshot trims earlier records. The stream's configuration may override this.
    trim_on_snapshot: bool = False
    origin: Origin | None = None


class Fork(msgspec.Struct, frozen=True):
    """A stream that shares the first records of another, directly or through other forks."""

    name: StreamName
    origin: Origin
    #: Milliseconds since the Unix epoch.
    created_at: int
    #: Set while forks of the fork retain it.
    deleted_at: int | None


class ForkPage(msgspec.Struct, frozen=True):
    """Some forks of a stream, oldest first."""

    #: Where the stream itself was forked from.
    origin: Origin | None
    forks: tuple[Fork, ...]
    #: Where the next page starts, or None on the last page.
    following: int | None


class ProducerProgress(msgspec.Struct, frozen=True):
    """A producer's newest epoch and next sequence number."""

    id: str
    epoch: int
    next_seq: int
    #: Time of its last append, ms since the Unix epoch.
    last_seen_at: int


class Producer(msgspec.Struct, frozen=True):
    """The producer, epoch and sequence number of an append, which identify repetitions."""

    id: str
    epoch: int
    seq: int


class Claim(msgspec.Struct, frozen=True):
    """The conditions and effects of an append."""

    #: In lower case without parameters, or None without content.
    content_type: str | None = None
    producer: Producer | None = None
    #: Greater than in all earlier appends.
    stream_seq: str | None = None
    #: Whether to close the stream.
    close: bool = False


def media_type(content_type: str) -> str:
    """Return `content_type` in lower case without parameters, as compared between appends."""
    return content_type.partition(";")[0].strip().lower()
