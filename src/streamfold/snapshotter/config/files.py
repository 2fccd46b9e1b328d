"""Configurations as people keep them: a file, variables beside it, and flags."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from streamfold.snapshotter.config.hocon import HoconError, parse_hocon
from streamfold.snapshotter.config.model import Configuration
from streamfold.snapshotter.config.overrides import assignment, environment_overrides, overridden
from streamfold.snapshotter.config.tables import ROOT, read_configuration
from streamfold.snapshotter.errors import ConfigurationError

_HOCON = (".conf", ".hocon", ".json")


def load_configuration(
    path: Path | None,
    *,
    environment: Mapping[str, str] = os.environ,
    settings: Sequence[str] = (),
) -> Configuration:
    """The file, then the environment, then `settings` (each `path=value`): the last one wins.

    ConfigurationError tells everything that is wrong at once.
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
    """The plain values of a TOML or HOCON file, by the end of its name."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError([f"{path}: cannot be read: {error}"]) from None
    try:
        if path.suffix == ".toml":
            return tomllib.loads(text)
        if path.suffix in _HOCON:
            return parse_hocon(text)
    except (tomllib.TOMLDecodeError, HoconError) as error:
        raise ConfigurationError([f"{path}: {error}"]) from None
    raise ConfigurationError([f"{path}: must end in .toml, or in {', '.join(_HOCON)} for HOCON"])
