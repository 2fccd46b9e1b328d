"""Reads plain values with their paths into classes; collects all problems, raises none.

An option is a field of a class: text, a whole number, a boolean, a duration, a list of names, or one of
several words (`Literal`). Other types are read as msgspec converts them. `msgspec.Meta` may limit it:
`ge` and `le`, or a `pattern`, which `extra={"rule": …}` describes in words.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from streamfold.errors import InvalidError
from streamfold.extensions import Extension, Options, Registry, must_be_one_of
from streamfold.model.units import parse_duration, parse_size

T = TypeVar("T")

#: Most characters of a value that a message repeats.
_SHOWN = 60
#: Names of settings that must not be in plain text.
_SECRET = re.compile(r"secret|token|password|passwd|access_key|private_key|api_key", re.IGNORECASE)
E = TypeVar("E", bound=Extension)
O = TypeVar("O", bound=Options)  # noqa: E741 - the options


class Section:
    """One object of a configuration; `close` rejects names that were not read."""

    def __init__(self, raw: object, path: str, problems: list[str]) -> None:
        self._path = path
        self._problems = problems
        self._settings: list[str] = []
        self._values: dict[str, Any] = {}
        if isinstance(raw, dict):
            self._values = {name: value for name, value in raw.items() if value is not None}
        elif raw is not None:
            self.problem("", f"{_shown(raw)} must be an object with settings")

    def path(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path and name else self._path or name

    def problem(self, name: str, rule: str) -> None:
        where = self.path(name)
        self.report(f"{where}: {rule}" if where else rule)

    def report(self, problem: str) -> None:
        """Add a problem whose text includes its path."""
        self._problems.append(problem)

    @property
    def problem_count(self) -> int:
        """How many problems all sections have so far."""
        return len(self._problems)

    def holds(self, name: str) -> bool:
        return name in self._values

    def names(self) -> list[str]:
        return list(self._values)

    def raw(self, name: str) -> Any:
        self._settings.append(name)
        return self._values.get(name)

    def section(self, name: str) -> Section:
        return Section(self.raw(name), self.path(name), self._problems)

    def sections(self, name: str) -> list[Section]:
        """Return the objects of a list."""
        items = self.raw(name)
        if items is None:
            return []
        if not isinstance(items, list):
            self.problem(name, f"{_shown(items)} must be a list of objects")
            return []
        where = self.path(name)
        return [Section(item, f"{where}[{n}]", self._problems) for n, item in enumerate(items)]

    def required(self, name: str) -> str:
        text = self.text(name)
        if text is None and not self.holds(name):
            self.problem(name, "is missing")
        return text or ""

    def text(self, name: str, *, allow_empty: bool = False) -> str | None:
        text = self.raw(name)
        if text is None or (isinstance(text, str) and (allow_empty or text.strip())):
            return text
        self.problem(name, f"{_shown(text)} must be text, and not empty")
        return None

    def choice(self, name: str, allowed: Sequence[str], default: str) -> str:
        text = self.text(name)
        if text is None or text in allowed:
            return text or default
        self.problem(name, f"{_shown(text)} {must_be_one_of(allowed, text)}")
        return default

    def texts(self, name: str, default: Sequence[str]) -> tuple[str, ...]:
        texts = self.raw(name)
        if texts is None:
            return tuple(default)
        if isinstance(texts, str):
            texts = [part.strip() for part in texts.split(",")]
        if isinstance(texts, list) and texts and all(isinstance(x, str) and x for x in texts):
            if len(set(texts)) == len(texts):
                return tuple(texts)
            self.problem(name, f"{_shown(texts)} must not repeat a name")
        else:
            self.problem(name, f"{_shown(texts)} must be a list of names, and not empty")
        return tuple(default)

    def whole(self, name: str, default: T, least: int, greatest: int | None = None) -> int | T:
        limits = f"at least {least}" if greatest is None else f"between {least} and {greatest}"

        def parse(text: str) -> int:
            number = int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else None
            if number is None or number < least or (greatest is not None and number > greatest):
                raise ValueError(f"must be a whole number, {limits}")
            return number

        return self.parsed(name, default, parse)

    def flag(self, name: str) -> bool | None:
        raw = self.raw(name)
        return raw if isinstance(raw, bool) else self.parsed(name, None, _boolean)

    def duration(self, name: str, default: T) -> timedelta | T:
        return self.parsed(name, default, parse_duration)

    def parsed(self, name: str, default: T, parse: Callable[[str], Any]) -> Any | T:
        """Parse a value's text; a ValueError or InvalidError becomes a problem."""
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            self.problem(name, f"{_shown(value)} must be a single value")
            return default
        try:
            return parse(str(value))
        except InvalidError as error:
            self.problem(name, error.message)
        except ValueError as error:
            self.problem(name, f"{_shown(value)} {error}")
        return default

    def close(self) -> None:
        """Reject names that were not read."""
        for name in self._values:
            if name in self._settings:
                continue
            near = difflib.get_close_matches(name, self._settings, 1)
            if _SECRET.search(name):
                hint = "secrets do not belong here: name a variable or a file that holds them"
            elif near:
                hint = f"did you mean {near[0]}?"
            else:
                hint = f"the settings are {', '.join(sorted(self._settings))}"
            self.problem(name, f"is not known; {hint}")


