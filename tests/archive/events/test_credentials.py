"""Credential profiles: validation, STS requests, and secrets that are never shown."""

from __future__ import annotations

import logging
import re
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from streamfold.archive.destinations.aws_credentials import AwsAccess, Profile, Profiles
from streamfold.archive.destinations.destination import Destination, check_compare_and_swap
from streamfold.archive.events import EventRefusedError, SqsSink
from streamfold.blob.aws_identity import CredentialsUnavailableError
from streamfold.errors import BlobUnavailableError, InvalidError
from streamfold.testing.event_sink_kit import sample_event
from tests.archive.events.receivers import Hook, Queue, access_to, aws_client
from tests.s3 import S3Server

ROLE = "arn:aws:iam::123456789012:role/archive-events"


class Clock:
    """Starts now, as the server does, and is moved by tests."""

    def __init__(self) -> None:
        self.ahead = timedelta(0)

    def now(self) -> datetime:
        return datetime.now(UTC) + self.ahead


def role_access(server: S3Server, clock: Clock | None = None, **fields: str) -> AwsAccess:
    raw = {
        "type": "assume_role",
        "role_arn": ROLE,
        "region": server.region,
        "endpoint_url": server.endpoint,
        **fields,
    }
    profiles = Profiles.parse({"role": raw}, now=(clock or Clock()).now)
    return profiles.access("role", path="events.orders.credentials")


def caller_of(access: AwsAccess) -> str:
    """Return as whom a client acts, by what STS itself says."""
    return str(access.client("sts").get_caller_identity()["Arn"])


def test_a_role_is_assumed_with_its_session_name(ambient: S3Server) -> None:
    access = role_access(ambient, session_name="orders", external_id="agreed-upon")
    assert caller_of(access).endswith("assumed-role/archive-events/orders")
    other = role_access(ambient)
    assert caller_of(other).endswith("assumed-role/archive-events/streamfold")


def test_ambient_credentials_are_those_of_the_environment(ambient: S3Server) -> None:
    found = access_to(ambient).storage_credentials()
    assert found["access_key_id"] == ambient.access_key_id
    assert found["secret_access_key"] == ambient.secret_access_key
    assert found.get("token") is None


