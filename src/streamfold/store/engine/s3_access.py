"""S3 access with one endpoint, region and identity, for both SlateDB and blobs."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from streamfold._native import Credentials, Storage
from streamfold.blob import BlobStore, open_blob_store
from streamfold.blob.aws_identity import AwsIdentity, find_identity

if TYPE_CHECKING:
    from obstore.store import S3Credential

logger = logging.getLogger(__name__)


class RenewedKeys:
    """Provides expiring keys to SlateDB, from a thread, whenever it needs new ones."""

    def __init__(self, credentials: Callable[[], S3Credential]) -> None:
        self.native = Credentials()
        self._credentials = credentials
        threading.Thread(target=self._serve, daemon=True, name="aws-credentials").start()

    def _serve(self) -> None:
        while self.native.wait():
            try:
                keys = self._credentials()
            except Exception as error:  # whatever the error, SlateDB waits for an answer
                logger.warning("cannot get credentials for storage: %s", error)
                self.native.refuse(str(error))
                continue
            expires = keys["expires_at"] or datetime.max.replace(tzinfo=UTC)
            self.native.provide(
                keys["access_key_id"],
                keys["secret_access_key"],
                keys.get("token") or None,
                expires.timestamp(),
            )

    def close(self) -> None:
        """Stop the thread."""
        self.native.close()


#: Environment variables by setting, which SlateDB and obstore share. The first one set wins.
_ADDRESS = {
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
#: Limits, in seconds, of the request that checks whether a bucket is usable. Two attempts tolerate
#: one lost packet, and more would keep a person at a terminal waiting.
_PROBE_LIMITS = {"attempts": "2", "connect_timeout": "3", "request_timeout": "5"}
#: Limits, in seconds, of a lease request: a failed heartbeat must leave time for the next.
_LEASE_LIMITS = {"attempts": "2", "connect_timeout": "2", "request_timeout": "2"}


@dataclass(frozen=True, slots=True)
class S3Access:
    """Settings to access a bucket. Call `close` when nothing uses them any more."""

    #: Settings for SlateDB's object store, and options for a blob store.
    for_database: dict[str, str] = field(repr=False)
    for_blobs: dict[str, Any] = field(repr=False)
    renewed: RenewedKeys | None = None

    def open_database(self, bucket: str) -> Storage:
        """Return SlateDB's handle on the bucket."""
        options = {"bucket": bucket, **self.for_database}
        if options.get("endpoint", "").startswith("http://"):
            options["allow_http"] = "true"
        return Storage.s3(options, self.renewed.native if self.renewed is not None else None)

    def open_blobs(self, url: str) -> BlobStore:
        """Return the blobs below `url`."""
        return open_blob_store(url, **self.for_blobs)

    def open_probe(self, url: str) -> BlobStore:
        """Return the same blobs, for one check that must be answered within seconds."""
        return open_blob_store(url, **self.for_blobs, **_PROBE_LIMITS)

    def open_leases(self, url: str) -> BlobStore:
        """Return the same blobs, for requests that must not outlast a lease."""
        return open_blob_store(url, **self.for_blobs, **_LEASE_LIMITS)

    def close(self) -> None:
        """Stop renewing credentials."""
        if self.renewed is not None:
            self.renewed.close()


def find_access(environment: Mapping[str, str] = os.environ) -> S3Access:
    """Return the settings that AWS tools would use. Fetches credentials once to see if they expire."""
    address = _first_set(_ADDRESS, environment)
    identity = find_identity(environment)
    if identity is None:
        settings = address | _first_set(_CREDENTIALS, environment)
        return S3Access(settings, dict(settings))
    profile = {"region": identity.region(), "endpoint": identity.endpoint()}
    address = {name: value for name, value in profile.items() if value} | address
    renewed = RenewedKeys(identity.credentials) if identity.expires() else None
    keys = _lasting_keys(identity) if renewed is None else {}
    return S3Access(
        address | keys, address | {"credential_provider": identity.credentials}, renewed
    )


def _lasting_keys(identity: AwsIdentity) -> dict[str, str]:
    credentials = identity.credentials()
    keys = {
        "access_key_id": credentials["access_key_id"],
        "secret_access_key": credentials["secret_access_key"],
    }
    token = credentials.get("token")
    return keys | ({"session_token": token} if token else {})


def _first_set(
    settings: Mapping[str, tuple[str, ...]], environment: Mapping[str, str]
) -> dict[str, str]:
    values = {
        key: next((environment[name] for name in names if environment.get(name)), None)
        for key, names in settings.items()
    }
    return {key: value for key, value in values.items() if value is not None}
