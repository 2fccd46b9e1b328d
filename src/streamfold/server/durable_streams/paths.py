"""Parses Durable Streams URL paths into a stream and a sub-resource."""

from __future__ import annotations

import enum
from typing import Final, NamedTuple
from urllib.parse import quote

from streamfold.errors import InvalidError
from streamfold.model.names import BasinName, StreamName, parse_bucket_name, parse_stream_name
from streamfold.server.http.router import memoize_short
from streamfold.wire.text import SHOWN, ascii_url, decode_segment

#: Streams below this path belong to the default basin, and their names may contain slashes.
ROOT: Final = "/v1/stream/"
#: A first segment below ROOT that no stream can have.
CONTROL: Final = "__ds"
#: Top-level names that the server uses itself. Each would otherwise be a valid bucket name.
RESERVED_BUCKETS: Final = frozenset(("health", "ping", "ready", "metrics", "console", "snapshots"))


class SubResource(enum.StrEnum):
    """A stream's sub-resource. No stream name can end with one of these names."""

    SNAPSHOT = "snapshot"
    SNAPSHOTS = "snapshots"
    RETENTION = "retention"
    BOOTSTRAP = "bootstrap"
    #: Parts of snapshots. The path is `snapshot/{position}/parts`, or without the position.
    PARTS = "snapshot/parts"


_PARTS: Final = frozenset(SubResource)
#: Last segment of a parts path.
_STAGED: Final = "parts"
#: Segment after a bucket that names the list of its streams.
_LIST: Final = "streams"
#: Sub-resources that a position may follow.
POSITIONED: Final = frozenset((SubResource.SNAPSHOT, SubResource.RETENTION))


class StreamPath(NamedTuple):
    """A stream, with its sub-resource and position if the path has them."""

    basin: BasinName
    stream: StreamName
    #: The stream's own path, as the client wrote it.
    path: str
    part: SubResource | None = None
    position: str | None = None


@memoize_short
def parse_stream_path(path_and_basin: tuple[str, BasinName]) -> StreamPath | None:
    """Parse a raw path. Returns None if it cannot name a stream.

    Paths below `ROOT` are in the given basin.
    """
    raw_path, default_basin = path_and_basin
    if raw_path.startswith(ROOT):
        segments = raw_path[len(ROOT) :].split("/")
        segments, part, position = _split_part(segments)
        stream = "/".join(segments)
        return StreamPath(default_basin, _stream(stream), ROOT + stream, part, position)
    segments = raw_path.split("/")[1:]
    if len(segments) < 2 or not segments[0] or segments[0] == "v1":
        return None
    segments, part, position = _split_part(segments)
    if len(segments) != 2 or segments[1] == _LIST:
        return None
    return StreamPath(
        _bucket(segments[0]), _stream(segments[1]), "/" + "/".join(segments), part, position
    )


def parse_bucket(raw_path: str) -> tuple[BasinName, bool] | None:
    """Return the bucket in a raw path, and whether the path names the list of its streams."""
    segments = raw_path.split("/")[1:]
    listed = segments[1:] == [_LIST]
    if not segments[0] or segments[0] == "v1" or (len(segments) > 1 and not listed):
        return None
    return _bucket(segments[0]), listed


def suggest_path(raw_path: str) -> str | None:
    """Suggest the path of a stream whose name was written with slashes below a bucket, or None."""
    segments, part, position = _split_part(raw_path.split("/")[1:])
    if len(segments) < 3 or not all(segments):
        return None
    rest = [text for text in (part, position and quote(position, safe="")) if text]
    return ascii_url("/".join(("", segments[0], "%2F".join(segments[1:]), *rest)))


def _split_part(segments: list[str]) -> tuple[list[str], SubResource | None, str | None]:
    if len(segments) > 2 and segments[-1] == _STAGED:
        if segments[-2] == SubResource.SNAPSHOT:
            return segments[:-2], SubResource.PARTS, None
        if len(segments) > 3 and segments[-3] == SubResource.SNAPSHOT:
            return segments[:-3], SubResource.PARTS, _decode(segments[-2])
    if len(segments) > 1 and segments[-1] in _PARTS:
        return segments[:-1], SubResource(segments[-1]), None
    if len(segments) > 2 and segments[-2] in POSITIONED:
        return segments[:-2], SubResource(segments[-2]), _decode(segments[-1])
    return segments, None, None


def _bucket(segment: str) -> BasinName:
    name = parse_bucket_name(_decode(segment))
    if name in RESERVED_BUCKETS or name.startswith("__"):
        raise InvalidError(f"bucket name {name!r} is reserved: choose another")
    return name


def _stream(text: str) -> StreamName:
    name = _decode(text)
    if name.partition("/")[0] == CONTROL:
        raise InvalidError(f"stream name {name[:SHOWN]!r} begins with {CONTROL}, which is reserved")
    if name.rpartition("/")[2] in _PARTS:
        raise InvalidError(
            f"stream name {name[:SHOWN]!r} ends with a reserved word: choose another"
        )
    if any(segment in (".", "..") for segment in name.split("/")):
        raise InvalidError(
            f"stream name {name[:SHOWN]!r} has '.' or '..' as a segment: choose another"
        )
    return parse_stream_name(name)


def _decode(segment: str) -> str:
    text = decode_segment(segment)
    if text is None:
        raise InvalidError(f"path segment {segment[:SHOWN]!r} is not percent-encoded UTF-8")
    return text
