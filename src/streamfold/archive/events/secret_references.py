"""Secrets by reference: a configuration names a variable or a file, never the secret."""

from __future__ import annotations

import base64
import binascii
import os
from dataclasses import dataclass
from pathlib import Path

from streamfold.errors import InvalidError

#: What marks a secret as base64 in the published webhook convention.
PREFIX = "whsec_"
#: Bytes of key below which an HMAC can be guessed.
SHORTEST_KEY = 16


@dataclass(frozen=True, slots=True)
class SecretReference:
    """Where a signing secret is; it is read again each time, so it may be changed at any time."""

    variable: str | None = None
    file: Path | None = None

    def __post_init__(self) -> None:
        if (self.variable is None) == (self.file is None):
            raise InvalidError("a secret is in a variable or in a file: name exactly one")

    def read_key(self) -> bytes:
        """Return the key: `whsec_…` is decoded as base64, other text is used as is."""
        text = self._read().strip()
        try:
            if text.startswith(PREFIX):
                key = base64.b64decode(text.removeprefix(PREFIX), validate=True)
            else:
                key = text.encode()
        except (binascii.Error, ValueError):
            key = b""
        if len(key) < SHORTEST_KEY:
            raise InvalidError(
                f"the secret in {self._name()} is not a usable key: it must have at least "
                f"{SHORTEST_KEY} bytes, as text or as {PREFIX} and base64"
            )
        return key

    def _read(self) -> str:
        if self.variable is not None:
            return os.environ.get(self.variable, "")
        try:
            return Path(str(self.file)).read_text()
        except (OSError, UnicodeDecodeError) as error:
            failure = type(error).__name__
        raise InvalidError(f"the secret in {self._name()} cannot be read ({failure})")

    def _name(self) -> str:
        return f"variable {self.variable!r}" if self.variable else f"file {str(self.file)!r}"
