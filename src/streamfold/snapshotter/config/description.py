"""Shows the configuration in effect, without anything that could be a secret."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from datetime import timedelta
from urllib.parse import urlsplit

import msgspec

from streamfold.archive.schema import TableSchema
from streamfold.model.units import duration_text, size_text
from streamfold.snapshotter.config.model import Configuration

#: Names in files for which the model has shorter ones.
_WRITTEN = {"interval": "diff.interval", "thresholds": "snapshot", "namespace": "schema"}
#: Shared secrets: never shown.
_HIDDEN = ("external_id",)


def describe(configuration: Configuration) -> str:
    """Return one line `path = value` for every setting in effect, in the order of the model."""
    return "\n".join(f"{path} = {value}" for path, value in _lines("", configuration))


def _lines(path: str, value: object) -> Iterator[tuple[str, str]]:
    if value is None or value in ((), {}):
        return
    if isinstance(value, TableSchema):
        for column in value.arrow:
            yield f"{path}.{column.name}", f"{column.type}{'' if column.nullable else ' not null'}"
    elif isinstance(value, msgspec.Struct):
        yield from _named(path, {n: getattr(value, n) for n in value.__struct_fields__})
    elif is_dataclass(value):
        yield from _named(path, {f.name: getattr(value, f.name) for f in fields(value)})
    elif isinstance(value, Mapping):
        yield from _named(path, value)
    elif isinstance(value, tuple) and not _is_plain(value):
        for number, item in enumerate(value):
            yield from _lines(f"{path}[{number}]", item)
    else:
        yield path, _text(path.rpartition(".")[2], value)


def _named(path: str, values: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if name == "raw" and isinstance(value, Mapping):  # a sink's options are beside its type
            yield from _named(path, {k: v for k, v in value.items() if k != "type"})
        elif name == "options":
            yield from _lines(path, value)
        else:
            written = _WRITTEN.get(name, name)
            yield from _lines(f"{path}.{written}" if path else written, value)


def _is_plain(value: tuple[object, ...]) -> bool:
    return all(isinstance(item, str | tuple) for item in value)


def _text(name: str, value: object) -> str:
    if name in _HIDDEN:
        return "(set)"
    if isinstance(value, timedelta):
        return duration_text(value)
    if isinstance(value, tuple):
        return ", ".join(_format_text(item) for item in value)
    if name.endswith("_bytes") and isinstance(value, int):
        return size_text(value)
    if isinstance(value, str) and "://" in value:
        return _bare_url(value)
    return str(value)


def _format_text(item: object) -> str:
    if isinstance(item, tuple):
        form, compression = item
        return str(form) if compression == "none" else f"{form} ({compression})"
    return str(item)


def _bare_url(url: str) -> str:
    """Return the URL without user and query, which may hold secrets."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    query = "?…" if parts.query else ""
    return f"{parts.scheme}://{host}{parts.path}{query}"
