"""Reads the options of extensions from a configuration, by the types that they declare.

An option is a field of `Options`: text, a whole number, a boolean, a duration, a list of names, or one
of several words (`Literal`). Other types are read as msgspec converts them. `msgspec.Meta` may limit
it: `ge` and `le`, or a `pattern`, which `extra={"rule": …}` says in words.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from streamfold.errors import InvalidError
from streamfold.extensions import Extension, Options, Registry
from streamfold.snapshotter.config.section import Section

E = TypeVar("E", bound=Extension)
O = TypeVar("O", bound=Options)  # noqa: E741 - the options


def read_extension(
    section: Section, name: str, registry: Registry[E], default: str | None = None
) -> E | None:
    """Read the setting that selects an extension; None after a problem."""
    found = section.text(name) or (None if section.holds(name) else default)
    if found is None:
        if not section.holds(name):
            section.problem(name, f"is missing: name one of {', '.join(registry.ids())}")
        return None
    if found not in registry:
        section.choice(name, registry.ids(), found)
        return None
    try:
        return registry.get(found)
    except InvalidError as error:
        section.problem(name, error.message)
        return None


def read_options(section: Section, options: type[O]) -> O | None:
    """Read all options and close the section; None after a problem."""
    found, problems = {}, section.problem_count
    for field in msgspec.structs.fields(options):
        value = _read(section, field)
        if value is not None:
            found[field.name] = value
    section.close()
    if section.problem_count > problems:
        return None
    try:
        return msgspec.convert(found, options)
    except msgspec.ValidationError as error:
        section.problem("", str(error))
        return None


def _read(section: Section, field: msgspec.structs.FieldInfo) -> Any:
    kind, rule = _plain(inspect.type_info(field.type))
    if field.required and not section.holds(field.name):
        return section.required(field.name) or None
    match kind:
        case inspect.StrType(pattern=pattern):
            return _matching(section, field.name, pattern, rule)
        case inspect.LiteralType(values=values):
            return section.choice(field.name, [str(value) for value in values], "") or None
        case inspect.IntType(ge=ge, le=le):
            return section.whole(field.name, None, 0 if ge is None else ge, le)
        case inspect.TimeDeltaType():
            return section.duration(field.name, None)
        case inspect.BoolType():
            given = section.raw(field.name)
            return given if isinstance(given, bool) else section.parsed(field.name, None, _boolean)
        case inspect.VarTupleType(item_type=inspect.StrType()):
            return section.texts(field.name, ()) or None
    return section.raw(field.name)


def _plain(kind: inspect.Type) -> tuple[inspect.Type, str | None]:
    """Return the type without `| None` and descriptions, and the rule of a pattern in words."""
    rule = None
    while isinstance(kind, inspect.Metadata | inspect.UnionType):
        if isinstance(kind, inspect.Metadata):
            rule, kind = (kind.extra or {}).get("rule", rule), kind.type
            continue
        others = [t for t in kind.types if not isinstance(t, inspect.NoneType)]
        if len(others) > 1:
            break
        kind = others[0]
    return kind, rule


def _matching(section: Section, name: str, pattern: str | None, rule: str | None) -> str | None:
    found = section.text(name)
    if found is not None and pattern is not None and not re.search(pattern, found):
        section.problem(name, f"{found} must be {rule or f'text that matches {pattern}'}")
    return found


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("must be true or false")
    return text.lower() == "true"
