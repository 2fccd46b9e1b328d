from __future__ import annotations

import asyncio
import socket
import traceback
from collections.abc import AsyncIterator

import pytest

from streamfold.blob import BlobChangedError, BlobStore, open_blob_store
from streamfold.errors import (
    BlobExistsError,
    BlobNotFoundError,
    BlobOutcomeUnknownError,
    BlobUnavailableError,
    StorageError,
    StreamfoldError,
)
from streamfold.testing.blob_kit import CALLS, keys_of, pieces_of
from tests.blob.bad_network import LossyProxy, answer, run_lossy_proxy, run_scripted_server
from tests.s3 import S3Server, s3_client

#: Quick to give up after failures. No request is slow on purpose: 20 MB through a proxy in this process
#: take long on a busy machine, and a request that timed out has an unknown outcome.
QUICK = {"attempts": "2", "first_pause": "0.01", "request_timeout": "120"}
CREDENTIALS = {
    "access_key_id": "AKIAEXAMPLE",
    "secret_access_key": "very-secret-key",
    "session_token": "very-secret-token",
    "region": "us-east-1",
}


@pytest.fixture
async def proxy(s3_server: S3Server) -> AsyncIterator[LossyProxy]:
    async with run_lossy_proxy(s3_server.endpoint) as running:
        yield running


@pytest.fixture
def direct(s3_server: S3Server, s3_url: str) -> BlobStore:
    return open_blob_store(s3_url, **s3_server.options())


@pytest.fixture
def lossy(s3_server: S3Server, s3_url: str, proxy: LossyProxy) -> BlobStore:
    return open_blob_store(s3_url, **s3_server.options() | {"endpoint": proxy.endpoint} | QUICK)


def open_at(endpoint: str) -> BlobStore:
    return open_blob_store("s3://bucket/prefix", endpoint=endpoint, **CREDENTIALS, **QUICK)


