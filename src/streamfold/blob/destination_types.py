"""Kinds of object storage, by the types that configurations name and by the schemes of URLs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from streamfold.blob.blob_store import BlobStore
from streamfold.errors import InvalidError
from streamfold.extensions import Extension, Options, Registry

#: Gives credentials of S3 as obstore takes them, for as long as they say.
CredentialProvider: TypeAlias = Callable[[], Any]

O = TypeVar("O", bound=Options)  # noqa: E741 - the options


@dataclass(frozen=True, slots=True, kw_only=True)
class DestinationType(Extension, Generic[O]):
    """Declares a kind of object storage: `type = "<id>"` in a configuration, `<id>://…` in URLs."""

    options: type[O]
    #: Returns the URL of the folder that the options name.
    locate: Callable[[O], str]
    #: Returns the store at such a URL or at a folder below it; contacts nothing. It gets the values
    #: of `open_options`, and what callers of `open_blob_store` give.
    open: Callable[[str, Mapping[str, Any]], BlobStore]
    #: Options that are not part of the URL.
    open_options: tuple[str, ...] = ()
    #: Whether `open` takes a `credential_provider` of AWS, and `credentials` is among the options.
    takes_credentials: bool = False


#: Every kind of storage but `memory:`, which one process alone sees.
DESTINATIONS: Registry[DestinationType[Any]] = Registry(
    "streamfold.destinations",
    "destination",
    DestinationType,
    {
        "local": "streamfold.blob.local.store:LOCAL",
        "s3": "streamfold.blob.obstore.services:S3",
        "gcs": "streamfold.blob.obstore.services:GCS",
        "azure": "streamfold.blob.obstore.services:AZURE",
    },
)
#: Schemes of URLs that are not the ids.
_IDS = {"file": "local", "gs": "gcs", "az": "azure"}
_FORMS = {"local": "file:///", "gcs": "gs://", "azure": "az://"}


def destination_type(scheme: str) -> DestinationType[Any] | None:
    """Return the kind of storage whose URLs have this scheme; None if there is none."""
    name = _IDS.get(scheme, scheme)
    if scheme in _IDS.values() or name not in DESTINATIONS:
        return None
    return DESTINATIONS.get(name)


def url_forms() -> list[str]:
    """Return how URLs of each kind begin."""
    return [_FORMS.get(name, f"{name}://") for name in DESTINATIONS.ids()]


def refuse_options(url: str, options: Mapping[str, Any]) -> None:
    """Raise InvalidError if options were given to storage that takes none."""
    if options:
        raise InvalidError(f"blob store {url!r} takes no options, but got {sorted(options)}")
