"""Object storage types by their id in configurations, and blob stores by URL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar, overload
from urllib.parse import urlsplit

from obstore.store import MemoryStore

from streamfold.blob.blob_store import BlobStore
from streamfold.blob.obstore.requests import RequestLimits
from streamfold.blob.obstore.store import ObstoreBlobStore
from streamfold.errors import InvalidError
from streamfold.extensions import Extension, Options, Registry

#: Returns S3 credentials in obstore's form, with their expiry.
CredentialProvider: TypeAlias = Callable[[], Any]

O = TypeVar("O", bound=Options)  # noqa: E741 - the options


@dataclass(frozen=True, slots=True, kw_only=True)
class DestinationType(Extension, Generic[O]):
    """Declares a type of object storage: `type = "<id>"` in a configuration, `<id>://…` in URLs."""

    options: type[O]
    #: Returns the URL of the folder that the options name.
    locate: Callable[[O], str]
    #: Returns the store at such a URL, or at a folder below it, without contacting it. Called with
    #: the values of `open_options` and the options of `open_blob_store`.
    open: Callable[[str, Mapping[str, Any]], BlobStore]
    #: Options outside the URL.
    open_options: tuple[str, ...] = ()
    #: Whether `open` takes an AWS `credential_provider`, and `credentials` is an option.
    takes_credentials: bool = False


#: All types of storage except `memory:`, which only one process sees.
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
#: Type ids by URL scheme, where they differ.
_IDS = {"file": "local", "gs": "gcs", "az": "azure"}
_FORMS = {"local": "file:///", "gcs": "gs://", "azure": "az://"}


def destination_type(scheme: str) -> DestinationType[Any] | None:
    """Return the type of storage with this URL scheme, or None."""
    name = _IDS.get(scheme, scheme)
    if scheme in _IDS.values() or name not in DESTINATIONS:
        return None
    return DESTINATIONS.get(name)


def url_forms() -> list[str]:
    """Return the beginning of each storage type's URLs."""
    return [_FORMS.get(name, f"{name}://") for name in DESTINATIONS.ids()]


def refuse_options(url: str, options: Mapping[str, Any]) -> None:
    """Raise InvalidError if there are options, because this storage takes none."""
    if options:
        raise InvalidError(f"blob store {url!r} takes no options, but got {sorted(options)}")


def location_url(location: str | Path) -> str:
    """Return the URL of a location, which is a URL or a folder path."""
    if isinstance(location, str) and ":" in location:
        return location
    return Path(location).expanduser().absolute().as_uri()


@overload
def open_blob_store(url: str, **options: str) -> BlobStore: ...
@overload
def open_blob_store(
    url: str, *, credential_provider: CredentialProvider | None, **options: str
) -> BlobStore: ...
def open_blob_store(url: str, **options: Any) -> BlobStore:
    """Return the store at `url`, without contacting it.

    - `memory:` is empty and private to the returned object.
    - `file:///folder` stores files in that folder, which is created if missing.
    - `s3://bucket/prefix` finds endpoint, region and credentials as AWS tools do
      (see `streamfold.blob.aws_identity`), or from options named as in obstore's `S3Config`:
      `endpoint`, `region`, `access_key_id`, `secret_access_key`, `session_token`. An `http://`
      endpoint is allowed.
    - `gs://bucket/prefix`, `az://container/prefix`: likewise, with `GCSConfig` and `AzureConfig`.
    - `<type>://…`: a destination from an installed package.

    S3, GCS and Azure also take the fields of `RequestLimits` as text options. S3 takes a
    `credential_provider` instead of credentials. It is called from any thread.
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
