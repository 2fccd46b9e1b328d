"""Shell completion of commands, options, contexts and names from the server."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import COMMAND, Shell
from tests.cli.conftest import create

_VARIABLE = "_STREAMFOLD_COMPLETE"


def _completed(shell: Shell, *words: str) -> list[str]:
    """What bash offers for the last of these words."""
    asked = {
        _VARIABLE: "bash_complete",
        "COMP_WORDS": " ".join(["streamfold", *words]),
        "COMP_CWORD": str(len(words)),
    }
    done = subprocess.run(
        COMMAND, env=shell.environment | asked, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return [line.partition(",")[2] for line in done.stdout.split()]


def _names(shell: Shell, *words: str) -> list[str]:
    """What bash offers once the server answers in time, which it may not on a busy machine."""
    while not (found := _completed(shell, *words)):
        pass
    return found


def test_verbs_options_and_contexts_are_completed(shell: Shell, tmp_path: Path) -> None:
    user = Shell({"STREAMFOLD_CONFIG": str(tmp_path / "config.toml")})
    assert _completed(user, "check") == ["check", "check-tail"]
    assert _completed(user, "config", "u") == ["unset", "use"]
    assert "--retention-policy" in _completed(user, "create-stream", "--r")
    user.ok("config", "set", "endpoint", "http://127.0.0.1:1", "--context", "prod")
    assert _completed(user, "ls", "--context", "p") == ["prod"]
    assert _completed(user, "config", "use", "p") == ["prod"]
    assert _completed(user, "read", "b") == [], "the server cannot be reached"


def test_basins_and_streams_are_completed_unless_a_shell_would_run_them(
    shell: Shell, variables: dict[str, str], basin: str
) -> None:
    create(variables, "streams/orders%2F2024", basin)
    create(variables, "streams/orders%24(reboot)", basin)
    assert f"{basin}/" in _names(shell, "read", basin[:-1])
    assert _names(shell, "read", f"{basin}/or") == [f"{basin}/orders/2024"]
    assert _names(shell, "read", f"s2://{basin}/or") == [f"s2://{basin}/orders/2024"]
    assert basin in _names(shell, "delete-basin", basin[:-1])


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_the_script_of_each_shell_asks_this_command(shell: Shell, name: str) -> None:
    script = shell.ok("completion", name).text
    assert f"{_VARIABLE}={name}_complete" in script
    assert shell.json("completion", name)["script"] in script
    assert "'bash', 'zsh', 'fish'" in shell("completion", "powershell").stderr


def test_the_tab_key_completes_a_verb_in_bash(shell: Shell) -> None:
    set_up = 'eval "$(streamfold completion bash)"'
    assert "Usage: streamfold check-tail" in help_by_tab(shell, ["bash", "--norc", "-i"], set_up)


def help_by_tab(shell: Shell, command: list[str], set_up: str) -> str:
    """What a shell at a terminal shows for a verb that the Tab key completes."""
    return _typed(shell, command, f"{set_up}\nstreamfold check-\t--help\nexit\n")


def user_environment(shell: Shell) -> dict[str, str]:
    """The variables of a user whose commands include this one."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**shell.environment, "PATH": path, "TERM": "dumb", "PS1": "$ "}


def _typed(shell: Shell, command: list[str], keys: str) -> str:
    """What a shell at a terminal shows for these keys, which must end it."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=user_environment(shell),
        start_new_session=True,
    ) as running:  # fmt: skip
        os.close(theirs)
        shown = b""
        try:
            while b"$ " not in shown:
                shown += os.read(ours, 4096)
            os.write(ours, keys.encode())
            while part := _read(ours):
                shown += part
        finally:
            running.kill()
            os.close(ours)
    return shown.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # the shell has ended
        return b""
