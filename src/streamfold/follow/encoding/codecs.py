"""States as bytes: JSON, msgpack, or bytes as they are. Arrow tables are in `arrow_codec.py`.

A codec of your own has a name, which travels with every snapshot, and encodes and decodes in pieces: a
large state must not be held twice.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from streamfold.extensions import Extension, Registry
from streamfold.follow.errors import (
    SnapshotCorruptError,
    SnapshotFoldError,
    SnapshotUnsupportedError,
)

S = TypeVar("S")

#: Bytes per piece of an encoded state: small compared with any state that needs pieces.
PIECE_BYTES = 1 << 20


class Codec(Protocol[S]):
    """Turns a state into bytes and back; both run in the event loop, between two records."""

    @property
    def name(self) -> str:
        """Short, lower-case; a snapshot is read only by the codec of the same name. It is also
        the extension of external snapshots.
        """
        ...

    def encode(self, state: S) -> Iterable[bytes | memoryview]:
        """Yield the state in pieces of any size; it does not change meanwhile."""
        ...

    def decode(self, pieces: Iterator[bytes]) -> S:
        """Build the state; the caller keeps no piece, so that each can be freed after use."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecType(Extension):
    """Declares a codec, whose name is the id: `--codec <id>` selects it."""

    open: Callable[[], Codec[Any]]
    #: Whether it takes whatever JSON can say: objects, lists, text, numbers. Folds of the command
    #: line have such states.
    takes_json: bool = True


class JsonCodec(Generic[S]):
    """States as JSON; `of` checks and builds a type of yours, a msgspec Struct for one."""

    name = "json"

    def __init__(self, of: type[S] | Any = Any) -> None:
        self._decoder = msgspec.json.Decoder(of)

    def encode(self, state: S) -> Iterator[memoryview]:
        return cut(msgspec.json.encode(state))

    def decode(self, pieces: Iterator[bytes]) -> S:
        state: S = self._decoder.decode(join(pieces).getbuffer())
        return state


class MsgpackCodec(Generic[S]):
    """States as msgpack: smaller than JSON, and it takes bytes."""

    name = "msgpack"

    def __init__(self, of: type[S] | Any = Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(of)

    def encode(self, state: S) -> Iterator[memoryview]:
        return cut(msgspec.msgpack.encode(state))

    def decode(self, pieces: Iterator[bytes]) -> S:
        state: S = self._decoder.decode(join(pieces).getbuffer())
        return state


class BytesCodec:
    """States that are bytes already."""

    name = "bin"

    def encode(self, state: bytes) -> Iterator[memoryview]:
        return cut(state)

    def decode(self, pieces: Iterator[bytes]) -> bytes:
        return join(pieces).getvalue()


def cut(data: bytes) -> Iterator[memoryview]:
    """The bytes in pieces, without copying them."""
    view = memoryview(data)
    for start in range(0, len(view), PIECE_BYTES):
        yield view[start : start + PIECE_BYTES]


def join(pieces: Iterable[bytes]) -> io.BytesIO:
    """All pieces in one buffer; unlike `b"".join`, no piece is kept while the next one comes."""
    buffer = io.BytesIO()
    for piece in pieces:
        buffer.write(piece)
    return buffer


def decode_state(codec: Codec[S], written_with: str, name: str, pieces: Iterator[bytes]) -> S:
    """The state of the snapshot `name`, whose bytes are known to be as they were written."""
    if written_with != codec.name:
        raise SnapshotUnsupportedError(
            name, f"it was written with codec {written_with}, this reader has {codec.name}"
        )
    try:
        return codec.decode(pieces)
    except Exception as error:  # whatever a codec raises, it cannot use the snapshot
        raise SnapshotCorruptError(name, f"codec {codec.name} cannot decode it: {error}") from error


def check_fold(name: str, made_with: str | None, fold: str | None) -> None:
    """Raise SnapshotFoldError if another fold made the snapshot `name`; unnamed folds fit all."""
    if made_with is not None and fold is not None and made_with != fold:
        raise SnapshotFoldError(name, made_with, fold)


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

#: Every codec that can be named.
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
