"""Commands on S3 with SSO credentials, valid and expired."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from tests.cli.commands import COMMAND, Shell
from tests.interop.serving import serving
from tests.ports import free_port
from tests.s3_gate import Gate, prepare_home
from tests.sso import Portal, log_in, run_portal, write_profile

HOUR = timedelta(hours=1)
#: Texts that no output may have.
SECRETS = ("token-of", "secret-of")


@pytest.fixture
def portal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Portal]:
    with run_portal() as portal:
        for name, value in portal.environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_PROFILE", "people")
        yield portal


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return prepare_home(tmp_path, monkeypatch)


def run(*verb: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *verb], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("session", [True, False], ids=["sso-session", "start-url"])
def test_a_server_keeps_records_in_a_bucket_with_the_credentials_of_an_sso_login(
    session: bool, home: Path, gate: Gate, portal: Portal
) -> None:
    write_profile(home, gate, session=session)
    log_in(home, session=session, left=HOUR)
    gate.used.clear()
    bucket = ("--bucket", gate.bucket, "--path", f"sso-{session}", "--no-access-log")
    with serving("--host", "127.0.0.1", *bucket) as exports:
        shell = Shell(exports)
        shell.ok("create-basin", "test-basin")
        shell.ok("create-stream", "test-basin/orders")
        shell.ok("append", "test-basin/orders", stdin=b"kept\n")
        assert shell.ok("read", "test-basin/orders").text == "kept\n"
    assert {*gate.used} == {"SSO"}
    assert {*portal.asked} == {"/federation/credentials"}


@pytest.mark.parametrize("session", [True, False], ids=["sso-session", "start-url"])
@pytest.mark.parametrize("over", ["expired", "revoked", "none"])
def test_a_login_that_is_over_is_one_line_that_says_to_log_in(
    session: bool, over: str, home: Path, gate: Gate, portal: Portal
) -> None:
    write_profile(home, gate, session=session)
    if over != "none":
        token, left = ("of-before", HOUR) if over == "revoked" else ("token-of-a-login", -HOUR)
        log_in(home, session=session, token=token, left=left)
    url = f"s3://{gate.bucket}/table"
    for verb in (("serve", "--port", "0", "--bucket", gate.bucket), ("archive", "show", url)):
        ended = run(*verb)
        assert ended.returncode == 1, ended.stderr
        lines = ended.stderr.splitlines()
        assert ["run `aws sso login" in line for line in lines] == [True], ended.stderr
        assert not [secret for secret in SECRETS if secret in ended.stderr + ended.stdout]
    assert len(portal.asked) <= 2 * 2  # a refresh or a request for each verb, and one more at most


def test_a_portal_that_cannot_be_reached_is_one_line(
    home: Path, gate: Gate, portal: Portal, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_profile(home, gate, session=True)
    log_in(home, session=True, left=HOUR)
    monkeypatch.setenv("AWS_ENDPOINT_URL_SSO", f"http://127.0.0.1:{free_port()}")
    failed = run("archive", "show", f"s3://{gate.bucket}")
    assert failed.returncode == 1
    lines = failed.stderr.splitlines()
    assert ["check the network to the service" in line for line in lines] == [True], failed.stderr
