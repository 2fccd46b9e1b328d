"""Contexts: named servers in a configuration file that only its owner can read.

The file is TOML: `current = "NAME"`, and one table `[contexts.NAME]` per server. It is replaced as a
whole, with mode 0600, so an interrupted change leaves the old file.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, replace

from streamfold.cli.exit_status import ExitStatus, VerbFailedError
from streamfold.errors import InvalidError

#: Environment variables for the file's path and for the context to use.
CONFIG_FILE: Final = "STREAMFOLD_CONFIG"
CONTEXT: Final = "STREAMFOLD_CONTEXT"
#: The context that a first `config set` creates.
DEFAULT_NAME: Final = "default"
#: The members of a context. `endpoint` is for servers that serve both APIs at one address.
KEYS: Final = ("endpoint", "account_endpoint", "basin_endpoint", "access_token")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
#: Printable ASCII without spaces, quotes and backslashes, which covers URLs and tokens.
_VALUE = re.compile(r"[!#-\[\]-~]+")
#: Characters shown of a token, and the length from which they reveal little of it.
_SHOWN, _LONG = 4, 16


class Context(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A server and its token."""

    endpoint: str | None = None
    account_endpoint: str | None = None
    basin_endpoint: str | None = None
    access_token: str | None = None

    @property
    def account(self) -> str:
        return self.account_endpoint or self.endpoint or ""

    @property
    def basin(self) -> str:
        return self.basin_endpoint or self.endpoint or ""

    def shown(self) -> dict[str, str]:
        """Return the members that are set, for printing, with the token masked."""
        values = {key: value for key, value in asdict(self).items() if value is not None}
        if self.access_token is not None:
            values["access_token"] = masked(self.access_token)
        return values

    def changed(self, key: str, value: str | None) -> Context:
        """Return the context with a changed value. None removes the value."""
        if value is not None and not _VALUE.fullmatch(value):
            shown = "the token" if key == "access_token" else repr(value)
            raise InvalidError(
                f"{key}: {shown} has a character that neither URLs nor tokens have: give printable "
                "ASCII without spaces, quotes and backslashes"
            )
        if value is not None and key != "access_token":
            _check_endpoint(key, value)
        return replace(self, **{key: value})


class Contexts(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the file."""

    current: str | None = None
    contexts: dict[str, Context] = {}

    def get(self, name: str) -> Context:
        """Return a context. Raises if it does not exist."""
        if name not in self.contexts:
            names = ", ".join(sorted(self.contexts)) or "there are none"
            raise VerbFailedError(
                "context_not_found",
                f"there is no context {name!r} in {config_path()} ({names}): create it by "
                f"`streamfold config set endpoint URL --context {name}`",
                ExitStatus.NOT_FOUND,
            )
        return self.contexts[name]

    def with_context(self, name: str, context: Context) -> Contexts:
        """Return the contexts with a new or changed one. The first context becomes the current one."""
        if not _NAME.fullmatch(name):
            raise InvalidError(
                f"context name {name!r} must be 1 to 64 letters, digits, dots, hyphens or "
                "underscores, and begin with a letter or digit"
            )
        return replace(
            self, current=self.current or name, contexts={**self.contexts, name: context}
        )

    def without(self, name: str) -> Contexts:
        """Return the contexts without `name`. Raises if it does not exist."""
        self.get(name)
        rest = {key: context for key, context in self.contexts.items() if key != name}
        return Contexts(None if self.current == name else self.current, rest)


def _check_endpoint(key: str, value: str) -> None:
    """Reject values that are not server addresses, and secrets in them, which would be printed."""
    scheme, separator, rest = value.rpartition("://")
    parts = urlsplit(f"//{rest}")
    if (separator and scheme not in ("http", "https")) or not parts.netloc or parts.path.strip("/"):
        raise InvalidError(
            f"{key} {value!r} is not the address of a server: write https://host, http://host:port or "
            "host:port"
        )
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise InvalidError(
            f"{key} has a user, a query or a fragment: give the address alone, and the token with "
            "`streamfold config set access_token -`"
        )


def masked(token: str) -> str:
    """Return a text that identifies a token to its owner, and is useless to others."""
    return f"…{token[-_SHOWN:]}" if len(token) >= _LONG else "…"


def config_path() -> Path:
    """Return the file's path, whether or not the file exists."""
    if named := os.environ.get(CONFIG_FILE):
        return Path(named).expanduser()
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(home, "streamfold", "config.toml").expanduser()


def read_contexts() -> Contexts:
    """Read the file. A missing file contains no contexts."""
    path = config_path()
    try:
        return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), Contexts)
    except FileNotFoundError:
        return Contexts()
    except OSError as error:
        raise InvalidError(
            f"{path} cannot be read ({error.strerror}): correct that, or name another file in "
            f"{CONFIG_FILE}"
        ) from None
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise InvalidError(f"{path} is not a configuration: {error}; edit or remove it") from None


def write_contexts(contexts: Contexts) -> None:
    """Replace the file with one that only its owner can read."""
    path = config_path()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # mkstemp creates files with mode 0600.
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(_toml(contexts))
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink()
            raise
    except OSError as error:
        raise InvalidError(
            f"{path} cannot be written ({error.strerror}): correct that, or name another file in "
            f"{CONFIG_FILE}"
        ) from None


def readable_by_others(path: Path) -> bool:
    """Return whether other users of the machine may read the file, and thus its tokens."""
    return path.exists() and bool(stat.S_IMODE(path.stat().st_mode) & 0o077)


def _toml(contexts: Contexts) -> str:
    lines = _pairs({"current": contexts.current})
    for name in sorted(contexts.contexts):
        lines += ["", f"[contexts.{json.dumps(name)}]", *_pairs(asdict(contexts.contexts[name]))]
    return "\n".join(lines) + "\n"


def _pairs(values: Mapping[str, str | None]) -> list[str]:
    # Names and values are printable ASCII, whose JSON strings are TOML strings.
    return [f"{key} = {json.dumps(value)}" for key, value in values.items() if value is not None]
