"""A store on S3 with expiring credentials and unusable buckets."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from pathlib import Path

import pytest

from streamfold._native import Credentials, Storage
from streamfold.errors import StorageError, StreamfoldError
from streamfold.model.records import Record
from streamfold.store import ReadRequest, StreamStore, from_seq_num, open_store
from streamfold.store.engine.location import open_location
from streamfold.store.engine.native import EngineError, WalReader
from tests.s3_gate import Gate, issued, prepare_home

REF = ("test-basin", "orders")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return prepare_home(tmp_path, monkeypatch)


@pytest.fixture
def process_profile(home: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A profile whose credentials are what a file holds at the time."""
    file = home / "issued.json"
    (home / ".aws/config").write_text(
        f"[profile p]\nregion = {gate.region}\nendpoint_url = {gate.endpoint}\n"
        f"credential_process = cat {file}\n"
    )
    monkeypatch.setenv("AWS_PROFILE", "p")
    return file


def issue(file: Path, key: str) -> None:
    # SlateDB asks again five minutes before the end: here, all the time.
    soon = issued(key, timedelta(minutes=4))
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps({"Version": 1, **soon}))
    draft.rename(file)


async def test_an_open_store_commits_on_while_its_credentials_are_replaced(
    process_profile: Path, gate: Gate
) -> None:
    gate.keys = {"FIRST", "SECOND"}
    gate.used.clear()
    issue(process_profile, "FIRST")
    bodies: list[bytes] = []
    async with open_store(f"s3://{gate.bucket}/renewed") as store:
        await store.create_basin(REF[0])
        await store.create_stream(*REF)

        async def append_until_used(key: str) -> None:
            while key not in gate.used:
                bodies.append(b"%d" % len(bodies))
                await store.append(*REF, [Record(bodies[-1])])

        gate.used.clear()
        await append_until_used("FIRST")
        issue(process_profile, "SECOND")
        await append_until_used("SECOND")
        gate.keys = {"SECOND"}
        bodies.append(b"last")
        ack = await store.append(*REF, [Record(b"last")])
        assert ack.end.seq_num == len(bodies)
        batch = await store.read(*REF, ReadRequest(from_seq_num(0)))
        assert [record.body for record in batch.records()] == bodies


async def test_a_store_is_opened_with_the_lasting_keys_of_a_profile(
    home: Path,
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (home / ".aws/credentials").write_text(
        "[work]\naws_access_key_id = PROFILE\naws_secret_access_key = secret-of-a-test\n"
    )
    (home / ".aws/config").write_text(
        f"[profile work]\nregion = {gate.region}\nendpoint_url = {gate.endpoint}\n"
    )
    monkeypatch.setenv("AWS_PROFILE", "work")
    gate.keys = {"PROFILE"}
    async with open_store(f"s3://{gate.bucket}/lasting") as store:
        await store.create_basin(REF[0])


@pytest.mark.parametrize(
    ("key", "bucket", "region", "expected"),
    [
        ("UNKNOWN", None, None, "InvalidAccessKeyId: the service does not accept the credentials"),
        ("KNOWN", "no-such-bucket", None, "NoSuchBucket: the bucket does not exist; create it"),
        ("KNOWN", None, "us-west-2", "the bucket is in another region; set AWS_REGION"),
    ],
)
async def test_what_makes_a_bucket_unusable_is_said_before_it_is_opened(
    gate: Gate, key: str, bucket: str | None, region: str | None, expected: str
) -> None:
    gate.keys = {"KNOWN"}
    environment = gate.server(key).environment()
    environment |= {"AWS_REGION": region} if region else {}
    location = open_location(f"s3://{bucket or gate.bucket}/store", environment)
    with pytest.raises(StorageError, match=expected):
        async with open_store(location):
            pass


async def append_until_refused(store: StreamStore) -> None:
    """Append without end: keys that were asked for just before may serve one more request."""
    while True:
        await store.append(*REF, [Record(b"lost")])


async def test_a_request_fails_while_no_keys_can_be_had(process_profile: Path, gate: Gate) -> None:
    gate.keys = {"FIRST"}
    issue(process_profile, "FIRST")
    url = f"s3://{gate.bucket}/no-keys"
    async with open_store(url) as store:
        await store.create_basin(REF[0])
        await store.create_stream(*REF)
        process_profile.unlink()  # noqa: ASYNC240
        with pytest.raises(StreamfoldError):
            await append_until_refused(store)
        issue(process_profile, "FIRST")


async def test_requests_fail_once_nobody_provides_keys_any_more(gate: Gate) -> None:
    keys = Credentials()
    options = {"bucket": gate.bucket, "region": gate.region, "endpoint": gate.endpoint}
    log = WalReader(Storage.s3({**options, "allow_http": "true"}, keys), "closed")
    keys.close()
    with pytest.raises(EngineError, match="the store was closed"):
        async with asyncio.timeout(60):
            await log.files(0)
