"""Completion as a shell asks for it: verbs, options, contexts, and the names of a server."""

from __future__ import annotations

import subprocess
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


def test_verbs_options_and_contexts_are_completed(shell: Shell, tmp_path: Path) -> None:
    user = Shell({"STREAMFOLD_CONFIG": str(tmp_path / "config.toml")})
    assert _completed(user, "check") == ["check-tail"]
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
    assert f"{basin}/" in _completed(shell, "read", basin[:-1])
    assert _completed(shell, "read", f"{basin}/or") == [f"{basin}/orders/2024"]
    assert _completed(shell, "read", f"s2://{basin}/or") == [f"s2://{basin}/orders/2024"]
    assert basin in _completed(shell, "delete-basin", basin[:-1])


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_the_script_of_each_shell_asks_this_command(shell: Shell, name: str) -> None:
    script = shell.ok("completion", name).text
    assert f"{_VARIABLE}={name}_complete" in script
    assert shell.json("completion", name)["script"] in script
    assert "'bash', 'zsh', 'fish'" in shell("completion", "powershell").stderr


def test_bash_accepts_its_script(shell: Shell) -> None:
    script = shell.ok("completion", "bash").stdout
    done = subprocess.run(["bash", "-c", script.decode() + "complete -p streamfold"],
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert "_streamfold_completion streamfold" in done.stdout
