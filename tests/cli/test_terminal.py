"""Output on a terminal: headings, optional colours, and no control sequences from data."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import quote

from streamfold.cli.exit_status import failure_line
from streamfold.cli.terminal import aligned, inert
from tests.archive.reading import write_history
from tests.cli.commands import COMMAND, Shell, read_terminal
from tests.cli.conftest import create

#: Sets the title of the window, as only a program at the terminal should; C1 has one, too.
HOSTILE = "a\x1b]0;owned\x07b\x9b31mc"


def _at_terminal(shell: Shell, *arguments: str, **variables: str) -> str:
    """What a verb prints at a terminal, standard error as well."""
    terminal, theirs = pty.openpty()
    environment = {**shell.environment, "TERM": "xterm-256color", **variables}
    if "NO_COLOR" not in variables:
        environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        [*COMMAND, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    shown = read_terminal(terminal)
    process.wait(timeout=120)
    return shown.decode().replace("\r\n", "\n")


def test_lists_have_headings_in_bold_at_a_terminal_and_none_in_a_pipe(
    shell: Shell, stream_uri: str, basin: str
) -> None:
    heading, row, *_ = _at_terminal(shell, "ls", f"s2://{basin}").splitlines()
    assert heading.startswith("\x1b[1mstream")
    assert row.startswith("orders  ")
    plain = _at_terminal(shell, "ls", f"s2://{basin}", NO_COLOR="1")
    assert plain.splitlines()[0].split() == ["stream", "created", "cipher", "state"]
    assert "\x1b" not in plain
    assert "\x1b" not in _at_terminal(shell, "ls", TERM="dumb")
    piped = shell.ok("ls", f"s2://{basin}").text
    assert piped.startswith("orders  ")
    assert len(piped.splitlines()) == 1


def test_lists_that_are_empty_say_so_on_standard_error(
    shell: Shell, basin: str, stream_uri: str, tmp_path: Path
) -> None:
    where = f"s2://{basin}"
    for call, sentence in [
        (("ls", f"{where}/x"), f"No streams in '{basin}' whose names begin with 'x'.\n"),
        (("list-streams", basin, "--start-after", "z"), f"No streams in '{basin}' after 'z'.\n"),
        (("list-basins", "--prefix", "none"), "No basins whose names begin with 'none'.\n"),
        (
            ("list-access-tokens", "--prefix", "none"),
            "No access tokens whose ids begin with 'none'.\n",
        ),
        (("snapshot", "list", stream_uri), f"No snapshots of {stream_uri}.\n"),
        (("archive", "ls", str(tmp_path)), f"No archives below {tmp_path}.\n"),
    ]:
        listed = shell.ok(*call)
        assert (listed.stdout, listed.stderr) == (b"", sentence)
        assert shell.ok(*call, "--json").stderr == ""
    assert _at_terminal(shell, "read", stream_uri) == "No records.\n"
    assert shell.ok("read", stream_uri).stderr == ""


def test_an_append_at_a_terminal_says_how_to_end(shell: Shell, stream_uri: str) -> None:
    terminal, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "append", stream_uri],
        stdin=theirs, stdout=theirs, stderr=theirs, env=shell.environment,
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    while b"Ctrl-D ends the input" not in shown:
        shown += os.read(terminal, 1 << 16)
    os.write(terminal, b"typed\n\x04")
    while b"acknowledged: 1 record" not in shown:
        shown += os.read(terminal, 1 << 16)
    assert process.wait(timeout=120) == 0
    os.close(terminal)
    assert shell.ok("read", stream_uri).text == "typed\n"
    assert "Ctrl-D" not in shell.ok("append", stream_uri, stdin=b"piped\n").stderr


def test_names_and_records_cannot_command_a_terminal(
    shell: Shell, variables: dict[str, str], basin: str
) -> None:
    create(variables, f"streams/{quote(HOSTILE)}", basin)
    stream = f"s2://{basin}/{HOSTILE}"
    body = HOSTILE.encode() + b"\xff\ttab"
    shell.ok("append", stream, stdin=body + b"\n")
    escaped = "a\\u001b]0;owned\\u0007b\\u009b31mc"
    assert escaped in _at_terminal(shell, "ls", f"s2://{basin}")
    assert _at_terminal(shell, "read", stream) == f"{escaped}\\xff\ttab\n"
    shown = _at_terminal(shell, "read", stream, "--json")
    assert base64.b64decode(json.loads(shown)["body"]) == body
    for verb in (("read", stream, "--json"), ("ls", f"s2://{basin}/{HOSTILE}x"), ("tail", stream)):
        printed = _at_terminal(shell, *verb)
        assert "\x07" not in printed
        assert "\x9b" not in printed
    assert shell.ok("read", stream).stdout == body + b"\n", "a pipe gets what was appended"


def test_failures_name_what_others_chose_without_obeying_it() -> None:
    assert failure_line("x", f"no {HOSTILE}", as_json=False) == (
        "error: no a\\x1b]0;owned\\x07b\\x9b31mc"
    )


def test_columns_are_aligned_and_cells_inert() -> None:
    lines = aligned([("a", "1"), ("bcd\x1b[2J", "22")], ("name", "n"), right=(1,))
    assert lines == ["name" + " " * 11 + "n", "a" + " " * 14 + "1", "bcd\\u001b[2J  22"]
    assert inert("tab\tnew\nline") == "tab\\u0009new\\u000aline"


def test_a_cell_that_is_too_long_for_the_line_moves_no_other_line() -> None:
    rows = [("short", "today"), ("long" * 10, "today"), ("middle", "")]
    assert aligned(rows, ("name", "created"), room=30) == [
        "name    created", "short   today", "long" * 10 + "  today", "middle",
    ]  # fmt: skip
    assert aligned([("long" * 10, "today")], room=30) == ["long" * 10 + "  today"]


def test_a_long_append_draws_a_bar_at_a_terminal(
    shell: Shell, stream_uri: str, tmp_path: Path
) -> None:
    file = tmp_path / "lines"
    file.write_bytes(b"\n".join([b"x" * 65_535] * 160))  # the last line has no newline
    shown = _at_terminal(shell, "append", stream_uri, "--input", str(file))
    assert "append [##############################] 100% 10,485,759/10,485,759 bytes" in shown
    assert "acknowledged: 160 records" in shown
    assert shell.ok("append", stream_uri, "--input", str(file)).stderr.startswith("acknowledged")


def test_rows_that_are_printed_at_a_terminal_are_not_mixed_with_a_bar(
    shell: Shell, tmp_path: Path
) -> None:
    asyncio.run(write_history(tmp_path / "users"))
    shown = _at_terminal(shell, "archive", "restore", str(tmp_path / "users"))
    assert [json.loads(line)["id"] for line in shown.splitlines()] == [1, 3, 4]
    file = str(tmp_path / "users.csv")
    assert "restoring [" in _at_terminal(
        shell, "archive", "restore", str(tmp_path / "users"), "--output", file
    )


#: What check-tail does not need, and what takes long to import.
HEAVY = ("streamfold.follow", "streamfold.store", "streamfold.wire", "streamfold.cli.errors_from_s2",
         "msgspec", "httpx", "numpy", "obstore", "cryptography", "blake3",
         "streamfold._native", "pyarrow", "pyspark")  # fmt: skip


def test_a_verb_that_succeeds_loads_neither_what_explains_failures_nor_what_others_need(
    shell: Shell, stream_uri: str
) -> None:
    script = (
        "import sys; from streamfold.cli.main import main\n"
        f"main(['check-tail', {stream_uri!r}])\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=shell.environment, capture_output=True, check=True
    )
    assert done.stdout.splitlines()[-1] == b"[]"


def _await_a_key(pid: int) -> None:
    """Return once a process that has asked sleeps; one that waits for a processor counts as running."""
    deadline, looks = time.monotonic() + 120, 0
    while looks < 20:
        assert time.monotonic() < deadline, "it does not read the answer"
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
        looks = looks + 1 if state == "S" else 0
        time.sleep(0.01)


def test_one_interrupt_ends_a_question_and_removes_nothing(shell: Shell, stream_uri: str) -> None:
    terminal, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "delete-stream", stream_uri],
        stdin=theirs, stdout=theirs, stderr=theirs, env=shell.environment,
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    while b"[y/N]" not in shown:
        shown += os.read(terminal, 1 << 16)
    _await_a_key(process.pid)  # a signal just before that would wait for a key
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 130
    os.close(terminal)
    shell.ok("check-tail", stream_uri)
