"""Contexts: where commands find their server and token, without showing secrets."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from tests.cli.commands import Shell

TOKEN = "a-token-that-stays-secret-1234"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "config.toml"


@pytest.fixture
def user(shell: Shell, file: Path) -> Shell:
    """A person with a file of their own, and no variables of S2."""
    other = Shell({})
    other.environment = {
        name: value for name, value in shell.environment.items() if not name.startswith("S2_")
    }
    other.environment["STREAMFOLD_CONFIG"] = str(file)
    return other


def test_a_context_is_set_once_and_used_by_every_verb(
    user: Shell, shell: Shell, stream_uri: str, file: Path
) -> None:
    missing = user("check-tail", stream_uri)
    assert (missing.status, missing.stderr.count("\n")) == (2, 1)
    assert "streamfold config set endpoint URL" in missing.stderr
    url = shell.environment["S2_ACCOUNT_ENDPOINT"]
    assert user.json("config", "set", "endpoint", url) == {
        "context": "default", "key": "endpoint", "value": url,
    }  # fmt: skip
    assert user.json("check-tail", stream_uri)["seq_num"] == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    user.ok("config", "set", "endpoint", "http://127.0.0.1:1", "--context", "other")
    assert user("check-tail", stream_uri, "--context", "other", "--json").error["code"] == (
        "unreachable"
    )
    user.ok("config", "use", "other")
    assert user("check-tail", stream_uri).status == 1
    assert user.json("check-tail", stream_uri, "--context", "default")["seq_num"] == 0
    listed = user.ok("config", "list", "--json").objects
    assert [(one["name"], one["current"]) for one in listed] == [
        ("default", False), ("other", True),
    ]  # fmt: skip
    user.ok("config", "delete", "other")
    assert user("check-tail", stream_uri).status == 2


def test_options_come_before_variables_and_variables_before_the_file(user: Shell) -> None:
    def found(*options: str) -> tuple[str, str]:
        shape = user.json("config", "show", *options)
        return shape["account_endpoint"], shape["endpoint_from"]

    user.ok("config", "set", "endpoint", "http://file.example")
    user.ok("config", "set", "endpoint", "http://named.example", "--context", "named")
    assert found() == ("http://file.example", f"context 'default' in {_path(user)}")
    user.environment["STREAMFOLD_CONTEXT"] = "named"
    assert found()[0] == "http://named.example"
    user.environment["S2_ACCOUNT_ENDPOINT"] = "http://variable.example"
    user.environment["S2_BASIN_ENDPOINT"] = "http://{basin}.variable.example"
    assert found() == ("http://variable.example", "environment")
    assert found("--context", "default")[0] == "http://file.example"
    assert found("--endpoint", "option.example") == ("https://option.example", "--endpoint")


def test_the_token_of_a_context_goes_to_its_own_server_alone(user: Shell) -> None:
    user.ok("config", "set", "endpoint", "http://mine.example")
    user.ok("config", "set", "access_token", "-", stdin=TOKEN.encode())
    assert user.json("config", "show")["access_token"] == "…1234"
    assert user.json("config", "show", "--endpoint", "http://x.example")["access_token"] is None
    user.environment["S2_ACCESS_TOKEN"] = "the-variable-s-token-9876"
    assert user.json("config", "show")["access_token"] == "…9876"
    named = user.json("config", "show", "--context", "default")
    assert (named["access_token"], named["endpoint_from"]) == ("…1234", named["token_from"])


def test_a_token_is_never_printed_whole(user: Shell, file: Path) -> None:
    printed = [user.ok("config", "set", "access_token", TOKEN)]
    user.ok("config", "set", "endpoint", "http://mine.example")
    for verb in (("list",), ("show",), ("get", "access_token"), ("use", "default")):
        printed += [user.ok("config", *verb), user.ok("config", *verb, "--json")]
    assert TOKEN in file.read_text()
    assert [one for one in printed if TOKEN in one.text + one.stderr] == []
    broken = user("config", "set", "access_token", f"{TOKEN} x")
    assert (broken.status, TOKEN in broken.stderr) == (1, False)


def test_a_file_that_others_can_read_is_noted_and_closed_by_the_next_change(
    user: Shell, file: Path
) -> None:
    user.ok("config", "set", "endpoint", "http://mine.example")
    file.chmod(0o644)
    assert f"chmod 600 {file}" in user.ok("config", "list").stderr
    user.ok("config", "set", "access_token", TOKEN)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("nonsense", "is not a configuration"), ('[contexts.a]\nurl = "x"', "unknown field `url`")],
)
def test_a_file_that_is_wrong_is_one_line_with_its_path(
    user: Shell, file: Path, text: str, complaint: str
) -> None:
    file.parent.mkdir()
    file.write_text(text)
    failed = user("ls")
    assert (failed.status, failed.stderr.count("\n")) == (1, 1)
    assert str(file) in failed.stderr
    assert complaint in failed.stderr


def test_an_unknown_context_or_value_is_refused_with_the_way_out(user: Shell) -> None:
    user.ok("config", "set", "endpoint", "http://mine.example")
    failed = user("ls", "--context", "elsewhere", "--json")
    assert (failed.status, failed.error["code"]) == (4, "context_not_found")
    assert "default" in failed.error["message"]
    assert user("config", "get", "access_token").status == 4
    assert "'endpoint'" in user("config", "set", "color", "x").stderr
    assert user("config", "set", "endpoint", "x", "--context", "a b").status == 1
    user.ok("config", "unset", "endpoint")
    assert "has no account_endpoint" in user("ls").stderr


@pytest.mark.parametrize(
    "value",
    ["ftp://host", "http://", "http://host/v1/basins", "http://me:secret@host", "a?b=secret"],
)
def test_an_endpoint_that_is_not_an_address_is_refused_and_kept_secret(
    user: Shell, file: Path, value: str
) -> None:
    failed = user("config", "set", "endpoint", value)
    assert (failed.status, failed.stderr.count("\n"), file.exists()) == (1, 1, False)
    assert "secret" not in failed.stderr


def _path(user: Shell) -> str:
    return user.environment["STREAMFOLD_CONFIG"]
