"""Codecs for states: JSON, msgpack, raw bytes. `arrow_codec.py` has the one for Arrow tables.

A codec of your own needs a name, which every snapshot carries, and must encode and decode in
pieces: a large state must not be in memory twice.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from streamfold.errors import ConflictError
from streamfold.extensions import Extension, Registry
from streamfold.follow.errors import (
    SnapshotCorruptError,
    SnapshotUnsupportedError,
)

S = TypeVar("S")

#: Bytes per piece of an encoded state: small compared with any state that needs pieces.
PIECE_BYTES = 1 << 20


class Codec(Protocol[S]):
    """Turns a state into bytes and back. Both run on the event loop, between two records."""

    @property
    def name(self) -> str:
        """A short, lower-case name. Only the codec with the same name reads the snapshot.

        External snapshots also use it as their file extension.
        """
        ...

    def encode(self, state: S) -> Iterable[bytes | memoryview]:
        """Yield the state in pieces of any size. The state does not change in the meantime."""
        ...

    def decode(self, pieces: Iterator[bytes]) -> S:
        """Build the state. The caller retains no piece, so each can be freed after use."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecType(Extension):
    """Declares a codec whose name is its id: `--codec <id>` selects it."""

    open: Callable[[], Codec[Any]]
    #: Whether it can encode any JSON value: objects, lists, text, numbers. Command-line folds
    #: produce such states.
    takes_json: bool = True


class JsonCodec(Generic[S]):
    """JSON codec. With `of`, decodes into and validates your own type, such as a msgspec Struct."""

    name = "json"

    def __init__(self, of: type[S] | Any = Any) -> None:
        self._decoder = msgspec.json.Decoder(of)

    def encode(self, state: S) -> Iterator[memoryview]:
        return cut(msgspec.json.encode(state))

    def decode(self, pieces: Iterator[bytes]) -> S:
        state: S = self._decoder.decode(join(pieces).getbuffer())
        return state


class MsgpackCodec(Generic[S]):
    """Msgpack codec: smaller than JSON, and supports bytes."""

    name = "msgpack"

    def __init__(self, of: type[S] | Any = Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(of)

    def encode(self, state: S) -> Iterator[memoryview]:
        return cut(msgspec.msgpack.encode(state))

    def decode(self, pieces: Iterator[bytes]) -> S:
        state: S = self._decoder.decode(join(pieces).getbuffer())
        return state


class BytesCodec:
    """Codec for states that are already bytes."""

    name = "bin"

    def encode(self, state: bytes) -> Iterator[memoryview]:
        return cut(state)

    def decode(self, pieces: Iterator[bytes]) -> bytes:
        return join(pieces).getvalue()


def cut(data: bytes) -> Iterator[memoryview]:
    """Yield the data in pieces without copying it."""
    view = memoryview(data)
    for start in range(0, len(view), PIECE_BYTES):
        yield view[start : start + PIECE_BYTES]


def join(pieces: Iterable[bytes]) -> io.BytesIO:
    """Join the pieces in one buffer. Unlike `b"".join`, holds no piece while reading the next."""
    buffer = io.BytesIO()
    for piece in pieces:
        buffer.write(piece)
    return buffer


def decode_state(codec: Codec[S], written_with: str, name: str, pieces: Iterator[bytes]) -> S:
    """Decode the state of snapshot `name`, whose bytes are already verified."""
    if written_with != codec.name:
        raise SnapshotUnsupportedError(
            name, f"it was written with codec {written_with}, this reader has {codec.name}"
        )
    try:
        return codec.decode(pieces)
    except Exception as error:  # whatever the codec raises, the snapshot is unusable
        raise SnapshotCorruptError(name, f"codec {codec.name} cannot decode it: {error}") from error


def check_fold(name: str, made_with: str | None, fold: str | None) -> None:
    """Raise ConflictError if another fold made snapshot `name`. Unnamed folds match any."""
    if made_with is not None and fold is not None and made_with != fold:
        raise ConflictError(
            f"snapshot {name} was made with the fold {made_with!r}, not with {fold!r}: use the fold "
            "that made it, or keep the snapshots of each fold in a location of their own",
            code="snapshot_fold_mismatch",
        )


def _open_arrow() -> Codec[Any]:
    from streamfold.follow.encoding.arrow_codec import ArrowCodec  # loads pyarrow

    return ArrowCodec()


JSON = CodecType(id="json", summary="JSON", open=JsonCodec)
MSGPACK = CodecType(id="msgpack", summary="msgpack: smaller, and takes bytes", open=MsgpackCodec)
BYTES = CodecType(
    id="bin", summary="states that are bytes already", open=BytesCodec, takes_json=False
)
ARROW = CodecType(
    id="arrow", summary="Arrow tables, as an IPC stream", open=_open_arrow, takes_json=False
)

#: Every codec that can be selected by name.
CODECS = Registry(
    "streamfold.codecs",
    "codec",
    CodecType,
    {
        "json": f"{__name__}:JSON",
        "msgpack": f"{__name__}:MSGPACK",
        "bin": f"{__name__}:BYTES",
        "arrow": f"{__name__}:ARROW",
    },
)