@pytest.mark.parametrize("call", CALLS)
async def test_a_server_that_is_down_is_unavailable_and_nothing_was_written(call: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        store = open_at(f"http://127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(BlobUnavailableError, match="no connection"):
            await CALLS[call](store, "blob")
        with pytest.raises(BlobUnavailableError, match="no connection"):
            await keys_of(store)


async def test_an_upload_in_parts_to_a_server_that_is_down_wrote_nothing() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        store = open_at(f"http://127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(BlobUnavailableError, match="not written"):
            await store.put("blob", b"x" * 20_000_000)


@pytest.mark.parametrize("call", ["put", "put_if_absent"])
async def test_a_write_whose_answer_was_lost_once_succeeds(
    proxy: LossyProxy, lossy: BlobStore, direct: BlobStore, call: str
) -> None:
    proxy.lose("PUT", 1)
    await CALLS[call](lossy, "blob")
    assert proxy.lost == 1
    assert await direct.get("blob") == b"x"


async def test_a_lost_answer_does_not_turn_anothers_equal_blob_into_ours(
    proxy: LossyProxy, lossy: BlobStore, direct: BlobStore
) -> None:
    await direct.put_if_absent("blob", b"same")
    proxy.lose("PUT", 1)
    with pytest.raises(BlobExistsError):
        await lossy.put_if_absent("blob", b"same")
    assert proxy.lost == 1


@pytest.mark.parametrize("call", ["put", "put_if_absent", "delete"])
async def test_a_write_that_never_gets_an_answer_has_an_unknown_outcome(
    proxy: LossyProxy, lossy: BlobStore, call: str
) -> None:
    proxy.lose("PUT", 9)
    proxy.lose("DELETE", 9)
    with pytest.raises(BlobOutcomeUnknownError, match="read it back"):
        await CALLS[call](lossy, "blob")


async def test_a_conditional_write_that_cannot_be_read_back_has_an_unknown_outcome(
    proxy: LossyProxy, lossy: BlobStore
) -> None:
    proxy.lose("PUT", 1)
    proxy.lose("HEAD", 9)
    with pytest.raises(BlobOutcomeUnknownError, match="cannot be read back"):
        await lossy.put_if_absent("blob", b"x")


async def test_a_swap_whose_answer_was_lost_once_succeeds(
    proxy: LossyProxy, lossy: BlobStore, direct: BlobStore
) -> None:
    etag = await direct.put_if_absent("blob", b"old")
    proxy.lose("PUT", 1)
    new = await lossy.put_if_match("blob", b"new", etag)
    assert proxy.lost == 1
    assert await direct.get_with_etag("blob") == (b"new", new)


async def test_a_swap_that_was_refused_twice_without_a_word_is_not_called_a_success(
    proxy: LossyProxy, lossy: BlobStore, direct: BlobStore
) -> None:
    etag = await direct.put_if_absent("blob", b"old")
    await direct.put_if_match("blob", b"another", etag)
    proxy.lose("PUT", 1)
    with pytest.raises(BlobOutcomeUnknownError, match="this call or by another"):
        await lossy.put_if_match("blob", b"mine", etag)
    assert await direct.get("blob") == b"another"


async def test_a_swap_that_never_gets_an_answer_has_an_unknown_outcome(
    proxy: LossyProxy, lossy: BlobStore, direct: BlobStore
) -> None:
    etag = await direct.put_if_absent("blob", b"old")
    proxy.lose("PUT", 9)
    with pytest.raises(BlobOutcomeUnknownError, match="read it back"):
        await lossy.put_if_match("blob", b"new", etag)


async def test_a_swap_that_cannot_be_read_back_has_an_unknown_outcome(
    proxy: LossyProxy, lossy: BlobStore, direct: BlobStore
) -> None:
    etag = await direct.put_if_absent("blob", b"old")
    proxy.lose("PUT", 1)
    proxy.lose("HEAD", 9)
    with pytest.raises(BlobOutcomeUnknownError):
        await lossy.put_if_match("blob", b"new", etag)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        ("412 Precondition Failed", BlobChangedError),
        ("404 Not Found", BlobNotFoundError),
        ("409 Conflict", BlobUnavailableError),
        ("403 Forbidden", BlobUnavailableError),
        ("503 Slow Down", BlobOutcomeUnknownError),
    ],
)
async def test_each_refusal_of_a_swap_has_its_own_meaning(
    status: str, error: type[StreamfoldError]
) -> None:
    puts = 0

    def respond(method: str, headers: dict[str, str]) -> bytes:
        nonlocal puts
        puts += 1
        assert (method, headers["if-match"]) == ("PUT", '"e"')
        return answer(status)

    async with run_scripted_server(respond) as endpoint:
        with pytest.raises(error):
            await open_at(endpoint).put_if_match("blob", b"x", '"e"')
    assert puts == (2 if status[:3] in ("409", "503") else 1)


async def test_a_conflict_of_swaps_under_way_is_repeated() -> None:
    puts = iter([answer("409 Conflict"), answer("200 OK", etag="new")])

    async with run_scripted_server(lambda *_: next(puts)) as endpoint:
        assert await open_at(endpoint).put_if_match("blob", b"x", '"e"') == '"new"'


async def test_a_lost_answer_to_the_end_of_an_upload_is_never_called_a_failure(
    proxy: LossyProxy, lossy: BlobStore, direct: BlobStore
) -> None:
    proxy.lose("POST", 9, after=1)  # the first begins the upload, the second completes it
    with pytest.raises(BlobOutcomeUnknownError):
        await lossy.put("blob", b"x" * 20_000_000)
    assert (await direct.head("blob")).size == 20_000_000


async def test_reads_survive_one_lost_answer_and_give_up_after_more(
    proxy: LossyProxy, lossy: BlobStore, direct: BlobStore
) -> None:
    await direct.put("blob", b"x")
    proxy.lose("GET", 1)
    assert await lossy.get("blob") == b"x"
    proxy.lose("GET", 9)
    with pytest.raises(BlobUnavailableError, match="connection broke"):
        await lossy.get("blob")


async def test_a_failed_or_cancelled_upload_leaves_no_parts(
    s3_server: S3Server, direct: BlobStore
) -> None:
    async def failing() -> AsyncIterator[bytes]:
        async for piece in pieces_of([b"x" * 5_000_000] * 5):
            yield piece
        raise RuntimeError("broken source")

    async def stalling() -> AsyncIterator[bytes]:
        async for piece in pieces_of([b"x" * 5_000_000] * 5):
            yield piece
        stalled.set()
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="broken source"):
        await direct.put("blob", failing())
    stalled = asyncio.Event()
    upload = asyncio.ensure_future(direct.put("blob", stalling()))
    await stalled.wait()
    upload.cancel()
    with pytest.raises(asyncio.CancelledError):
        await upload
    assert await uploads_of(s3_server) == []


async def uploads_of(server: S3Server) -> list[object]:
    # In a thread: moto answers one request at a time, which may wait for a body that the proxy, in this
    # event loop, is still forwarding.
    call = s3_client(server).list_multipart_uploads
    found = await asyncio.to_thread(call, Bucket=server.bucket)
    return list(found.get("Uploads", []))


