"""Picklable destinations, opened where they are used: on the driver and in every task."""

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
    """A destination's location and credentials; pickled with tasks, never shown whole."""

    url: str
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    #: Where credentials come from; None for the storage's own variables.
    profile: Profile | None = None

    def __post_init__(self) -> None:
        if self.url.startswith("memory:"):
            raise InvalidError(
                "a destination in memory is seen by one process only, and parts are written by "
                "several: give file:///, s3://, gs:// or az://"
            )

    @property
    def uri(self) -> str:
        """The URI of the destination."""
        return self.url.rstrip("/") + "/"

    def open(self) -> Destination:
        """Open the destination; credentials are fetched when needed, and renewed."""
        provider, options = None, dict(self.options)
        if self.profile is not None:
            found = _access(self.profile).blob_options()
            provider = found["credential_provider"]
            options = {n: str(v) for n, v in found.items() if isinstance(v, str)} | options
        return Destination.open(self.url, credential_provider=provider, **options)


@lru_cache(maxsize=64)
def _access(profile: Profile) -> AwsAccess:
    """Return the process's one access per profile: opening a part must not assume the role again."""
    return Profiles({"destination": profile}).access("destination", path="credentials")


def open_mirrors(specs: Sequence[DestinationSpec]) -> Mirrors:
    """Open all destinations of a table, the primary first."""
    return Mirrors([spec.open() for spec in specs], SEQ_NUM)
