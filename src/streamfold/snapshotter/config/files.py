"""Loads configurations from a file, environment variables and flags."""

from __future__ import annotations

import copy
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from streamfold.snapshotter.config.hocon import HoconError, parse_hocon
from streamfold.snapshotter.config.model import SnapshotterConfiguration
from streamfold.snapshotter.config.tables import ROOT, read_configuration
from streamfold.snapshotter.errors import ConfigurationError
from streamfold.wording import reason_of

PREFIX = "STREAMFOLD_SNAPSHOTTER__"
_PATH = re.compile(r"[\w-]+(?:\[\d+\])*(?:\.[\w-]+(?:\[\d+\])*)*")


def environment_overrides(environment: Mapping[str, str]) -> list[tuple[list[str], str]]:
    """Return paths and values from the configuration's variables, by name."""
    overrides = []
    for name in sorted(environment):
        if name.upper().startswith(PREFIX):
            parts = name[len(PREFIX) :].split("__")
            # Capitals mean small letters, since some shells and charts allow nothing else.
            path = [part.lower() if part.isupper() else part for part in parts]
            overrides.append((path, environment[name]))
    return overrides


def assignment(text: str) -> tuple[list[str], str]:
    """Parse `path=value`; ValueError for anything else."""
    path, equals, value = text.partition("=")
    if not equals or not _PATH.fullmatch(path.strip()):
        # Not repeated, since it may be a secret.
        raise ValueError("must be path=value, such as diff.interval=5s")
    return re.findall(r"[\w-]+", path), value.strip()


def overridden(
    values: Mapping[str, Any], overrides: Iterable[tuple[list[str], str]], problems: list[str]
) -> dict[str, Any]:
    """Apply overrides in order, and add impossible ones to `problems`."""
    result: dict[str, Any] = copy.deepcopy(dict(values))
    for path, text in overrides:
        shown = _shown(path)
        if not all(path):
            problems.append(f"{shown}: has an empty part: separate parts by two underscores")
            continue
        try:
            _assign(result, path, _value(text))
        except tomllib.TOMLDecodeError:
            problems.append(f"{shown}: a value in brackets, braces or quotes must be valid TOML")
        except (KeyError, IndexError, ValueError):
            problems.append(
                f"{shown}: names an entry that the list lacks: use an existing number, or the next one"
            )
    return result


def _assign(container: Any, path: list[str], value: Any) -> None:
    for name, following in zip(path, [*path[1:], None], strict=True):
        if isinstance(container, list):
            number = int(name)
            if number == len(container):
                container.append({})
            key: Any = number
        else:
            key = name
        if following is None:
            container[key] = value
            return
        inner = container[key] if isinstance(container, list) else container.get(key)
        if not isinstance(inner, dict | list):
            inner = container[key] = {} if not following.isdecimal() else []
        container = inner


def _value(text: str) -> Any:
    if text.startswith(("[", "{", '"', "'")):
        return tomllib.loads(f"value = {text}")["value"]
    return text


def _shown(path: list[str]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if part.isdecimal() and text else f".{part}" if text else part
    return text


_HOCON = (".conf", ".hocon", ".json")


def load_configuration(
    path: Path | None,
    *,
    environment: Mapping[str, str] = os.environ,
    settings: Sequence[str] = (),
) -> SnapshotterConfiguration:
    """Load the file, overridden by the environment and then by `settings`, each `path=value`.

    ConfigurationError lists all problems.
    """
    values = read_file(path) if path is not None else {}
    values = values[ROOT] if set(values) == {ROOT} and isinstance(values[ROOT], dict) else values
    problems: list[str] = []
    overrides = environment_overrides(environment)
    for number, text in enumerate(settings, 1):
        try:
            overrides.append(assignment(text))
        except ValueError as error:
            problems.append(f"--set, number {number}: {error}")
    values = overridden(values, overrides, problems)
    try:
        configuration = read_configuration(values)
    except ConfigurationError as error:
        raise ConfigurationError([*problems, *error.problems]) from None
    if problems:
        raise ConfigurationError(problems)
    return configuration


def read_file(path: Path) -> dict[str, Any]:
    """Read a TOML or HOCON file, chosen by its extension, as plain values."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError([f"{path}: cannot be read: {reason_of(error)}"]) from None
    try:
        if path.suffix == ".toml":
            return tomllib.loads(text)
        if path.suffix in _HOCON:
            return parse_hocon(text)
    except (tomllib.TOMLDecodeError, HoconError) as error:
        raise ConfigurationError([f"{path}: {error}"]) from None
    except RecursionError:
        raise ConfigurationError([f"{path}: values are nested too deeply: flatten them"]) from None
    raise ConfigurationError([f"{path}: must end in .toml, or in {', '.join(_HOCON)} for HOCON"])
