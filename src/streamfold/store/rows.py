"""Rows other than records, as msgpack maps: fields may be added, but never change their meaning."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from streamfold.errors import DataCorruptError
from streamfold.model.access_tokens import AccessToken
from streamfold.model.configs import BasinConfig, Cipher, StreamConfig
from streamfold.model.positions import STREAM_START, SeqNum, StreamPosition, Timestamp
from streamfold.model.resources import StreamTraits
from streamfold.undecodable import UNDECODABLE


class FormatRow(msgspec.Struct, frozen=True):
    """The store as a whole."""

    version: int


class CounterRow(msgspec.Struct, frozen=True):
    following: int


class SpaceRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """Live and dead bytes of the store, as of some seconds ago."""

    live: int
    #: Bytes deleted that tables may still hold; None in rows of versions that did not count them.
    deleted: int | None = None


class BasinRow(msgspec.Struct, frozen=True, omit_defaults=True):
    created_at: int
    config: BasinConfig
    #: Hash of request token and requested configuration, if the creation had a token.
    creation: bytes | None = None
    deleted_at: int | None = None
    #: None = the store's default; older basins have no location.
    location: str | None = None


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """Records below `end` that a fork inherits from another stream."""

    stream_id: int
    end: int


class StreamRow(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    id: int
    created_at: int
    config: StreamConfig
    cipher: Cipher | None = None
    creation: bytes | None = None
    deleted_at: int | None = None
    traits: StreamTraits | None = None
    #: Of a fork: where its records are that it has not written itself, in order of their ends.
    lineage: tuple[Segment, ...] = ()
    #: Of a fork: the stream that it is one of.
    forked_from: int | None = None

    @property
    def ancestors(self) -> tuple[int, ...]:
        """Streams that are kept as long as this one."""
        if self.forked_from is None:
            return ()
        return (*{self.forked_from, *(segment.stream_id for segment in self.lineage)},)


class TailMark(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A stream's tail as of the commit that wrote it."""

    seq_num: int
    timestamp: int
    #: When the last record arrived, or the stream was created; ms since the Unix epoch.
    arrived_at: int


class StateRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """What opening a stream needs besides its StreamRow; every commit with records rewrites it."""

    fencing_token: str = ""
    #: Records below are trimmed, whether or not they are deleted yet.
    trim_point: int = 0
    #: None in rows of format 3 and earlier: then the last chunk gives the tail.
    tail: TailMark | None = None
    #: Only in rows without `tail`: the tail and the last arrival before the last chunk was deleted.
    bare_seq_num: int = 0
    bare_timestamp: int = 0
    bare_arrived_at: int = 0
    #: Whether the stream takes no more records.
    closed: bool = False
    #: Producer, epoch and sequence of the append that closed the stream.
    closed_by: tuple[str, int, int] | None = None
    #: The last Stream-Seq.
    stream_seq: str | None = None
    #: Whether the stream has rows of producers.
    producers: bool = False
    #: The stream does not expire before this, ms since the Unix epoch.
    lease_until: int = 0

    @property
    def bare_tail(self) -> StreamPosition:
        if not self.bare_seq_num and not self.bare_timestamp:
            return STREAM_START  # the same object for nearly all streams
        return StreamPosition(SeqNum(self.bare_seq_num), Timestamp(self.bare_timestamp))


class CleanupRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """Work for the background: delete the chunks of a stream that are trimmed, or all of it."""

    basin: str
    stream: str
    #: Whether the stream is deleted: then everything is to be removed, its name last.
    purge: bool = False
    #: Of a deleted fork: the streams whose records it no longer needs.
    ancestors: tuple[int, ...] = ()


class ProducerRow(msgspec.Struct, frozen=True):
    """The newest epoch of a producer and its last sequence number."""

    epoch: int
    seq: int
    #: Time of that append, ms since the Unix epoch.
    at: int


class LeftoversRow(msgspec.Struct, frozen=True):
    """Files that no row names, each with the time (ms since the Unix epoch) when that was found."""

    since: dict[str, int]


class ForkRow(msgspec.Struct, frozen=True):
    """A fork that needs records of the stream in the row's key."""

    basin: str
    stream: str


class SnapshotRow(msgspec.Struct, frozen=True):
    """A snapshot; its bytes are a blob, which counts only with this row."""

    content_type: str
    digest: str
    size: int
    created_at: int
    blob: str


class TokenRow(msgspec.Struct, frozen=True):
    """An access token; of its secret only the SHA-256 is stored."""

    token: AccessToken
    digest: bytes


class LevelRow(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Bytes of records that a stream held during an hour."""

    #: Before the first change in this hour.
    opening: int = 0
    #: At the end of each minute (0 to 59) in which they changed.
    levels: dict[int, int] = {}


class HeldRow(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Exact bytes of a stream's stored chunks below `counted_to`."""

    counted_to: int = 0
    held: int = 0
    #: The hour of the last change, and the levels in it.
    hour: int = 0
    course: LevelRow = LevelRow()
    #: No LevelRow of the stream is of an hour before this; 0 = unknown.
    levels_from: int = 0


class FreshBytes(msgspec.Struct, array_like=True, gc=False):
    """Bytes that were appended to a stream since its HeldRow was updated."""

    basin: str
    first_seq_num: int
    end_seq_num: int
    metered: int


class HeldTotalsRow(msgspec.Struct, frozen=True):
    """What is known beyond the HeldRows when a store is closed; only for the opening after `epoch`."""

    epoch: int
    #: Sums of the HeldRows.
    by_basin: dict[str, int]
    fresh: dict[int, FreshBytes]


class UsageRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """Usage in one hour."""

    #: Amounts by name and minute (0 to 59).
    amounts: dict[str, dict[int, int]] = {}
    #: Bytes of records held at the last measurement.
    storage: int | None = None
    #: Basins with a stream; in the account's rows only.
    basins: tuple[str, ...] = ()


Row = TypeVar("Row", bound=msgspec.Struct)

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type[Any], msgspec.msgpack.Decoder[Any]] = {}


def encode(row: msgspec.Struct) -> bytes:
    return _encoder.encode(row)


def decode(value: bytes, kind: type[Row]) -> Row:
    """`value` as a row of `kind`; DataCorruptError if it is not one."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        row: Row = decoder.decode(value)
    except UNDECODABLE as error:
        raise DataCorruptError(f"a stored {kind.__name__} cannot be read: {error}") from error
    return row
