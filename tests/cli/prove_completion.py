"""Completion in zsh and fish, which must be installed. Run by `make prove`."""

from __future__ import annotations

import subprocess

from tests.cli.commands import Shell
from tests.cli.test_completion import help_by_tab, user_environment


def test_the_tab_key_completes_a_verb_in_zsh(shell: Shell) -> None:
    set_up = 'autoload -Uz compinit; compinit -D -u; eval "$(streamfold completion zsh)"'
    assert "Usage: streamfold check-tail" in help_by_tab(shell, ["zsh", "-f", "-i"], set_up)


def test_fish_offers_verbs_and_streams(shell: Shell, stream_uri: str) -> None:
    script = (
        f"streamfold completion fish | source; complete -C 'streamfold check'\n"
        f"complete -C 'streamfold read {stream_uri[:-1]}'"
    )
    done = subprocess.run(
        ["fish", "--no-config", "-c", script],
        env=user_environment(shell), capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    offered = [line.partition("\t")[0] for line in done.stdout.splitlines()]
    assert offered == ["check-tail", stream_uri]
    assert done.stderr == ""
