"""Blob stores by URL."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, overload
from urllib.parse import SplitResult, unquote, urlsplit

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, MemoryStore, S3Store

from streamfold.blob.aws_identity import find_identity
from streamfold.blob.blob_store import BlobStore
from streamfold.blob.local.store import LocalBlobStore
from streamfold.blob.obstore.retries import RequestLimits
from streamfold.blob.obstore.store import ObstoreBlobStore
from streamfold.errors import InvalidError

if TYPE_CHECKING:  # these exist only in obstore's stubs
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

_SERVICES: dict[str, type[S3Store] | type[GCSStore] | type[AzureStore]] = {
    "s3": S3Store,
    "gs": GCSStore,
    "az": AzureStore,
}
#: An option of the connection, not of a service: obstore panics on one that is among those.
_ALLOW_HTTP = "allow_http"
#: The option of a function that gives credentials, and those that hold some, or want none.
_PROVIDER = "credential_provider"
_CREDENTIAL_OPTIONS = ("access_key_id", "aws_access_key_id", "skip_signature", "aws_skip_signature")
#: Gives credentials of S3 as obstore takes them, for as long as they say.
CredentialProvider: TypeAlias = Callable[[], Any]

#: Where AWS tools look for the endpoint, in their order.
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


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
    - `s3://bucket/prefix` takes endpoint, region and credentials from where AWS tools take them
      (see `streamfold.blob.aws_identity`), or from options named as in obstore's `S3Config`:
      `endpoint`, `region`, `access_key_id`, `secret_access_key`, `session_token`. An `http://`
      endpoint is taken as meant.
    - `gs://bucket/prefix`, `az://container/prefix`: likewise, with `GCSConfig` and `AzureConfig`.

    The last three also take the fields of `RequestLimits` as options, all as text. S3 takes a
    `credential_provider` instead of credentials: it is called, from any thread, whenever some are
    needed.
    """
    credential_provider = options.pop("credential_provider", None)
    parts = urlsplit(url)
    if parts.username or parts.password or parts.query or parts.fragment:
        raise InvalidError(
            f"blob store URL with scheme {parts.scheme!r} holds credentials, a query or a "
            "fragment: give these as options or in the environment"
        )
    if credential_provider is not None and parts.scheme != "s3":
        raise InvalidError(f"blob store {url!r} takes no credential_provider: only s3:// does")
    if parts.scheme in _SERVICES:
        return _open_service(parts, options, credential_provider)
    if options:
        raise InvalidError(f"blob store {url!r} takes no options, but got {sorted(options)}")
    if parts.scheme == "memory":
        memory = MemoryStore()
        return ObstoreBlobStore("memory:", repeating=memory, single=memory, limits=RequestLimits())
    if parts.scheme == "file":
        return LocalBlobStore(_to_folder(url, parts))
    raise InvalidError(
        f"blob store URL {url!r} must begin with memory:, file:///, s3://, gs:// or az://"
    )


def _to_folder(url: str, parts: SplitResult) -> Path:
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise InvalidError(f"blob store URL {url!r} must name an absolute folder: file:///folder")
    return Path(unquote(parts.path))


def _open_service(
    parts: SplitResult, options: Mapping[str, str], provider: CredentialProvider | None
) -> BlobStore:
    if not parts.netloc:
        raise InvalidError(f"blob store URL {parts.geturl()!r} must name a bucket after '//'")
    name = parts.geturl().rstrip("/")
    limits, rest = RequestLimits.take_from(options)
    config: dict[str, Any] = dict(rest)
    if parts.scheme == "s3":
        config = _s3_config(_identified(rest, provider), os.environ)
    return ObstoreBlobStore(
        name,
        repeating=_connect(name, config, limits, retries=limits.attempts - 1),
        single=_connect(name, config, limits, retries=0),
        limits=limits,
        swap_field="version" if parts.scheme == "gs" else "e_tag",
    )


def _identified(options: Mapping[str, str], provider: CredentialProvider | None) -> dict[str, Any]:
    """Return `options` with a credential provider, unless they or variables hold credentials."""
    if provider is not None:
        return {**options, _PROVIDER: provider}
    if any(name in options for name in _CREDENTIAL_OPTIONS):
        return dict(options)
    identity = find_identity(os.environ)
    if identity is None:
        return dict(options)
    found = {"region": os.environ.get("AWS_REGION") or identity.region()}
    found["endpoint"] = identity.endpoint()
    known = {name: value for name, value in found.items() if value}
    return {**known, **options, _PROVIDER: identity.credentials}


def _s3_config(options: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    # One request per deletion works with every service; the bulk form does not.
    config: dict[str, Any] = {"disable_bulk_delete": True, **options}
    found = [environment[name] for name in _ENDPOINT_VARIABLES if environment.get(name)]
    endpoint = options.get("endpoint") or (found[0] if found else None)
    # obstore prefers this variable even to an explicit option, and has no key to override it:
    # refuse, or blobs would quietly go to the wrong place.
    overriding = environment.get("AWS_ENDPOINT_URL_S3")
    if overriding and overriding != endpoint:
        raise InvalidError(
            "option endpoint and the variable AWS_ENDPOINT_URL_S3 differ: unset the variable, "
            "which would win, or make them equal"
        )
    return config | ({"endpoint": endpoint} if endpoint else {})


def _allows_http(config: Mapping[str, Any]) -> bool:
    """Whether requests may go out in the clear: asked for, or told by the endpoint."""
    asked = str(config.get(_ALLOW_HTTP, "")).lower() == "true"
    return asked or str(config.get("endpoint", "")).startswith("http://")


def _connect(
    url: str, config: Mapping[str, Any], limits: RequestLimits, *, retries: int
) -> ObjectStore:
    client: ClientConfig = {
        "connect_timeout": timedelta(seconds=limits.connect_timeout),
        "timeout": timedelta(seconds=limits.request_timeout),
        "allow_http": _allows_http(config),
    }
    retry: RetryConfig = {
        "max_retries": retries,
        "retry_timeout": limits.total,
        "backoff": {
            "init_backoff": timedelta(seconds=limits.first_pause),
            "max_backoff": timedelta(seconds=limits.longest_pause),
            "base": 2,
        },
    }
    service: Any = _SERVICES[urlsplit(url).scheme]
    settings = {name: value for name, value in config.items() if name != _ALLOW_HTTP}
    provider = settings.pop(_PROVIDER, None)
    others = {} if provider is None else {_PROVIDER: provider}
    failure: str
    try:
        store: ObjectStore = service.from_url(
            url, config=settings, client_options=client, retry_config=retry, **others
        )
        return store
    except (BaseError, ValueError) as error:
        # The text may quote an option's value, and that value may be a secret.
        failure = type(error).__name__
    raise InvalidError(
        f"blob store {url!r} cannot be opened with options {sorted(config)} ({failure}): "
        "check their names and values"
    )
