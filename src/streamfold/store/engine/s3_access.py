"""How a store reaches S3: one endpoint, region and identity, for SlateDB and for blobs alike."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slatedb.uniffi._slatedb_uniffi import slatedb as binding

from streamfold.blob import BlobStore, open_blob_store
from streamfold.blob.aws_identity import AwsIdentity, find_identity
from streamfold.store.engine.credential_endpoint import CredentialEndpoint

#: Variables by the name of the setting, which SlateDB and obstore share; the first one set wins.
_PLACE = {
    "region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
    "endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
}
_CREDENTIALS = {
    "access_key_id": ("AWS_ACCESS_KEY_ID",),
    "secret_access_key": ("AWS_SECRET_ACCESS_KEY",),
    "session_token": ("AWS_SESSION_TOKEN",),
    "container_credentials_relative_uri": ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",),
    "web_identity_token_file": ("AWS_WEB_IDENTITY_TOKEN_FILE",),
    "role_arn": ("AWS_ROLE_ARN",),
}
#: Limits of the request that finds out whether a bucket can be used, in seconds: two attempts, so that
#: one lost packet is no error, and no more, so that a person at a terminal gets to know.
_PROBE_LIMITS = {"attempts": "2", "connect_timeout": "3", "request_timeout": "5"}


@dataclass(frozen=True, slots=True)
class S3Access:
    """Settings under which a bucket is reached; `close` when nothing uses it any more."""

    #: Settings of SlateDB's object store, and options of a blob store.
    for_database: dict[str, str] = field(repr=False)
    for_blobs: dict[str, Any] = field(repr=False)
    endpoint: CredentialEndpoint | None = None

    def open_database(self, bucket: str) -> Any:
        """Return SlateDB's handle on the bucket."""
        builder = binding.ObjectStoreBuilder(binding.ObjectStoreType.S3)
        for key, value in {"bucket": bucket, **self.for_database}.items():
            builder.with_config(key, value)
        if self.for_database.get("endpoint", "").startswith("http://"):
            builder.with_config("allow_http", "true")
        return builder.build()

    def open_blobs(self, url: str) -> BlobStore:
        """Return the blobs below `url`."""
        return open_blob_store(url, **self.for_blobs)

    def open_probe(self, url: str) -> BlobStore:
        """Return the same blobs, for one question that is answered within seconds."""
        return open_blob_store(url, **self.for_blobs, **_PROBE_LIMITS)

    def close(self) -> None:
        """Stop renewing credentials."""
        if self.endpoint is not None:
            self.endpoint.close()


def find_access(environment: Mapping[str, str] = os.environ) -> S3Access:
    """Return how AWS tools would reach S3; credentials that expire are fetched once, to know them."""
    place = _first_set(_PLACE, environment)
    identity = find_identity(environment)
    if identity is None:
        settings = place | _first_set(_CREDENTIALS, environment)
        return S3Access(settings, dict(settings))
    found = {"region": identity.region(), "endpoint": identity.endpoint()}
    place = {name: value for name, value in found.items() if value} | place
    endpoint = CredentialEndpoint(identity.credentials) if identity.expires() else None
    keys = _lasting_keys(identity) if endpoint is None else endpoint.config()
    return S3Access(place | keys, place | {"credential_provider": identity.credentials}, endpoint)


def _lasting_keys(identity: AwsIdentity) -> dict[str, str]:
    found = identity.credentials()
    keys = {
        "access_key_id": found["access_key_id"],
        "secret_access_key": found["secret_access_key"],
    }
    token = found.get("token")
    return keys | ({"session_token": token} if token else {})


def _first_set(
    settings: Mapping[str, tuple[str, ...]], environment: Mapping[str, str]
) -> dict[str, str]:
    found = {
        key: next((environment[name] for name in names if environment.get(name)), None)
        for key, names in settings.items()
    }
    return {key: value for key, value in found.items() if value is not None}
