"""A store on S3 with credentials that expire, and with what makes a bucket unusable."""

from __future__ import annotations

import json
import stat
import urllib.error
import urllib.request
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from streamfold.errors import StorageError
from streamfold.model.records import Record
from streamfold.store import ReadRequest, from_seq_num, open_store
from streamfold.store.engine.location import open_location
from streamfold.store.engine.s3_access import CredentialEndpoint
from tests.s3_gate import Gate, issued, prepare_home

if TYPE_CHECKING:  # exists only in obstore's stubs
    from obstore.store import S3Credential

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


def test_credentials_are_refused_without_the_token() -> None:
    def never() -> S3Credential:
        raise AssertionError("credentials were asked for")

    endpoint = CredentialEndpoint(never)
    config = endpoint.config()
    token = Path(config["container_authorization_token_file"])
    assert stat.S_IMODE(token.parent.stat().st_mode) == 0o700
    for headers in ({}, {"Authorization": "guess"}):
        request = urllib.request.Request(config["container_credentials_full_uri"], headers=headers)
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(request, timeout=60)
    endpoint.close()
    assert not token.exists()
