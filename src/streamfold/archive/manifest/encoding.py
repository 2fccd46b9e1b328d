"""Manifests as JSON: parsed strictly, and written so that equal manifests give equal bytes.

Artifact files are named:

    epoch=<N>/snapshot-<to>-<attempt>[-b<bucket>]<extension>
    epoch=<N>/diff-<from>-<to>-<attempt>[-b<bucket>]<extension>

Positions are padded, so listings are in position order. Each attempt to write an artifact has its
own id, so no two writers, and no two attempts of one writer, ever use the same name. Names in the
published layout have neither padding nor an attempt.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import msgspec

from streamfold.archive.errors import ManifestInvalidError
from streamfold.archive.manifest.model import (
    MANIFEST_VERSION,
    Artifact,
    FormatFiles,
    Manifest,
    ManifestObject,
    Part,
    Pin,
    RetiredFile,
    Source,
    SourceRange,
    Writer,
    check_manifest,
)
from streamfold.archive.manifest.positions import PositionOrder
from streamfold.errors import FormatUnsupportedError, InvalidError
from streamfold.undecodable import UNDECODABLE

E = TypeVar("E", bound=ManifestObject)

#: Fields that are written even if null, as the published format requires.
_ALWAYS = frozenset({"from_position", "artifacts", "formats"})


def read_manifest(data: bytes, order: PositionOrder | None = None) -> Manifest:
    """Decode a manifest and check its rules. Preserves unknown fields.

    `order` is needed only for positions whose order is not one of `KNOWN_ORDERS`.
    """
    raw = _decode(data)
    manifest = _take(
        Manifest,
        raw,
        artifacts=lambda value: tuple(map(_read_artifact, _list(value))),
        writer=lambda value: value and _take(Writer, value),
        source=lambda value: value and _take(Source, value),
        pins=lambda value: tuple(_take(Pin, pin) for pin in _list(value)),
        retired=lambda value: tuple(_take(RetiredFile, retired) for retired in _list(value)),
    )
    check_manifest(manifest, order)
    return manifest


def write_manifest(manifest: Manifest) -> bytes:
    """Return the stored form: fixed field order, two-space indent, final newline."""
    encoded = [msgspec.Raw(_encoded_artifact(artifact)) for artifact in manifest.artifacts]
    whole = to_json(msgspec.structs.replace(manifest, artifacts=())) | {"artifacts": encoded}
    return msgspec.json.format(msgspec.json.encode(whole), indent=2) + b"\n"


#: The JSON of existing artifacts, by identity, because each commit writes all of them again.
_encoded: dict[int, tuple[weakref.ref[Artifact], bytes]] = {}


def _encoded_artifact(artifact: Artifact) -> bytes:
    number = id(artifact)
    if number not in _encoded:
        ref = weakref.ref(artifact, lambda _: _encoded.pop(number, None))
        _encoded[number] = ref, msgspec.json.encode(to_json(artifact))
    return _encoded[number][1]


def to_json(value: Any) -> Any:
    """Return an entry as plain JSON values. Omits absent fields and puts unknown ones last."""
    if isinstance(value, ManifestObject):
        fields = msgspec.structs.asdict(value)
        extra = fields.pop("extra")
        defaults = _defaults(type(value))
        written = {
            name: to_json(field)
            for name, field in fields.items()
            if name in _ALWAYS or name not in defaults or field != defaults[name]
        }
        return written | extra
    if isinstance(value, dict):
        return {name: to_json(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    return value


# Both functions are cached, because msgspec evaluates all annotations of a class on each call.
@cache
def _field_names(kind: type[ManifestObject]) -> frozenset[str]:
    return frozenset(field.name for field in msgspec.structs.fields(kind)) - {"extra"}


@cache
def _defaults(kind: type[ManifestObject]) -> dict[str, Any]:
    optional = {field.name: field for field in msgspec.structs.fields(kind) if not field.required}
    optional.pop("manifest_version", None)
    return {
        name: field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
        for name, field in optional.items()
    }


def _decode(data: bytes) -> dict[str, Any]:
    try:
        raw = msgspec.json.decode(data)
    except UNDECODABLE as error:
        raise ManifestInvalidError(f"the manifest is not JSON ({error}): restore it") from None
    if not isinstance(raw, dict):
        raise ManifestInvalidError("the manifest is not a JSON object: restore it")
    version = raw.get("manifest_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ManifestInvalidError(f"manifest_version is {version!r}: it must be a number from 1")
    if version > MANIFEST_VERSION:
        raise FormatUnsupportedError(
            f"manifest_version is {version}, and this version of Streamfold reads up to "
            f"{MANIFEST_VERSION}: upgrade it",
            code="manifest_version",
        )
    return raw


def _read_artifact(raw: Any) -> Artifact:
    def read_formats(value: Any) -> dict[str, FormatFiles]:
        return {name: _read_files(name, files, raw) for name, files in _dict(value).items()}

    return _take(
        Artifact,
        raw,
        formats=read_formats,
        source_range=lambda value: value and _take(SourceRange, value),
    )


def _read_files(format_id: str, raw: Any, artifact: Any) -> FormatFiles:
    files = _take(FormatFiles, raw, parts=lambda value: tuple(_take(Part, p) for p in _list(value)))
    if files.parts:
        return files
    # Other writers list no parts. They write one file, whose name derives from the artifact.
    try:
        path = published_path(
            format_id,
            epoch=artifact["epoch"],
            from_position=artifact["from_position"],
            to_position=artifact["to_position"],
        )
    except (InvalidError, KeyError, TypeError) as error:
        raise ManifestInvalidError(f"an artifact has no usable path: {error}") from None
    part = Part(path=path, uri=files.uri, size_bytes=files.size_bytes)
    return msgspec.structs.replace(files, parts=(part,))


def _take(kind: type[E], raw: Any, **readers: Callable[[Any], Any]) -> E:
    fields = _field_names(kind)
    members: dict[str, Any] = {name: value for name, value in _dict(raw).items() if name in fields}
    for name, read in readers.items():
        if name in members:
            members[name] = read(members[name])
    extra = {name: value for name, value in raw.items() if name not in fields}
    try:
        return msgspec.convert({**members, "extra": extra}, kind)
    except msgspec.ValidationError as error:
        raise ManifestInvalidError(f"the manifest's {kind.__name__} is wrong: {error}") from None


def _dict(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ManifestInvalidError(f"the manifest has {type(value).__name__} instead of an object")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ManifestInvalidError(f"the manifest has {type(value).__name__} instead of a list")
    return value


#: File extensions of the two published formats.
PUBLISHED_EXTENSIONS = {"jsonl": ".jsonl", "protobuf": ".pb"}


def artifact_path(
    order: PositionOrder,
    *,
    epoch: int,
    from_position: str | None,
    to_position: str,
    attempt: str,
    extension: str,
    bucket: int | None = None,
) -> str:
    """Return the path of one file, relative to the manifest's folder."""
    if not re.fullmatch(r"[A-Za-z0-9]{8,64}", attempt):
        raise InvalidError(f"attempt {attempt!r} must be 8 to 64 letters and digits")
    names = [] if from_position is None else [order.sortable(from_position)]
    names += [order.sortable(to_position), attempt]
    names += [] if bucket is None else [f"b{bucket:05d}"]
    kind = "snapshot" if from_position is None else "diff"
    return f"epoch={epoch}/{kind}-{'-'.join(map(sanitised, names))}{extension}"


def published_path(
    format_id: str, *, epoch: int, from_position: str | None, to_position: str
) -> str:
    """Return the published format's path, which applies to writers without `path` fields."""
    if format_id not in PUBLISHED_EXTENSIONS:
        raise InvalidError(
            f"format {format_id!r} has no path in the manifest, and no published one"
        )
    extension = PUBLISHED_EXTENSIONS[format_id]
    return derived_path(epoch, from_position, to_position, extension)


def derived_path(epoch: int, from_position: str | None, to_position: str, extension: str) -> str:
    """Return the path that readers of the published layout derive from an artifact."""
    positions = [to_position] if from_position is None else [from_position, to_position]
    names = [re.sub(r"[/: ]", "_", position) or "0" for position in positions]
    kind = "snapshot" if from_position is None else "diff"
    return f"epoch={epoch}/{kind}-{'-'.join(names)}{extension}"


def sanitised(text: str) -> str:
    """Return `text`, replacing every character that some storage or URI would not accept unchanged."""
    return re.sub(r"[^A-Za-z0-9._+-]", "_", text)
