"""Blob stores by URL."""

from __future__ import annotations

from typing import Any, overload
from urllib.parse import urlsplit

from obstore.store import MemoryStore

from streamfold.blob.blob_store import BlobStore
from streamfold.blob.destination_types import (
    CredentialProvider,
    destination_type,
    refuse_options,
    url_forms,
)
from streamfold.blob.obstore.retries import RequestLimits
from streamfold.blob.obstore.store import ObstoreBlobStore
from streamfold.errors import InvalidError


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
