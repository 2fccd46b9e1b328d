"""Kinds of object storage, by the types that configurations name, and blob stores by URL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar, overload
from urllib.parse import urlsplit

from obstore.store import MemoryStore

from streamfold.blob.blob_store import BlobStore
from streamfold.blob.obstore.requests import RequestLimits
from streamfold.blob.obstore.store import ObstoreBlobStore
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
        "local": "streamfold.blob.local_store:LOCAL",
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


@overload
def open_blob_store(url: str, **options: str) -> BlobStore: ...
@overload
def open_blob_store(
    url: str, *, credential_provider: CredentialProvider | None, **options: str
) -> BlobStore: ...
def open_blob_store(url: str, **options: Any) -> BlobStore:
    """Return the store that `url` names; storage is not contacted yet.

    - `memory:` is empty and private to the returned object.
    - `file:///folder` keeps files in that folder, created if missing.
    - `s3://bucket/prefix` finds endpoint, region and credentials as AWS tools do
      (see `streamfold.blob.aws_identity`), or from options named as in obstore's `S3Config`:
      `endpoint`, `region`, `access_key_id`, `secret_access_key`, `session_token`. An `http://`
      endpoint is allowed.
    - `gs://bucket/prefix`, `az://container/prefix`: likewise, with `GCSConfig` and `AzureConfig`.
    - `<type>://…`: a destination that an installed package adds.

    S3, GCS and Azure also take the fields of `RequestLimits` as options, all as text. S3 takes a
    `credential_provider` instead of credentials: it is called, from any thread, whenever some are
    needed.
    """
    provider = options.pop("credential_provider", None)
    parts = urlsplit(url)
    if parts.username or parts.password or parts.query or parts.fragment:
        raise InvalidError(
            f"blob store URL with scheme {parts.scheme!r} holds credentials, a query or a "
            "fragment: give these as options or in the environment"
        )
    kind = None if parts.scheme == "memory" else destination_type(parts.scheme)
    if provider is not None:
        if kind is None or not kind.takes_credentials:
            raise InvalidError(f"blob store {url!r} takes no credential_provider: only s3:// does")
        options["credential_provider"] = provider
    if kind is not None:
        return kind.open(url, options)
    if parts.scheme != "memory":
        raise InvalidError(
            f"blob store URL {url!r} must begin with memory:, {', '.join(url_forms())}"
        )
    refuse_options(url, options)
    memory = MemoryStore()
    return ObstoreBlobStore("memory:", repeating=memory, single=memory, limits=RequestLimits())
