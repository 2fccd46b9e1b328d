"""A process that `publish` keeps running: restarted with backoff when it ends, with a bounded log."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Final

import msgspec

from streamfold._native import end_with_parent
from streamfold.backoff import Backoff
from streamfold.cli.exit_status import VerbFailedError

#: Seconds between starts. A run longer than the longest pause starts a new count.
_BACKOFF: Final = Backoff(first=0.5, longest=30.0)
#: Consecutive restartable failures after which the command gives up.
_FAILURES_MAX: Final = 8
#: Errors after which another start may succeed. All others end the command.
_PASSING: Final = frozenset(("java_ended",))
#: Bytes of a log file after which it is rotated. One older file is kept.
_LOG_BYTES: Final = 4 << 20
#: Maximum bytes of a line of output. Longer lines are not logged.
_LINE_MAX: Final = 1 << 20
#: Seconds to read the remaining output of an ended process: a grandchild may keep its pipes open.
_REST: Final = 1.0
_COMMAND: Final = (sys.executable, "-m", "streamfold.cli.main")


class CommandProcess:
    """Runs one command of this command line, with `--json`, in a separate process.

    Calls `arguments` at each start. `on_object` receives each JSON object that the process prints,
    and `on_note` a sentence at each restart. The process ends with this one, even if this one is
    killed.
    """

    def __init__(
        self,
        name: str,
        arguments: Callable[[], Sequence[str]],
        log: Path,
        *,
        environment: Mapping[str, str],
        on_object: Callable[[dict[str, Any]], None],
        on_note: Callable[[str], None],
    ) -> None:
        self.name = name
        self._arguments = arguments
        self._log_file = log
        self._environment = environment
        self._on_object = on_object
        self._on_note = on_note
        self._process: Process | None = None
        self._error: dict[str, str] | None = None
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Keep the process running until `stop`.

        Raises VerbFailedError if a restart would not help.
        """
        failures, rng = 0, random.Random()  # noqa: S311 - only for pauses
        log = RotatingFileHandler(self._log_file, maxBytes=_LOG_BYTES, backupCount=1)
        try:
            while not self._stopping.is_set():
                began = time.monotonic()
                status = await self._run_once(log)
                if self._stopping.is_set():
                    self._check_end(status)
                    return
                self._check_failure()
                lasted = time.monotonic() - began
                failures = 1 if lasted > _BACKOFF.longest else failures + 1
                if failures > _FAILURES_MAX:
                    raise self._failure("part_failed", f"it {_ending(status)} {failures} times")
                pause = _BACKOFF.pause(failures, rng)
                self._on_note(
                    f"{self.name} {_ending(status)} and is started again in {pause:.1f} s; "
                    f"its log is {self._log_file}"
                )
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), pause)
        finally:
            log.close()

    async def stop(self, longest: float) -> None:
        """Ask the process to stop, and kill it after `longest` seconds."""
        self._stopping.set()
        process = self._process
        if process is None or process.returncode is not None:
            return
        _signal(process, signal.SIGTERM)
        try:
            async with asyncio.timeout(longest):
                await process.wait()
        except TimeoutError:
            self._on_note(f"{self.name} did not stop within {longest:.0f} s and is killed")
            self.kill()

    def kill(self) -> None:
        """Kill the process at once."""
        self._stopping.set()
        if self._process is not None:
            _signal(self._process, signal.SIGKILL)

    async def _run_once(self, log: logging.Handler) -> int:
        self._error = None
        process = await asyncio.create_subprocess_exec(
            *_COMMAND,
            *self._arguments(),
            "--json",
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            env=self._environment,
            limit=_LINE_MAX,
            # Ctrl-C reaches only this process, which stops its parts in order.
            start_new_session=True,
            preexec_fn=partial(_end_with_parent, os.getpid()),
        )
        self._process = process
        if self._stopping.is_set():
            _signal(process, signal.SIGTERM)  # `stop` was called before the process existed
        assert process.stdout is not None  # noqa: S101
        assert process.stderr is not None  # noqa: S101
        readers = (
            asyncio.create_task(self._read_output(process.stdout, log)),
            asyncio.create_task(self._read_log(process.stderr, log)),
        )
        try:
            status = await process.wait()
            await asyncio.wait(readers, timeout=_REST)
            return status
        finally:
            for reader in readers:
                reader.cancel()
            _signal(process, signal.SIGKILL)
            for outcome in await asyncio.gather(*readers, return_exceptions=True):
                if isinstance(outcome, Exception):
                    raise outcome

    async def _read_output(self, output: asyncio.StreamReader, log: logging.Handler) -> None:
        async for text in _lines(output):
            try:
                shown = msgspec.json.decode(text, type=dict[str, Any])
            except msgspec.DecodeError:
                log.emit(logging.makeLogRecord({"msg": text}))
            else:
                self._on_object(shown)

    async def _read_log(self, output: asyncio.StreamReader, log: logging.Handler) -> None:
        async for text in _lines(output):
            log.emit(logging.makeLogRecord({"msg": text}))
            if text.startswith('{"error":'):
                with suppress(msgspec.DecodeError):
                    self._error = msgspec.json.decode(text, type=dict[str, dict[str, str]])["error"]

    def _check_end(self, status: int) -> None:
        """Raise if the process failed to do what a stop requires."""
        if status > 0 and self._error is not None:
            raise self._failure(self._error["code"], self._error["message"])
        # A process that has only just started is ended by the signal.
        if status not in (0, -signal.SIGTERM):
            raise self._failure(
                "part_failed",
                f"it {_ending(status)} while it stopped; nothing is lost: the same command continues",
            )

    def _check_failure(self) -> None:
        if self._error is not None and self._error["code"] not in _PASSING:
            raise self._failure(self._error["code"], self._error["message"])

    def _failure(self, code: str, message: str) -> VerbFailedError:
        return VerbFailedError(code, f"{self.name}: {message} (log: {self._log_file})")


async def _lines(output: asyncio.StreamReader) -> AsyncIterator[str]:
    """Yield lines without their newline. Skips lines that are too long."""
    while True:
        try:
            line = await output.readline()
        except ValueError:
            continue
        if not line:
            return
        yield line.decode(errors="replace").rstrip("\n")


def _signal(process: Process, number: signal.Signals) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.send_signal(number)


def _ending(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def _end_with_parent(parent: int) -> None:
    """Make the kernel send SIGTERM to this process when its parent ends. Called after the fork."""
    if end_with_parent(signal.SIGTERM) and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)
