"""Failing commands print one accurate line with a code, and set an exit status."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import ssl
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from streamfold.cli.main import streamfold
from streamfold.cli.menu import SECTIONS
from streamfold.model.names import endpoint_url
from tests.cli.commands import COMMAND, Outcome, Shell
from tests.cli.cut_line import cut_line
from tests.interop.serving import serving
from tests.ports import free_port


def _verbs() -> list[str]:
    """Every verb, with those of groups by their full names."""
    found = []
    context = click.Context(streamfold)
    for name in [name for verbs in SECTIONS.values() for name in verbs]:
        verb = streamfold.get_command(context, name)
        if isinstance(verb, click.Group):
            found += [f"{name} {inner}" for inner in verb.list_commands(context)]
        else:
            found.append(name)
    return found


VERBS = _verbs()
#: Commands whose output is a protocol's.
PROTOCOLS = ("mcp",)


@pytest.mark.parametrize("missing", ["S2_ACCOUNT_ENDPOINT", "S2_BASIN_ENDPOINT"])
def test_a_variable_that_is_not_set_is_named_with_the_way_out(shell: Shell, missing: str) -> None:
    other = Shell({})
    other.environment = {**shell.environment, missing: ""}
    failed = other("ls")
    assert failed.status == 2
    assert failed.stderr.startswith(f"error: {missing} is not set: ")
    assert failed.stderr.count("\n") == 1


def test_an_endpoint_may_be_given_instead_of_variables(shell: Shell, stream_uri: str) -> None:
    other = Shell({})
    other.environment = {
        name: value for name, value in shell.environment.items() if "ENDPOINT" not in name
    }
    url = shell.environment["S2_BASIN_ENDPOINT"]
    assert other.json("check-tail", stream_uri, "--endpoint", url)["seq_num"] == 0


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_an_endpoint_of_this_machine_needs_no_scheme_and_an_open_server_no_token(
    shell: Shell, stream_uri: str, host: str
) -> None:
    other = Shell({})
    other.environment = {
        name: value for name, value in shell.environment.items() if not name.startswith("S2_")
    }
    port = shell.environment["S2_BASIN_ENDPOINT"].rpartition(":")[2]
    tail = other.json("check-tail", stream_uri, "--endpoint", f"{host}:{port}")
    assert tail["seq_num"] == 0


def test_an_endpoint_elsewhere_without_a_scheme_is_reached_by_tls() -> None:
    assert endpoint_url("streams.example:8080") == "https://streams.example:8080"
    assert endpoint_url("127.0.0.1.example") == "https://127.0.0.1.example"
    assert endpoint_url("[::1]:80") == "http://[::1]:80"


def test_an_endpoint_that_is_not_http_is_refused_with_an_example(shell: Shell) -> None:
    failed = shell("ls", "--endpoint", "ftp://streams.example")
    assert failed.status == 1
    assert "'ftp://streams.example' is not an address of HTTP: write http://" in failed.stderr


def test_snapshots_of_an_unreachable_server_say_where_to_look(shell: Shell, tmp_path: Path) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    folder = tmp_path.as_uri()
    failed = shell(
        "snapshot", "list", "my-basin/orders", "--snapshots", folder, "--endpoint", address
    )
    assert failed.status == 1
    assert failed.stderr.startswith("error: the server cannot be reached: Connection refused at ")
    assert "`streamfold doctor` looks further" in failed.stderr


def test_a_server_that_asks_for_a_token_says_where_to_put_it(tmp_path: Path) -> None:
    token = tmp_path / "root"
    token.write_text("a-root-token-of-this-test-alone-0123456789")
    with serving("--host", "127.0.0.1", "--root-token-file", str(token)) as exports:
        other = Shell({})
        other.environment = {**os.environ, **exports, "S2_ACCESS_TOKEN": ""}
        failed = other("ls")
    assert failed.status == 1
    assert "S2_ACCESS_TOKEN or --token-file" in failed.stderr


@pytest.mark.parametrize(
    ("given", "meant"),
    [("apend", "'append'"), ("delete-strem", "'delete-stream'"), ("archive shw", "'show'")],
)
def test_a_misspelt_verb_is_answered_with_the_one_that_it_resembles(given: str, meant: str) -> None:
    failed = Shell({})(*given.split())
    assert failed.status == 2
    assert f"No such command '{given.split()[-1]}'. Did you mean {meant}" in failed.stderr


@pytest.mark.parametrize("group", ["archive", "snapshot", "snapshotter"])
def test_the_help_of_a_group_shows_whole_sentences(group: str) -> None:
    output = CliRunner().invoke(streamfold, [group, "--help"]).output
    summaries = output.partition("Commands:")[2]
    assert summaries
    assert "..." not in summaries


def test_what_is_removed_for_good_is_asked_for_or_confirmed_with_yes(
    shell: Shell, basin: str, stream_uri: str
) -> None:
    shell.ok("append", stream_uri, stdin=b"a\nb\n")
    for verb in (("delete-stream", stream_uri), ("delete-basin", basin), ("trim", stream_uri, "1")):
        refused = shell(*verb, "--json")
        assert (refused.status, refused.error["code"]) == (2, "confirmation_missing")
        assert "give --yes" in refused.error["message"]
    assert shell.json("check-tail", stream_uri)["seq_num"] == 2
    assert shell.ok("read", stream_uri).text == "a\nb\n"
    shell.ok("trim", stream_uri, "9", "--yes")
    shell.ok("delete-stream", stream_uri, "--yes")


@pytest.mark.parametrize(("answer", "status", "left"), [(b"n\n", 1, 1), (b"y\n", 0, 0)])
def test_a_person_at_a_terminal_is_asked(
    shell: Shell, basin: str, answer: bytes, status: int, left: int
) -> None:
    shell.ok("create-stream", f"{basin}/asked")
    terminal, other_end = pty.openpty()
    try:
        os.write(terminal, answer)
        done = subprocess.run(
            [*COMMAND, "delete-stream", f"{basin}/asked"],
            stdin=other_end,
            capture_output=True,
            env=shell.environment,
            timeout=120,
            check=False,
        )
    finally:
        os.close(terminal)
        os.close(other_end)
    assert done.returncode == status, done.stderr
    assert f"delete the stream s2://{basin}/asked" in done.stderr.decode()
    streams = shell.ok("list-streams", basin, "--json").objects
    assert len([stream for stream in streams if stream["deleted_at"] is None]) == left


def test_deleting_what_is_not_there_does_not_ask_to_create_it(shell: Shell, basin: str) -> None:
    for verb in (("delete-stream", f"{basin}/nothing"), ("delete-basin", "nothing-here")):
        failed = shell(*verb, "--yes")
        assert failed.status == 4
        assert "there is nothing to delete" in failed.stderr
        assert "create it" not in failed.stderr


def test_an_unreachable_server_is_not_an_unknown_outcome(shell: Shell) -> None:
    nowhere = ("--endpoint", "http://127.0.0.1:1", "--json")
    for verb in (("ls",), ("create-basin", "some-basin"), ("append", "some-basin/s")):
        failed = shell(*verb, *nowhere, stdin=b"x\n")
        assert (failed.status, failed.error["code"]) == (1, "unreachable")


def test_an_unreachable_server_is_named_with_what_to_do(shell: Shell) -> None:
    failed = shell("ls", "--endpoint", "http://127.0.0.1:1")
    assert failed.stderr.startswith(
        "error: the server at http://127.0.0.1:1 cannot be reached: Connection refused at 127.0.0.1 "
        "port 1; is it running"
    )
    assert "`streamfold doctor`" in failed.stderr


@pytest.mark.parametrize("verb", [("ls",), ("top",), ("doctor",), ("check-tail", "some-basin/s")])
def test_a_failure_to_connect_is_told_without_numbers_of_errors(
    shell: Shell, verb: tuple[str, ...]
) -> None:
    failed = shell(*verb, "--endpoint", "http://127.0.0.1:1")
    said = failed.stdout.decode() + failed.stderr
    assert (failed.status, "Connection refused" in said, "Errno" in said) == (1, True, False)


def test_https_to_a_server_without_tls_is_answered_with_the_right_address(shell: Shell) -> None:
    plain = shell.environment["S2_ACCOUNT_ENDPOINT"]
    failed = shell("ls", "--endpoint", plain.replace("http://", "https://"))
    assert failed.stderr.endswith(f"it has no TLS: write {plain}\n")


def test_a_certificate_that_is_not_trusted_is_trusted_once_it_is_in_the_variable(
    shell: Shell, tmp_path: Path
) -> None:
    with serving("--host", "127.0.0.1", "--tls-self") as variables:
        url = variables["S2_ACCOUNT_ENDPOINT"].replace("127.0.0.1", "localhost")
        for verb in (("ls",), ("doctor",)):
            assert "set SSL_CERT_FILE" in _said(shell(*verb, "--endpoint", url))
        plain = url.replace("https://", "http://")
        for verb in (("ls",), ("doctor",)):
            assert f"if it has TLS, write {url}" in _said(shell(*verb, "--endpoint", plain))
        certificate = tmp_path / "certificate.pem"
        port = int(url.rpartition(":")[2])
        certificate.write_text(ssl.get_server_certificate(("localhost", port)))
        trusting = Shell({})
        trusting.environment = {**shell.environment, "SSL_CERT_FILE": str(certificate)}
        assert trusting("ls", "--endpoint", url).status == 0


def _said(failed: Outcome) -> str:
    return failed.stdout.decode() + failed.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fence", "some-basin/s", "x" * 37), "a fencing token of 37 bytes is too long"),
        (("append", "some-basin/s", "--fencing-token", "x" * 37), "at most 36 bytes"),
        (("read", "some-basin/s", "--seq-num", "first"), "'first' is not a whole number"),
        (("bench", "some-basin", "--target-mibps", "much"), "'much' is not a number"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named_with_its_rule(
    shell: Shell, arguments: tuple[str, ...], message: str
) -> None:
    failed = shell(*arguments)
    assert failed.status == 2
    assert message in failed.stderr


def test_an_endpoint_with_a_path_is_refused_with_the_form_of_one(shell: Shell) -> None:
    url = f"{shell.environment['S2_ACCOUNT_ENDPOINT']}/v1"
    failed = shell("ls", "--endpoint", url)
    assert failed.status == 1
    assert f"endpoint '{url}' cannot be used" in failed.stderr
    assert "write http://host:port" in failed.stderr


def test_a_copy_to_a_basin_that_cannot_be_created_says_how_basins_are_named(
    shell: Shell, stream_uri: str
) -> None:
    failed = shell("copy", stream_uri, "short/s")
    assert (failed.status, failed.stderr) == (
        1,
        "error: basin name 'short' has 5 characters: it must have 8 to 48\n",
    )


@pytest.mark.parametrize("option", ["--token-file", "--encryption-key-file"])
def test_a_secret_that_is_not_text_is_refused_and_not_shown(
    shell: Shell, tmp_path: Path, option: str
) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"hidden\xff")
    refused = shell("read", "s2://some-basin/some", option, str(file))
    assert refused.status == 2
    assert f"{file} is not text: put" in refused.stderr
    assert "hidden" not in refused.stderr


async def test_an_append_whose_answer_is_lost_is_of_unknown_outcome_and_not_repeated(
    shell: Shell, stream_uri: str
) -> None:
    async with cut_line(shell.environment["S2_BASIN_ENDPOINT"], b"the-marker") as (url, line):
        failed = await _in_thread(shell, "append", stream_uri, "--endpoint", url, "--json")
        await _until_tail(shell, stream_uri, line.cuts)
    assert (failed.status, failed.error["code"]) == (5, "outcome_unknown")
    assert failed.objects[0]["records"] == 0
    assert line.cuts == 1
    assert shell.ok("read", stream_uri).stdout == b"the-marker\n"


async def test_at_least_once_repeats_an_append_whose_answer_is_lost(
    shell: Shell, stream_uri: str
) -> None:
    async with cut_line(shell.environment["S2_BASIN_ENDPOINT"], b"the-marker") as (url, line):
        failed = await _in_thread(shell, "append", stream_uri, "--endpoint", url, "--at-least-once")
        await _until_tail(shell, stream_uri, line.cuts)
    assert failed.status == 5
    assert line.cuts > 1
    assert shell.ok("read", stream_uri).stdout == b"the-marker\n" * line.cuts


async def _until_tail(shell: Shell, stream_uri: str, seq_num: int) -> None:
    """Wait until the server has appended what it was sent; its acknowledgement is lost."""
    async with asyncio.timeout(120):
        while (await asyncio.to_thread(shell.json, "check-tail", stream_uri))["seq_num"] < seq_num:
            pass


async def _in_thread(shell: Shell, *arguments: str) -> Outcome:
    return await asyncio.to_thread(shell, *arguments, stdin=b"the-marker\n")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["append"], "Missing argument"),
        (["read", "no-stream"], "'no-stream' names no stream: write s2://basin/stream"),
        (["create-basin", "a/b"], "names no basin"),
        (["read", "b/s", "--ago", "soon"], "write it like 90s, 15m, 7d"),
        (["read", "b/s", "--ago", f"{10**27}d"], "write it like 90s, 15m, 7d"),
        (["read", "b/s", "--ago", "9" * 4301], "write it like 90s, 15m, 7d"),
        (["read", "b/s", "--timestamp", "noon"], "2026-01-31T12:00:00Z"),
        (["append", "b/s", "--header", "x"], "NAME=VALUE"),
        (["issue-access-token", "t", "--op-group-perms", "stream=x"], "stream=rw,basin=r"),
        (["issue-access-token", "t", "--ops", "fly"], "choose from"),
        (["issue-access-token", "t", "--basins", ""], "give --op-group-perms, as in stream=rw"),
        (["issue-access-token", "t", "--expires-in", "9999999d"], "after the year 9999"),
        (["issue-access-token", "t", "--expires-at", "9999999999999999"], "after the year 9999"),
        (["issue-access-token", "t", "--expires-in", "1d", "--expires-at", "1"], "exclude"),
    ],
)
def test_usage_errors_are_one_line_and_status_2(
    shell: Shell, arguments: list[str], complaint: str
) -> None:
    failed = shell(*arguments)
    assert failed.status == 2
    assert failed.stderr.startswith("error: ")
    assert complaint in failed.stderr
    assert failed.stderr.count("\n") == 1
    as_json = shell(*arguments, "--json")
    assert (as_json.status, as_json.error["code"]) == (2, "usage")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_and_knows_json(verb: str) -> None:
    output = CliRunner().invoke(streamfold, [*verb.split(), "--help"]).output
    assert output.startswith(f"Usage: streamfold {verb}")
    assert ("--json" in output) == (verb not in PROTOCOLS)


def test_every_verb_is_in_the_reference() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference" / "cli.md").read_text()
    words = {word for verb in VERBS for word in verb.split()}
    assert [word for word in words if not re.search(rf"(?<![\w-]){word}(?![\w-])", text)] == []


def test_a_missing_extra_is_named() -> None:
    for package, extra, verb in (
        ("s2_sdk", "client", "ls"),
        ("uvloop", "server", "serve"),
    ):
        script = (
            f"import sys; sys.modules[{package!r}] = None; "
            f"from streamfold.cli.main import main; main([{verb!r}])"
        )
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 1
        assert done.stderr.startswith("error: ")
        assert f"pip install 'streamfold[{extra}]'" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_verb_loads_only_what_it_needs() -> None:
    script = (
        "import sys; from streamfold.cli.main import main, streamfold\n"
        "import click\n"
        "context = click.Context(streamfold)\n"
        "streamfold.get_command(context, {verb!r})\n"
        "print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    )
    for verb, absent in (
        ("serve", "s2_sdk"),
        ("append", "uvloop"),
        ("append", "obstore"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", script.format(verb=verb)],
            capture_output=True, text=True, check=True, timeout=120,
        )  # fmt: skip
        assert absent not in done.stdout.split()