def _fraction(text: str) -> float:
    if re.fullmatch(r"\d{1,3}(\.\d{1,18})?", text) and 0 <= float(text) <= 1:
        return float(text)
    raise ValueError("must be between 0 and 1")


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def read_extension(
    section: Section, name: str, registry: Registry[E], default: str | None = None
) -> E | None:
    """Read the setting that selects an extension; None after a problem."""
    id_ = section.text(name) or (None if section.holds(name) else default)
    if id_ is None:
        if not section.holds(name):
            section.problem(name, f"is missing: name one of {', '.join(registry.ids())}")
        return None
    if id_ not in registry:
        section.choice(name, registry.ids(), id_)
        return None
    try:
        return registry.get(id_)
    except InvalidError as error:
        section.problem(name, error.message)
        return None


def read_options(section: Section, options: type[O]) -> O | None:
    """Read all options and close the section; None after a problem."""
    problems = section.problem_count
    values = _values(section, options, _read)
    if section.problem_count > problems:
        return None
    try:
        return msgspec.convert(values, options)
    except msgspec.ValidationError as error:
        section.problem("", str(error))
        return None


def read_settings(section: Section, settings: type[T]) -> T:
    """Read all fields of a dataclass and close the section; a wrong one gets its default.

    Names tell what numbers are: `_bytes` a size, `_seconds` a duration, `_fraction` and `jitter` 0 to
    1.
    """
    try:
        return settings(**_values(section, settings, _read_limit))
    except InvalidError as error:
        section.problem("", error.message)
        return settings()


def _values(
    section: Section, kind: type, read: Callable[[Section, inspect.Field], Any]
) -> dict[str, Any]:
    """Return the fields of the class that the section sets, and close it."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType | inspect.DataclassType)  # noqa: S101
    values = {field.name: read(section, field) for field in info.fields}
    section.close()
    return {name: value for name, value in values.items() if value is not None}


def _read_limit(section: Section, field: inspect.Field) -> Any:
    match field.name.rpartition("_")[2]:
        case "bytes":
            return section.parsed(field.name, None, parse_size)
        case "fraction" | "jitter":
            return section.parsed(field.name, None, _fraction)
        case "seconds":
            duration = section.duration(field.name, None)
            return None if duration is None else duration.total_seconds()
    return _read(section, field)


def _read(section: Section, field: inspect.Field) -> Any:
    name = field.name
    kind, rule = _plain(field.type)
    if field.required and not section.holds(name):
        return section.required(name) or None
    match kind:
        case inspect.StrType(pattern=pattern):
            return _matching(section, name, pattern, rule)
        case inspect.LiteralType(values=values):
            return section.choice(name, [str(value) for value in values], "") or None
        case inspect.IntType(ge=ge, le=le):
            return section.whole(name, None, 0 if ge is None else ge, le)
        case inspect.TimeDeltaType():
            return section.duration(name, None)
        case inspect.BoolType():
            return section.flag(name)
        case inspect.VarTupleType(item_type=inspect.StrType()):
            return section.texts(name, ()) or None
    return section.raw(name)


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
    text = section.text(name)
    if text is not None and pattern is not None and not re.search(pattern, text):
        section.problem(name, f"{text} must be {rule or f'text that matches {pattern}'}")
    return text


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("must be true or false")
    return text.lower() == "true"