@pytest.fixture
def requests_to_sts(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the real server is asked, noted on the way."""
    from moto.sts.models import STSBackend

    asked: list[dict[str, Any]] = []
    answer = STSBackend.assume_role

    def note(self: STSBackend, **wanted: Any) -> Any:
        asked.append(wanted)
        return answer(self, **wanted)

    monkeypatch.setattr(STSBackend, "assume_role", note)
    return asked


def test_sts_is_asked_for_the_role_once_with_the_external_id(
    ambient: S3Server, requests_to_sts: list[dict[str, Any]]
) -> None:
    access = role_access(ambient, external_id="agreed-upon", session_name="orders")
    for service in ("sqs", "sns", "sts"):
        access.client(service)
    assert requests_to_sts == [], "not before it is needed"
    caller_of(access)
    access.storage_credentials()
    [asked] = requests_to_sts
    assert asked["external_id"] == "agreed-upon"
    assert (asked["role_arn"], asked["role_session_name"]) == (ROLE, "orders")


def test_a_role_is_renewed_before_it_expires(
    ambient: S3Server, requests_to_sts: list[dict[str, Any]]
) -> None:
    clock = Clock()
    access = role_access(ambient, clock)
    first = access.storage_credentials()
    clock.ahead = timedelta(minutes=30)
    assert access.storage_credentials()["token"] == first["token"], "an hour is not over"
    clock.ahead = timedelta(minutes=51)
    renewed = access.storage_credentials()
    assert renewed["token"] != first["token"]
    assert len(requests_to_sts) == 2


def test_storage_never_keeps_credentials_beyond_their_end(ambient: S3Server) -> None:
    clock = Clock()
    access = role_access(ambient, clock)
    end = clock.now() + timedelta(hours=1)
    for minutes in range(0, 50, 7):
        clock.ahead = timedelta(minutes=minutes)
        found = access.storage_credentials()
        assert found["expires_at"] is not None
        assert clock.now() < found["expires_at"] < end + timedelta(seconds=1)


async def test_a_sink_acts_under_its_role(ambient: S3Server) -> None:
    queue = Queue(ambient, fifo=False)
    sink = SqsSink(queue.url, role_access(ambient))
    await sink.send(sample_event())
    assert len(await queue.receive(1)) == 1
    await sink.close()


async def test_a_destination_acts_under_its_role(ambient: S3Server, s3_url: str) -> None:
    destination = Destination.open(s3_url, **role_access(ambient).blob_options())
    await check_compare_and_swap(destination, "probe")
    await destination.blobs.put("epoch=1/file", b"bytes")
    key = s3_url.removeprefix(f"s3://{ambient.bucket}/") + "/epoch=1/file"
    found = aws_client(ambient, "s3").get_object(Bucket=ambient.bucket, Key=key)
    assert found["Body"].read() == b"bytes"


def test_options_for_storage_are_those_that_the_profile_has(ambient: S3Server) -> None:
    plain = Profiles.parse({}).access(None, path="destinations[0].credentials")
    assert set(plain.blob_options()) == {"credential_provider"}
    there = Profiles.parse({"a": {"region": "eu-west-1", "endpoint_url": "http://minio:9000"}})
    options = there.access("a", path="x", region="eu-north-1").blob_options()
    assert (options["region"], options["endpoint"]) == ("eu-north-1", "http://minio:9000")


def test_a_region_that_the_component_names_wins(ambient: S3Server) -> None:
    profiles = Profiles.parse({"a": {"region": "eu-west-1"}})
    assert profiles.access("a", path="x").client("sqs").meta.region_name == "eu-west-1"
    there = profiles.access("a", path="x", region="us-west-2")
    assert there.client("sqs").meta.region_name == "us-west-2"
    assert profiles.access("a", path="y") is profiles.access("a", path="x")


def test_an_unknown_profile_is_refused_with_its_path() -> None:
    profiles = Profiles.parse({"known": {}}, path="snapshotter.credentials")
    with pytest.raises(InvalidError) as failure:
        profiles.access("unknown", path="tables[0].events[1].credentials")
    assert "tables[0].events[1].credentials names credentials 'unknown'" in str(failure.value)
    assert "snapshotter.credentials" in str(failure.value)
    assert "['known']" in str(failure.value)


@pytest.mark.parametrize(
    ("raw", "reported"),
    [
        ({"type": "magic"}, "credentials.p.type is 'magic'"),
        ({"type": "assume_role"}, "credentials.p.role_arn is None"),
        ({"type": "assume_role", "role_arn": "archive"}, "credentials.p.role_arn is 'archive'"),
        ({"type": "assume_role", "role_arn": ROLE, "session_name": "a b"}, "p.session_name"),
        ({"role_arn": ROLE}, "credentials.p has a role"),
        ({"external_id": "x"}, "credentials.p has a role"),
        ({"rolearn": ROLE}, "credentials.p: Object contains unknown field `rolearn`"),
        ({"region": 3}, "credentials.p: Expected `str | null`, got `int` - at `$.region`"),
        ("ambient", "credentials.p: Expected `object`, got `str`"),
    ],
)
def test_profiles_that_make_no_sense_are_refused_with_their_path(
    raw: object, reported: str
) -> None:
    with pytest.raises(InvalidError, match=re.escape(reported)):
        Profiles.parse({"p": raw})


def test_an_empty_type_is_ambient() -> None:
    Profiles.parse({"p": {"type": ""}}).access("p", path="x")


def test_profiles_show_no_external_id() -> None:
    profile = Profile(type="assume_role", role_arn=ROLE, external_id="agreed-upon")
    shown = repr(profile) + str(profile) + repr(Profiles({"p": profile}).access("p", path="x"))
    assert "agreed-upon" not in shown
    assert ROLE in shown


def test_a_role_that_sts_does_not_give_is_reported_without_secrets(
    ambient: S3Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="streamfold")
    monkeypatch.setattr("moto.sts.models.STSBackend.assume_role", _deny)
    access = role_access(ambient, external_id="agreed-upon")
    with pytest.raises(CredentialsUnavailableError) as failure:
        access.storage_credentials()
    message = str(failure.value)
    assert "'role'" in message
    assert ROLE in message
    assert "RegionDisabledException" in message
    assert failure.value.__cause__ is None
    for secret in ("agreed-upon", ambient.secret_access_key, "signed-token"):
        assert secret not in message + caplog.text


def _deny(*_: object, **__: object) -> None:
    from moto.sts.exceptions import STSClientError

    # As AWS does for signatures: the text quotes what was signed.
    raise STSClientError("RegionDisabledException", "x-amz-security-token:signed-token")


async def test_a_sink_whose_role_is_refused_says_so_and_may_try_again(
    ambient: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue(ambient, fifo=False)
    sink = SqsSink(queue.url, role_access(ambient))
    with monkeypatch.context() as denied:
        denied.setattr("moto.sts.models.STSBackend.assume_role", _deny)
        with pytest.raises(EventRefusedError, match="STS did not grant role"):
            await sink.send(sample_event())
    await sink.send(sample_event())
    assert len(await queue.receive(1)) == 1
    await sink.close()


def test_a_page_of_a_proxy_instead_of_an_answer_of_sts_is_a_failure_like_others(
    ambient: S3Server, hook: Hook
) -> None:
    hook.answer, hook.body = (lambda _: 502), b"<!doctype html><title>Bad Gateway</title>"
    access = role_access(ambient, endpoint_url=hook.url.partition("/hooks")[0])
    with pytest.raises(CredentialsUnavailableError, match="ResponseParserError"):
        access.storage_credentials()


def test_storage_without_any_credentials_says_which_profile(
    ambient: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    with pytest.raises(CredentialsUnavailableError, match="credentials 'tests'"):
        access_to(ambient).storage_credentials()


def test_without_boto3_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(InvalidError, match=re.escape("streamfold[aws]")):
        Profiles.parse({}).access(None, path="events.orders.credentials")


async def test_a_write_without_credentials_is_known_not_to_have_happened(s3_url: str) -> None:
    def provider() -> dict[str, str]:
        raise CredentialsUnavailableError("the role cannot be assumed")

    destination = Destination.open(s3_url, credential_provider=provider, region="us-east-1")
    with pytest.raises(BlobUnavailableError):
        await destination.blobs.put("epoch=1/file", b"bytes")
