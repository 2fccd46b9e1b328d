"""AWS credentials from every source that AWS tools support reach the service."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from streamfold.blob import open_blob_store
from streamfold.errors import BlobUnavailableError, InvalidError
from tests.s3_gate import Gate, issued, prepare_home

SOURCES = ["profile", "process", "role", "container", "instance"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return prepare_home(tmp_path, monkeypatch)


@pytest.fixture
def metadata() -> Iterator[str]:
    """Answers as the metadata service of an instance, and of a container, does."""

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self._answer(b"a-session")

        def do_GET(self) -> None:
            if self.path.endswith("/security-credentials/"):
                self._answer(b"a-role")
            else:
                kind = "CONTAINER" if self.path == "/container" else "INSTANCE"
                self._answer(json.dumps({"Code": "Success", **issued(kind)}).encode())

        def _answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def set_up(
    source: str, home: Path, gate: Gate, metadata: str, monkeypatch: pytest.MonkeyPatch
) -> str | None:
    """Set up a source; returns the key that it gives, unless it makes one up."""
    settings = f"region = {gate.region}\nendpoint_url = {gate.endpoint}\n"
    (home / ".aws/credentials").write_text(
        "[work]\naws_access_key_id = PROFILE\naws_secret_access_key = secret-of-a-test\n"
    )
    if source in ("container", "instance"):
        (home / ".aws/credentials").unlink()
        (home / ".aws/config").write_text(f"[default]\n{settings}")
        if source == "container":
            monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{metadata}/container")
        else:
            monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "false")
            monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata)
        return source.upper()
    lines = {
        "profile": "",
        "process": f"credential_process = cat {home}/issued.json\n",
        "role": "source_profile = work\nrole_arn = arn:aws:iam::123456789012:role/reader\n",
    }[source]
    name = "work" if source == "profile" else "other"
    (home / ".aws/config").write_text(f"[profile {name}]\n{settings}{lines}")
    (home / "issued.json").write_text(json.dumps({"Version": 1, **issued("PROCESS")}))
    monkeypatch.setenv("AWS_PROFILE", name)
    return {"profile": "PROFILE", "process": "PROCESS", "role": None}[source]


@pytest.mark.parametrize("source", SOURCES)
async def test_blobs_are_reached_with_the_credentials_of(
    source: str, home: Path, gate: Gate, metadata: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = set_up(source, home, gate, metadata, monkeypatch)
    gate.keys = AnyKey() if expected is None else {expected}
    gate.used.clear()
    blobs = open_blob_store(f"s3://{gate.bucket}/{source}")
    await blobs.put("key", b"value")
    assert await blobs.get("key") == b"value"
    assert len(gate.used) >= 2
    assert "MAKER" not in gate.used
    assert expected is None or {*gate.used} == {expected}


class AnyKey(set[str]):
    """Holds every key: a role's are made up."""

    def __contains__(self, key: object) -> bool:
        return key != "PROFILE"


async def test_credentials_that_expire_are_replaced_while_the_store_is_open(
    home: Path, gate: Gate, metadata: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_up("process", home, gate, metadata, monkeypatch)
    gate.keys = {"FIRST", "SECOND"}
    gate.used.clear()
    blobs = open_blob_store(f"s3://{gate.bucket}/renewed")
    for key in ("FIRST", "SECOND"):
        soon = issued(key, timedelta(minutes=4))  # obstore asks again 5 minutes before the end
        (home / "issued.json").write_text(json.dumps({"Version": 1, **soon}))
        while key not in gate.used:
            await blobs.put("key", key.encode())
    gate.keys = {"SECOND"}
    assert await blobs.get("key") == b"SECOND"


async def test_stores_of_one_process_ask_once_until_the_profile_changes(
    home: Path, gate: Gate, metadata: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_up("process", home, gate, metadata, monkeypatch)
    config, asked = home / ".aws/config", home / "asked"
    script = home / "issue.sh"
    script.write_text(f"echo asked >> {asked}\ncat {home}/issued.json\n")
    lines = config.read_text().replace(f"cat {home}/issued.json", f"sh {script}")
    config.write_text(lines)
    gate.keys = {"PROCESS"}
    for _ in range(3):
        await open_blob_store(f"s3://{gate.bucket}/shared").put("key", b"value")
    assert asked.read_text().splitlines() == ["asked"]
    config.write_text(f"{lines}# changed\n")
    await open_blob_store(f"s3://{gate.bucket}/shared").put("key", b"value")
    assert asked.read_text().splitlines() == ["asked"] * 2


async def test_no_credentials_at_all_are_an_error_that_says_where_to_put_some(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", gate.endpoint)
    with pytest.raises(BlobUnavailableError, match="there are no AWS credentials: set AWS_PROFILE"):
        await open_blob_store(f"s3://{gate.bucket}").get("key")


def test_a_profile_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(InvalidError, match=r"nobody.*correct AWS_PROFILE"):
        open_blob_store("s3://bucket")


async def test_an_sso_session_that_has_ended_is_named_with_the_command_that_renews_it(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / ".aws/config").write_text(
        "[profile people]\nsso_session = company\nsso_account_id = 123456789012\n"
        "sso_role_name = reader\nregion = eu-central-1\n[sso-session company]\n"
        "sso_region = eu-central-1\nsso_start_url = https://company.example/start\n"
    )
    monkeypatch.setenv("AWS_PROFILE", "people")
    with pytest.raises(BlobUnavailableError, match="aws sso login"):
        await open_blob_store("s3://bucket").get("key")


async def test_bad_credentials_a_missing_bucket_and_another_region_are_distinguished(
    gate: Gate,
) -> None:
    gate.keys = {"KNOWN"}
    known = gate.server("KNOWN").options()
    bad = open_blob_store(f"s3://{gate.bucket}", **gate.server("UNKNOWN").options())
    with pytest.raises(BlobUnavailableError, match=r"InvalidAccessKeyId: .* not accept"):
        await bad.get("key")
    missing = open_blob_store("s3://no-such-bucket", **known)
    with pytest.raises(BlobUnavailableError, match=r"NoSuchBucket: the bucket does not exist"):
        await missing.get("key")
    elsewhere = open_blob_store(f"s3://{gate.bucket}", **{**known, "region": "us-west-2"})
    with pytest.raises(BlobUnavailableError, match=r"in another region; set AWS_REGION"):
        await elsewhere.put("key", b"")
