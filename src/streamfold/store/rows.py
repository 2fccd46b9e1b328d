"""Rows other than records, stored as msgpack maps. Fields may be added but never change meaning."""

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
    """The format of the whole store."""

    version: int


class CounterRow(msgspec.Struct, frozen=True):
    following: int


class SpaceRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """Live and deleted bytes of the store, as of some seconds ago."""

    live: int
    #: Deleted bytes that tables may still contain; None in rows of versions that did not count
    #: them.
    deleted: int | None = None


class BasinRow(msgspec.Struct, frozen=True, omit_defaults=True):
    created_at: int
    config: BasinConfig
    #: Hash of the request token and requested configuration; None if the creation had no token.
    creation: bytes | None = None
    deleted_at: int | None = None
    #: None = the store's default. Basins of earlier versions have no location.
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
    #: Of a fork: the streams that hold its inherited records, ordered by their ends.
    lineage: tuple[Segment, ...] = ()
    #: Of a fork: the stream that it was forked from.
    forked_from: int | None = None

    @property
    def ancestors(self) -> tuple[int, ...]:
        """The streams that are kept as long as this one."""
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
    """A stream's state besides its StreamRow. Every commit with records rewrites it."""

    fencing_token: str = ""
    #: Records below this are trimmed, whether or not they are deleted yet.
    trim_point: int = 0
    #: None in rows of format 3 and earlier, where the last chunk determines the tail.
    tail: TailMark | None = None
    #: Only in rows without `tail`: the tail and last arrival before the last chunk was deleted.
    bare_seq_num: int = 0
    bare_timestamp: int = 0
    bare_arrived_at: int = 0
    #: Whether the stream rejects further records.
    closed: bool = False
    #: Producer, epoch and sequence number of the append that closed the stream.
    closed_by: tuple[str, int, int] | None = None
    #: The last Stream-Seq.
    stream_seq: str | None = None
    #: Whether the stream has producer rows.
    producers: bool = False
    #: The stream does not expire before this time, in ms since the Unix epoch.
    lease_until: int = 0

    @property
    def bare_tail(self) -> StreamPosition:
        if not self.bare_seq_num and not self.bare_timestamp:
            return STREAM_START  # the same object for nearly all streams
        return StreamPosition(SeqNum(self.bare_seq_num), Timestamp(self.bare_timestamp))


class CleanupRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """Background work: delete a stream's trimmed chunks, or the whole stream."""

    basin: str
    stream: str
    #: Whether the stream is deleted. Then everything is removed, its name last.
    purge: bool = False
    #: Of a deleted fork: the streams whose records it no longer needs.
    ancestors: tuple[int, ...] = ()


class ProducerRow(msgspec.Struct, frozen=True):
    """A producer's newest epoch and last sequence number."""

    epoch: int
    seq: int
    #: Time of the last append, ms since the Unix epoch.
    at: int


class LeftoversRow(msgspec.Struct, frozen=True):
    """Files that no row names, with the time each was first found (ms since the Unix epoch)."""

    since: dict[str, int]


class ForkRow(msgspec.Struct, frozen=True):
    """A fork that needs records of the stream in the row's key."""

    basin: str
    stream: str


class SnapshotRow(msgspec.Struct, frozen=True):
    """A snapshot. Its bytes are in a blob, which is valid only with this row."""

    content_type: str
    digest: str
    size: int
    created_at: int
    blob: str


class TokenRow(msgspec.Struct, frozen=True):
    """An access token. Only the SHA-256 of its secret is stored."""

    token: AccessToken
    digest: bytes


class LevelRow(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Bytes of records that a stream held during one hour."""

    #: Bytes before the hour's first change.
    opening: int = 0
    #: Bytes at the end of each minute (0 to 59) in which they changed.
    levels: dict[int, int] = {}


class HeldRow(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Exact bytes of a stream's stored chunks below `counted_to`."""

    counted_to: int = 0
    size: int = msgspec.field(default=0, name="held")
    #: The hour of the last change, and that hour's levels.
    hour: int = 0
    course: LevelRow = LevelRow()
    #: The stream has no LevelRow for hours before this one; 0 = unknown.
    levels_from: int = 0


class FreshBytes(msgspec.Struct, array_like=True, gc=False):
    """Bytes appended to a stream since its HeldRow was updated."""

    basin: str
    first_seq_num: int
    end_seq_num: int
    metered: int


class HeldTotalsRow(msgspec.Struct, frozen=True):
    """Totals beyond the HeldRows at close. Valid only for the opening that follows `epoch`."""

    epoch: int
    #: Sums over the HeldRows.
    by_basin: dict[str, int]
    fresh: dict[int, FreshBytes]


class UsageRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """Usage in one hour."""

    #: Amounts by name, then by minute (0 to 59).
    amounts: dict[str, dict[int, int]] = {}
    #: Bytes of records held, as last measured.
    storage: int | None = None
    #: Basins with a stream; only in the account's rows.
    basins: tuple[str, ...] = ()


Row = TypeVar("Row", bound=msgspec.Struct)

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type[Any], msgspec.msgpack.Decoder[Any]] = {}


def encode(row: msgspec.Struct) -> bytes:
    return _encoder.encode(row)


def decode(value: bytes, kind: type[Row]) -> Row:
    """Decode `value` as a row of `kind`. Raises DataCorruptError if it is not one."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        row: Row = decoder.decode(value)
    except UNDECODABLE as error:
        raise DataCorruptError(f"a stored {kind.__name__} cannot be read: {error}") from error
    return row
