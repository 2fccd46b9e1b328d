"""Commands on S3 with profile credentials, and with unusable buckets."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.cli.commands import COMMAND, Shell
from tests.interop.serving import serving
from tests.s3_gate import Gate, issued, prepare_home


@pytest.fixture
def profile(tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile with credentials that expire, in the home folder of this test's user."""
    home = prepare_home(tmp_path, monkeypatch)
    (home / "issued.json").write_text(json.dumps({"Version": 1, **issued("ROLE")}))
    (home / ".aws/config").write_text(
        f"[profile work]\nregion = {gate.region}\nendpoint_url = {gate.endpoint}\n"
        f"credential_process = cat {home / 'issued.json'}\n"
    )
    monkeypatch.setenv("AWS_PROFILE", "work")


@pytest.mark.usefixtures("profile")
def test_a_server_keeps_records_in_a_bucket_with_the_credentials_of_a_profile(gate: Gate) -> None:
    bucket = ("--bucket", gate.bucket, "--path", "served", "--no-access-log")
    with serving("--host", "127.0.0.1", *bucket) as exports:
        shell = Shell(exports)
        shell.ok("create-basin", "test-basin")
        shell.ok("create-stream", "test-basin/orders")
        shell.ok("append", "test-basin/orders", stdin=b"kept\n")
    with serving("--host", "127.0.0.1", *bucket) as exports:
        assert Shell(exports).ok("read", "test-basin/orders").text == "kept\n"


@pytest.mark.usefixtures("profile")
@pytest.mark.parametrize(
    ("variables", "bucket", "expected"),
    [
        (
            {"AWS_ACCESS_KEY_ID": "NOBODY", "AWS_SECRET_ACCESS_KEY": "x"},
            None,
            "not accept the cred",
        ),
        ({}, "no-such-bucket", "the bucket does not exist; create it"),
        ({"AWS_REGION": "us-west-2"}, None, "the bucket is in another region; set AWS_REGION"),
        ({"AWS_PROFILE": "nobody"}, None, "correct AWS_PROFILE"),
    ],
)
def test_a_bucket_that_cannot_be_used_is_one_line(
    gate: Gate, variables: dict[str, str], bucket: str | None, expected: str
) -> None:
    stream_uri = {"AWS_ENDPOINT_URL_S3": gate.endpoint, "AWS_DEFAULT_REGION": gate.region}
    name = bucket or gate.bucket
    for verb in (["serve", "--port", "0", "--bucket", name], ["archive", "show", f"s3://{name}/t"]):
        ended = subprocess.run(
            [*COMMAND, *verb],
            env=os.environ | stream_uri | variables,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert ended.returncode == 1, ended.stderr
        assert [expected in line for line in ended.stderr.splitlines()] == [True], ended.stderr
