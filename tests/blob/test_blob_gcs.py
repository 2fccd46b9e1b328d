"""Requests to Google Cloud Storage, against a scripted server."""

from __future__ import annotations

import json

import pytest
from obstore.store import GCSStore

from streamfold.blob import BlobChangedError, BlobStore, ObstoreBlobStore, RequestLimits
from tests.blob.bad_network import run_scripted_server


def open_at(endpoint: str) -> BlobStore:
    account = {"gcs_base_url": endpoint, "disable_oauth": True, "client_email": ""}
    key = json.dumps(account | {"private_key": "", "private_key_id": ""})
    store = GCSStore(
        "bucket",
        service_account_key=key,
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )
    return ObstoreBlobStore(
        "gs://bucket",
        repeating=store,
        single=store,
        limits=RequestLimits(attempts=1),
        swap_field="version",
    )


async def test_a_swap_compares_generations() -> None:
    conditions: list[str] = []
    generation = 7

    def respond(method: str, headers: dict[str, str]) -> bytes:
        nonlocal generation
        body = b"data" if method == "GET" else b""
        status = "200 OK"
        if method == "PUT":
            conditions.append(headers["x-goog-if-generation-match"])
            matches = conditions[-1] in ("0", str(generation))
            generation += matches
            status = status if matches else "412 Precondition Failed"
        head = f'HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nETag: "same"\r\n'
        head += f"x-goog-generation: {generation}\r\nConnection: close\r\n"
        head += "Last-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\n\r\n"
        return head.encode() + body

    async with run_scripted_server(respond) as endpoint:
        store = open_at(endpoint)
        assert await store.put_if_absent("blob", b"x") == "8"
        assert await store.get_with_etag("blob") == (b"data", "8")
        assert await store.put_if_match("blob", b"y", "8") == "9"
        with pytest.raises(BlobChangedError):
            await store.put_if_match("blob", b"z", "8")
    assert conditions == ["0", "8", "8"]
