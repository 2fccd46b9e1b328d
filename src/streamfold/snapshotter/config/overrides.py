"""Single settings that win over the file: from the environment, then from the command line.

STREAMFOLD_SNAPSHOTTER__diff__interval=5s, STREAMFOLD_SNAPSHOTTER__tables__0__diff__interval=5s;
--set diff.interval=5s, --set tables[0].diff.interval=5s. A value in brackets, braces or quotes is
read as TOML, any other is text.
"""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

PREFIX = "STREAMFOLD_SNAPSHOTTER__"
_PATH = re.compile(r"[\w-]+(?:\[\d+\])*(?:\.[\w-]+(?:\[\d+\])*)*")


def environment_overrides(environment: Mapping[str, str]) -> list[tuple[list[str], str]]:
    """Paths and values of the variables that are meant, in the order of their names."""
    found = []
    for name in sorted(environment):
        if name.upper().startswith(PREFIX):
            parts = name[len(PREFIX) :].split("__")
            # Where a shell or a chart knows capitals only, small letters are meant.
            path = [part.lower() if part.isupper() else part for part in parts]
            found.append((path, environment[name]))
    return found


def assignment(text: str) -> tuple[list[str], str]:
    """The path and the value of `path=value`; ValueError when it is none."""
    path, equals, value = text.partition("=")
    if not equals or not _PATH.fullmatch(path.strip()):
        # The value is not repeated: what was meant as a name may be a secret.
        raise ValueError("must be path=value, such as diff.interval=5s")
    return re.findall(r"[\w-]+", path), value.strip()


def overridden(
    values: Mapping[str, Any], overrides: Iterable[tuple[list[str], str]], problems: list[str]
) -> dict[str, Any]:
    """The values with overrides applied in order; those that cannot be go to `problems`."""
    result: dict[str, Any] = copy.deepcopy(dict(values))
    for path, text in overrides:
        shown = _shown(path)
        if not all(path):
            problems.append(f"{shown}: has an empty part; parts stand between two underscores")
            continue
        try:
            _assign(result, path, _value(text))
        except tomllib.TOMLDecodeError:
            problems.append(f"{shown}: a value in brackets, braces or quotes must be valid TOML")
        except (KeyError, IndexError, ValueError):
            problems.append(f"{shown}: names a place that cannot be: an entry that a list lacks")
    return result


def _assign(place: Any, path: list[str], value: Any) -> None:
    for name, following in zip(path, [*path[1:], None], strict=True):
        if isinstance(place, list):
            number = int(name)
            if number == len(place):
                place.append({})
            key: Any = number
        else:
            key = name
        if following is None:
            place[key] = value
            return
        inner = place[key] if isinstance(place, list) else place.get(key)
        if not isinstance(inner, dict | list):
            inner = place[key] = {} if not following.isdecimal() else []
        place = inner


def _value(text: str) -> Any:
    if text.startswith(("[", "{", '"', "'")):
        return tomllib.loads(f"value = {text}")["value"]
    return text


def _shown(path: list[str]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if part.isdecimal() and text else f".{part}" if text else part
    return text
