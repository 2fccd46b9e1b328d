"""Rows beside the records, as msgpack maps: fields may be added, their names never change meaning."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from streamfold.errors import DataCorruptError
from streamfold.model.configs import BasinConfig, Cipher, StreamConfig
from streamfold.model.positions import SeqNum, StreamPosition, Timestamp


class FormatRow(msgspec.Struct, frozen=True):
    """The store as a whole."""

    version: int


class CounterRow(msgspec.Struct, frozen=True):
    following: int


class BasinRow(msgspec.Struct, frozen=True, omit_defaults=True):
    created_at: int
    config: BasinConfig
    #: Hash of request token and requested configuration, if the creation had a token.
    creation: bytes | None = None
    deleted_at: int | None = None


class StreamRow(msgspec.Struct, frozen=True, omit_defaults=True):
    id: int
    created_at: int
    config: StreamConfig
    cipher: Cipher | None = None
    creation: bytes | None = None
    deleted_at: int | None = None


class StateRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """What of a stream's state its records do not tell."""

    fencing_token: str = ""
    #: Records below are trimmed, whether or not they are deleted yet.
    trim_point: int = 0
    #: Tail and last arrival at the time when the last chunk was deleted: nothing else tells then.
    bare_seq_num: int = 0
    bare_timestamp: int = 0
    bare_arrived_at: int = 0

    @property
    def bare_tail(self) -> StreamPosition:
        return StreamPosition(SeqNum(self.bare_seq_num), Timestamp(self.bare_timestamp))


class CleanupRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """Work for the background: delete the chunks of a stream that are trimmed, or all of it."""

    basin: str
    stream: str
    #: The stream is deleted: everything of it is to go, its name last.
    purge: bool = False


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
