"""Rows beside the records, as msgpack maps: fields may be added, their names never change meaning."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from streamfold.errors import DataCorruptError
from streamfold.model.access_tokens import AccessToken
from streamfold.model.configs import BasinConfig, Cipher, StreamConfig
from streamfold.model.positions import SeqNum, StreamPosition, Timestamp
from streamfold.model.traits import StreamTraits


class FormatRow(msgspec.Struct, frozen=True):
    """The store as a whole."""

    version: int


class CounterRow(msgspec.Struct, frozen=True):
    following: int


class SpaceRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the store held some seconds ago."""

    live: int
    #: Bytes deleted that tables may still hold; None in rows of versions that did not count them.
    deleted: int | None = None


class BasinRow(msgspec.Struct, frozen=True, omit_defaults=True):
    created_at: int
    config: BasinConfig
    #: Hash of request token and requested configuration, if the creation had a token.
    creation: bytes | None = None
    deleted_at: int | None = None
    #: None = the store's default, as for basins that were created before there was a choice.
    location: str | None = None


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """Records below `end` that a fork has from another stream."""

    stream_id: int
    end: int


class StreamRow(msgspec.Struct, frozen=True, omit_defaults=True):
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
        """Streams that stay as long as this one."""
        if self.forked_from is None:
            return ()
        return (*{self.forked_from, *(segment.stream_id for segment in self.lineage)},)


class StateRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """What of a stream's state its records do not tell."""

    fencing_token: str = ""
    #: Records below are trimmed, whether or not they are deleted yet.
    trim_point: int = 0
    #: Tail and last arrival at the time when the last chunk was deleted: nothing else tells then.
    bare_seq_num: int = 0
    bare_timestamp: int = 0
    bare_arrived_at: int = 0
    #: No record comes any more.
    closed: bool = False
    #: Producer, epoch and sequence of the append that closed the stream.
    closed_by: tuple[str, int, int] | None = None
    #: The last Stream-Seq.
    stream_seq: str | None = None
    #: Whether there are rows of producers.
    producers: bool = False
    #: The stream does not expire before this, ms since the Unix epoch.
    lease_until: int = 0

    @property
    def bare_tail(self) -> StreamPosition:
        return StreamPosition(SeqNum(self.bare_seq_num), Timestamp(self.bare_timestamp))


class CleanupRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """Work for the background: delete the chunks of a stream that are trimmed, or all of it."""

    basin: str
    stream: str
    #: The stream is deleted: everything of it is to go, its name last.
    purge: bool = False
    #: Of a deleted fork: the streams that it does not need any more.
    ancestors: tuple[int, ...] = ()


class ProducerRow(msgspec.Struct, frozen=True):
    """The newest epoch of a producer and the last number that it sent in it."""

    epoch: int
    seq: int
    #: When that was, ms since the Unix epoch.
    at: int


class ForkRow(msgspec.Struct, frozen=True):
    """Where a fork is: it needs records of the stream that the row is about."""

    basin: str
    stream: str


class SnapshotRow(msgspec.Struct, frozen=True):
    """A snapshot: its bytes are a blob, this row makes them one."""

    content_type: str
    digest: str
    size: int
    created_at: int
    blob: str


class TokenRow(msgspec.Struct, frozen=True):
    """An access token. What proves it is known by its SHA-256 alone."""

    token: AccessToken
    digest: bytes


class LevelRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """Bytes of records that a stream held in the course of an hour."""

    #: Before the first change in this hour.
    opening: int = 0
    #: At the end of each minute (0 to 59) in which they changed.
    levels: dict[int, int] = {}


class HeldRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """Bytes of records that a stream holds: of its stored chunks below `counted_to`, exactly."""

    counted_to: int = 0
    held: int = 0
    #: The hour of the last change, and its course.
    hour: int = 0
    course: LevelRow = LevelRow()


class UsageRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was used in an hour."""

    #: Amounts by name and minute (0 to 59).
    amounts: dict[str, dict[int, int]] = {}
    #: Bytes of records held when last looked.
    storage: int | None = None
    #: Basins that were seen to have a stream; of the account only.
    basins: tuple[str, ...] = ()


Row = TypeVar("Row", bound=msgspec.Struct)

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type[Any], msgspec.msgpack.Decoder[Any]] = {}


def encode(row: msgspec.Struct) -> bytes:
    return _encoder.encode(row)


def decode(value: bytes, kind: type[Row]) -> Row:
    """`value` as a row of `kind`, or an error that says what storage holds instead."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        row: Row = decoder.decode(value)
    except msgspec.MsgspecError as error:
        raise DataCorruptError(f"a stored {kind.__name__} cannot be read: {error}") from error
    return row