async def test_an_upload_whose_parts_fail_wrote_nothing_and_leaves_no_parts(
    proxy: LossyProxy, lossy: BlobStore, direct: BlobStore, s3_server: S3Server
) -> None:
    proxy.lose("PUT", 99)
    with pytest.raises(BlobUnavailableError, match="not written"):
        await lossy.put("blob", b"x" * 20_000_000)
    assert await keys_of(direct) == []
    assert await uploads_of(s3_server) == []


async def test_a_missing_bucket_is_not_a_missing_blob(s3_server: S3Server) -> None:
    store = open_blob_store("s3://no-such-bucket", **s3_server.options())
    for call in ("get", "put", "put_if_absent", "put_if_match", "get_with_etag"):
        with pytest.raises(BlobUnavailableError, match="NoSuchBucket"):
            await CALLS[call](store, "blob")


# Upstream defect 15.
async def test_messages_and_tracebacks_hold_no_secrets() -> None:
    seen: list[str] = []

    def refuse(method: str, headers: dict[str, str]) -> bytes:
        # S3 answers a bad signature with all that was signed.
        signed = "\n".join(f"{name}:{text}" for name, text in headers.items())
        seen.append(signed)
        code = "<Code>SignatureDoesNotMatch</Code>"
        return answer("403 Forbidden", f"<Error>{code}<Canon>{signed}</Canon></Error>".encode())

    async with run_scripted_server(refuse) as endpoint:
        store = open_at(endpoint)
        for call in set(CALLS) - {"head", "stream"}:
            with pytest.raises(BlobUnavailableError, match="HTTP 403 SignatureDoesNotMatch") as e:
                await CALLS[call](store, "blob")
            shown = "".join(traceback.format_exception(e.value)) + repr(store)
            assert "secret" not in shown.replace("secrets", "")
            assert "AKIAEXAMPLE" not in shown
            assert e.value.__context__ is None
    assert all("very-secret-token" in signed for signed in seen)


async def test_a_conflict_of_writes_under_way_is_repeated() -> None:
    puts = iter([answer("409 Conflict"), answer("200 OK")])

    def respond(method: str, headers: dict[str, str]) -> bytes:
        return next(puts) if method == "PUT" else answer("404 Not Found")

    async with run_scripted_server(respond) as endpoint:
        await open_at(endpoint).put_if_absent("blob", b"x")
    assert list(puts) == []


async def test_a_conflict_with_a_blob_that_is_there_means_that_it_exists() -> None:
    def respond(method: str, headers: dict[str, str]) -> bytes:
        return answer("409 Conflict") if method == "PUT" else answer("200 OK", claimed=1)

    async with run_scripted_server(respond) as endpoint:
        with pytest.raises(BlobExistsError):
            await open_at(endpoint).put_if_absent("blob", b"x")


async def test_a_body_that_breaks_off_is_unavailable_not_short() -> None:
    def respond(method: str, headers: dict[str, str]) -> bytes:
        return answer("200 OK", b"" if method == "HEAD" else b"half", claimed=100)

    async with run_scripted_server(respond) as endpoint:
        with pytest.raises(BlobUnavailableError):
            await open_at(endpoint).get("blob")


async def test_a_blob_replaced_during_a_stream_breaks_it_off(direct: BlobStore) -> None:
    await direct.put("blob", b"a" * 10)
    stream = direct.stream("blob", 5)
    assert await anext(stream) == b"aaaaa"
    await direct.put("blob", b"b" * 10)
    with pytest.raises(BlobUnavailableError, match="412"):
        await anext(stream)


async def test_a_service_that_lists_out_of_order_is_refused() -> None:
    entry = "<Contents><Key>prefix/{}</Key><Size>1</Size><ETag>x</ETag>"
    entry += "<LastModified>2015-10-21T07:28:00.000Z</LastModified></Contents>"
    body = "<ListBucketResult>" + entry.format("b") + entry.format("a") + "</ListBucketResult>"
    async with run_scripted_server(lambda *_: answer("200 OK", body.encode())) as endpoint:
        with pytest.raises(StorageError, match="out of byte order"):
            await keys_of(open_at(endpoint))


async def test_an_absent_blob_stays_not_found_with_a_prefix(direct: BlobStore) -> None:
    with pytest.raises(BlobNotFoundError, match="'absent' does not exist in s3://"):
        await direct.get("absent")
