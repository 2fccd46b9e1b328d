"""Destinations that travel: opened anew where they are used, on the driver and in every task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from streamfold.archive.destinations.aws_credentials import AwsAccess, Profile, Profiles
from streamfold.archive.destinations.destination import Destination
from streamfold.archive.destinations.mirrors import Mirrors
from streamfold.archive.manifest.positions import SEQ_NUM
from streamfold.errors import InvalidError


@dataclass(frozen=True, slots=True)
class DestinationSpec:
    """Where one destination is and as whom it is written to; pickled with tasks, never shown whole."""

    url: str
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    #: Where credentials come from; None for what the storage's own variables say.
    profile: Profile | None = None

    def __post_init__(self) -> None:
        if self.url.startswith("memory:"):
            raise InvalidError(
                "a destination in memory is seen by one process only, and parts are written by "
                "several: give file:///, s3://, gs:// or az://"
            )

    @property
    def uri(self) -> str:
        """What the destination calls itself."""
        return self.url.rstrip("/") + "/"

    def open(self) -> Destination:
        """The destination; credentials are asked for when they are needed, and renewed."""
        provider, options = None, dict(self.options)
        if self.profile is not None:
            found = _access(self.profile).blob_options()
            provider = found["credential_provider"]
            options = {n: str(v) for n, v in found.items() if isinstance(v, str)} | options
        return Destination.open(self.url, credential_provider=provider, **options)


@lru_cache(maxsize=64)
def _access(profile: Profile) -> AwsAccess:
    """One for each profile in a process: parts open their places, and must not ask for a role each."""
    return Profiles({"destination": profile}).access("destination", path="credentials")


def open_mirrors(places: Sequence[DestinationSpec]) -> Mirrors:
    """All destinations of a table, the deciding one first."""
    return Mirrors([spec.open() for spec in places], SEQ_NUM)
