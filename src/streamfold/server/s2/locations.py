"""Locations: a server of one's own has one, which is where its store is."""

from __future__ import annotations

from streamfold.errors import InvalidError
from streamfold.model.configs import SYSTEM_DEFAULTS, StorageClass
from streamfold.wire.s2.account import Location


class Locations:
    """The one location that there is."""

    def __init__(self, name: str) -> None:
        self.only = Location(
            name,
            is_private=True,
            storage_classes=tuple(StorageClass),
            default_storage_class=SYSTEM_DEFAULTS.storage_class,
        )

    def check(self, name: str) -> None:
        """Refuse a location that is not here."""
        if name != self.only.name:
            raise InvalidError(f"location {name[:80]!r} is unknown: choose from {self.only.name}")
