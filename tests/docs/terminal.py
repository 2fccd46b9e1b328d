"""A terminal with a real shell in it, typed into as a person does: line by line, after each prompt."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

#: Prompts of the shell and of Python, for a command and for the rest of one.
_SHELL, _SHELL_MORE = "ready$ ", "more> "
_PROMPTS = (_SHELL, _SHELL_MORE, ">>> ", "... ")
#: Seconds that a command may take on a slow machine.
_LONGEST = 300


class Terminal:
    """Runs bash on a pseudo-terminal; whatever it shows is kept."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._shown = ""
        self._ended = False
        self._news = threading.Condition()
        self._end, other_end = pty.openpty()
        self._shell = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "--noediting", "-i"],
            cwd=folder,
            env={**environment, "PS1": _SHELL, "PS2": _SHELL_MORE, "TERM": "dumb"},
            stdin=other_end,
            stdout=other_end,
            stderr=other_end,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(other_end)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self._await_prompt(0)
        self.type("""trap 'echo "[failed: $BASH_COMMAND]"' ERR; unset PROMPT_COMMAND""")

    @property
    def folder(self) -> Path:
        """The folder that the shell is in."""
        return Path(f"/proc/{self._shell.pid}/cwd").resolve()

    @property
    def shown(self) -> str:
        """Everything on the screen so far."""
        with self._news:
            return self._shown

    def type(self, line: str) -> str:
        """Type a line and wait for the next prompt; returns what was shown meanwhile."""
        start = self._send(line)
        return self._await_prompt(start, after="\n")  # the line itself is shown first

    def start(self, line: str, *until: str) -> str:
        """Type a line whose command runs on, and wait for one of these texts."""
        start = self._send(line)
        # The line itself is shown first: the text must come after it.
        found = " or ".join(until)
        return self._wait(start + len(line), lambda news: any(map(news.__contains__, until)), found)

    def interrupt(self) -> None:
        """Press Ctrl-C, and wait for the prompt."""
        start = len(self.shown)
        os.write(self._end, b"\x03")
        self._await_prompt(start)

    def close(self) -> None:
        """Close the window: what runs in it is asked to end, and then killed."""
        for sign in (signal.SIGHUP, signal.SIGKILL):
            for group in _groups_of(self._shell.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._shell.wait(10 if sign is signal.SIGHUP else 60)
        self._reader.join(60)
        os.close(self._end)

    def _send(self, line: str) -> int:
        start = len(self.shown)
        os.write(self._end, line.encode() + b"\n")
        return start

    def _await_prompt(self, start: int, after: str = "") -> str:
        return self._wait(start, lambda news: after in news and news.endswith(_PROMPTS), "a prompt")

    def _wait(self, start: int, found: Callable[[str], bool], what: str) -> str:
        def arrived() -> bool:
            return self._ended or found(self._shown[start:])

        with self._news:
            assert self._news.wait_for(arrived, _LONGEST), f"no {what!r}:\n{self._shown[start:]}"
            assert not self._ended, f"the terminal was closed:\n{self._shown[start:]}"
            return self._shown[start:]

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._end, 65_536)
            except OSError:  # the other end is closed
                data = b""
            with self._news:
                self._shown += data.decode(errors="replace").replace("\r\n", "\n")
                self._ended = not data
                self._news.notify_all()
            if not data:
                return


def _take_terminal() -> None:
    """Make the terminal the one that Ctrl-C of this session comes from."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _groups_of(session: int) -> list[int]:
    """The process groups of a session: a shell gives each of its jobs one."""
    groups = set()
    for process in psutil.pids():
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(process) == session:
                groups.add(os.getpgid(process))
    return sorted(groups)
