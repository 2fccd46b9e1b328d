"""S3, GCS and Azure: their options, and how their stores are opened."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote, urlsplit

import msgspec
from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from streamfold.blob.aws_identity import find_identity
from streamfold.blob.blob_store import BlobStore
from streamfold.blob.destinations import CredentialProvider, DestinationType
from streamfold.blob.obstore.requests import RequestLimits
from streamfold.blob.obstore.store import ObstoreBlobStore
from streamfold.errors import InvalidError
from streamfold.extensions import Options

if TYPE_CHECKING:  # these exist only in obstore's stubs
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

_SERVICES: dict[str, type[S3Store] | type[GCSStore] | type[AzureStore]] = {
    "s3": S3Store,
    "gs": GCSStore,
    "az": AzureStore,
}
#: A connection option. obstore panics if it is passed among the service's options.
_ALLOW_HTTP = "allow_http"
#: The option for a credential provider, and the options that hold credentials or disable signing.
_PROVIDER = "credential_provider"
_CREDENTIAL_OPTIONS = ("access_key_id", "aws_access_key_id", "skip_signature", "aws_skip_signature")
#: Variables in which AWS tools look for the endpoint, in their order.
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_NAME = msgspec.Meta(
    pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{1,221}\Z",
    extra={"rule": "a name of letters, digits, dots and hyphens"},
)
_PREFIX = msgspec.Meta(description="folder in it, for all tables")


class BucketOptions(Options, frozen=True, kw_only=True):
    bucket: Annotated[str, _NAME, msgspec.Meta(description="name of the bucket")]
    prefix: Annotated[str, _PREFIX] = ""


class S3Options(BucketOptions, frozen=True, kw_only=True):
    region: Annotated[
        str | None, msgspec.Meta(description="region, if not that of the profile")
    ] = None
    endpoint: Annotated[
        str | None, msgspec.Meta(description="URL of a service that is compatible with S3")
    ] = None
    credentials: Annotated[
        str | None, msgspec.Meta(description="profile to use; what the AWS SDK finds if not given")
    ] = None


class ContainerOptions(Options, frozen=True, kw_only=True):
    container: Annotated[str, _NAME, msgspec.Meta(description="name of the container")]
    prefix: Annotated[str, _PREFIX] = ""


def _url(scheme: str, bucket: str, prefix: str) -> str:
    folder = quote(prefix.strip("/"), safe="/=-_.~")
    return f"{scheme}://{bucket}/{folder}".rstrip("/")


def _open_service(url: str, options: Mapping[str, Any]) -> BlobStore:
    parts = urlsplit(url)
    if not parts.netloc:
        raise InvalidError(f"blob store URL {url!r} must name a bucket after '//'")
    name = parts.geturl().rstrip("/")
    remaining = dict(options)
    provider: CredentialProvider | None = remaining.pop(_PROVIDER, None)
    limits, rest = RequestLimits.take_from(remaining)
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
    settings = {"region": os.environ.get("AWS_REGION") or identity.region()}
    settings["endpoint"] = identity.endpoint()
    present = {name: value for name, value in settings.items() if value}
    return {**present, **options, _PROVIDER: identity.credentials}


def _s3_config(options: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    # One request per deletion works with every service. The bulk form does not.
    config: dict[str, Any] = {"disable_bulk_delete": True, **options}
    endpoints = [environment[name] for name in _ENDPOINT_VARIABLES if environment.get(name)]
    endpoint = options.get("endpoint") or (endpoints[0] if endpoints else None)
    # obstore prefers this variable even to an explicit option, and has no key to override it
    # (upstream defect 14). Reject the conflict, or blobs would silently go elsewhere.
    overriding = environment.get("AWS_ENDPOINT_URL_S3")
    if overriding and overriding != endpoint:
        raise InvalidError(
            "option endpoint and the variable AWS_ENDPOINT_URL_S3 differ: unset the variable, "
            "which would win, or make them equal"
        )
    return config | ({"endpoint": endpoint} if endpoint else {})


def _allows_http(config: Mapping[str, Any]) -> bool:
    """Return whether plain HTTP is allowed, by the option or by the endpoint's scheme."""
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
        # The text may quote an option's value, which may be a secret.
        failure = type(error).__name__
    raise InvalidError(
        f"blob store {url!r} cannot be opened with options {sorted(config)} ({failure}): "
        "check their names and values"
    )


S3 = DestinationType(
    id="s3",
    summary="a bucket of Amazon S3, or of a service like it",
    options=S3Options,
    locate=lambda options: _url("s3", options.bucket, options.prefix),
    open=_open_service,
    open_options=("region", "endpoint"),
    takes_credentials=True,
)
GCS = DestinationType(
    id="gcs",
    summary="a bucket of Google Cloud Storage",
    options=BucketOptions,
    locate=lambda options: _url("gs", options.bucket, options.prefix),
    open=_open_service,
)
AZURE = DestinationType(
    id="azure",
    summary="a container of Azure Blob Storage",
    options=ContainerOptions,
    locate=lambda options: _url("az", options.container, options.prefix),
    open=_open_service,
)
