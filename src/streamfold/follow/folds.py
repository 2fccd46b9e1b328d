"""Common folds: last value by key, JSON merge patch, counter."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib import import_module
from typing import Any

import msgspec

from streamfold.errors import InvalidError
from streamfold.follow.clients.client import StreamRecord
from streamfold.follow.restore.replay import FOLD_NAME_MAX, FoldSpec

_decode = msgspec.json.Decoder().decode
#: Decoding errors. Invalid UTF-8 and deep nesting raise types of their own.
_NOT_JSON = (msgspec.DecodeError, UnicodeError, RecursionError)


def last_value(
    field: str = "key", *, header: str | None = None
) -> Callable[[dict[str, Any], StreamRecord], dict[str, Any]]:
    """Return a fold that keeps each key's newest record. The key is a JSON field or a header.

    With a field, the state holds the objects as appended, and an object that contains only the key
    field deletes that key. With a header, the state holds the JSON bodies, and an empty body
    deletes the key.
    """
    header_name = header.encode() if header is not None else None

    def by_field(state: dict[str, Any], record: StreamRecord) -> dict[str, Any]:
        value = _object(record)
        if field not in value:
            raise InvalidError(
                f"record {record.seq_num} has no field {field!r}: name the field with the key"
            )
        key = str(value[field])
        if len(value) == 1:
            state.pop(key, None)
        else:
            state[key] = value
        return state

    def by_header(state: dict[str, Any], record: StreamRecord) -> dict[str, Any]:
        keys = [value for name, value in record.headers if name == header_name]
        if not keys:
            raise InvalidError(
                f"record {record.seq_num} has no header {header!r}: name the header with the key"
            )
        key = keys[0].decode("utf-8", "replace")
        if record.body:
            state[key] = _json(record)
        else:
            state.pop(key, None)
        return state

    return by_field if header is None else by_header


def merge_patch(state: Any, record: StreamRecord) -> Any:
    """Apply a JSON merge patch (RFC 7396): objects merge, null deletes, anything else replaces."""
    return _merge(state, _json(record))


def counter(state: int, record: StreamRecord) -> int:
    """Add the body, a whole number, to the sum. An empty body counts as 1."""
    if not record.body:
        return state + 1
    try:
        return state + int(record.body)
    except ValueError:
        raise InvalidError(
            f"record {record.seq_num} has the body {record.body[:40]!r}: a counter takes whole numbers"
        ) from None


def _merge(target: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    result = target if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merge(result.get(key), value)
    return result


def _json(record: StreamRecord) -> Any:
    try:
        return _decode(record.body)
    except _NOT_JSON as error:
        raise InvalidError(
            f"record {record.seq_num} is not JSON ({error}): use a fold that knows its form"
        ) from None


def _object(record: StreamRecord) -> dict[str, Any]:
    value = _json(record)
    if not isinstance(value, dict):
        raise InvalidError(f"record {record.seq_num} is not a JSON object: it has no fields")
    return value


def find_fold(
    name: str, *, key_field: str = "key", key_header: str | None = None, initial: str | None = None
) -> FoldSpec[Any]:
    """Return the fold named on a command line: a built-in one, or your own as `module:function`.

    The built-in folds are `last-value`, `merge-patch` and `counter`. `initial` is the first state as
    JSON. Without it, built-in folds use their own first state. Your own fold starts with the result
    of its function attribute `initial`, or with an empty object if it has none.
    """
    fold, first = _named(name, key_field, key_header)
    called = _called(name, key_field, key_header)
    if initial is not None:
        try:
            _decode(initial)
        except _NOT_JSON as error:
            raise InvalidError(f"the first state is not JSON ({error}): correct it") from None
        return FoldSpec(fold, lambda: _decode(initial), name=called)
    return FoldSpec(fold, first, name=called)


def _called(name: str, key_field: str, key_header: str | None) -> str:
    """Return the fold's name in snapshots. Folds that can produce different states differ in name."""
    if name == "last-value":
        name += f" by header {key_header}" if key_header else f" by field {key_field}"
    called = name.encode("ascii", "backslashreplace").decode()
    if len(called) <= FOLD_NAME_MAX:
        return called
    digest = hashlib.sha256(called.encode()).hexdigest()
    return f"{called[: FOLD_NAME_MAX - len(digest) - 1]} {digest}"


def _named(name: str, key_field: str, key_header: str | None) -> tuple[Any, Callable[[], Any]]:
    if name == "last-value":
        return last_value(key_field, header=key_header), dict
    if name == "merge-patch":
        return merge_patch, dict
    if name == "counter":
        return counter, int
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise InvalidError(
            f"fold {name!r} is unknown: use last-value, merge-patch, counter, or module:function"
        )
    try:
        fold = getattr(import_module(module), function)
    except (ImportError, AttributeError, TypeError) as error:  # TypeError: a relative name
        raise InvalidError(
            f"fold {name!r} cannot be loaded ({error}): its module must be importable from here"
        ) from error
    if not callable(fold):
        raise InvalidError(f"fold {name!r} is not a function: it takes a state and a record")
    return fold, getattr(fold, "initial", dict)
