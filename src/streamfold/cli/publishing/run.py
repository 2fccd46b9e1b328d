"""Runs server, ingester and snapshotter together: starts them in order, monitors and stops them."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
from s2_sdk import S2, BasinConfig, S2Error, StreamConfig

from streamfold.archive.write.layout import LAYOUTS
from streamfold.cli.connection import open_basin, open_client
from streamfold.cli.errors_from_s2 import failure_from_s2
from streamfold.cli.exit_status import VerbFailedError
from streamfold.cli.publishing.command_process import CommandProcess
from streamfold.cli.publishing.plan import PublicationPlan
from streamfold.cli.publishing.status import Screen, SlotWatch, StatusBoard
from streamfold.cli.publishing.trimming import TrimFile, check_archives_have_what_was_trimmed
from streamfold.cli.target import Target, find_target
from streamfold.cli.terminal import stop_signals
from streamfold.errors import ConflictError, RetryLaterError, StreamfoldError
from streamfold.http_client import AsyncHttp, build_request
from streamfold.ingest.postgres.connection import Database
from streamfold.ingest.postgres.pgoutput import Lsn
from streamfold.snapshotter.config.model import PUBLISH
from streamfold.snapshotter.status.table_status import TableStatus

#: Seconds between status checks of the parts.
_LOOK: Final = 1.0
#: Seconds for the snapshotter, which is on this machine, to respond.
_STATUS_TIMEOUT: Final = 10.0
#: Seconds that each part gets to stop. The snapshotter writes its last diffs.
_STOP: Final = {"ingest": 15.0, "snapshotter": 120.0, "server": 30.0}
_EXISTS = "resource_already_exists"


class _Statuses(msgspec.Struct):
    """The snapshotter's response to `GET /status`."""

    tables: dict[str, TableStatus]


class PublishRun:
    """One run of `publish`. `run` returns once it was asked to stop and everything is flushed."""

    def __init__(
        self,
        plan: PublicationPlan,
        database: Database,
        screen: Screen,
        environment: Mapping[str, str],
    ) -> None:
        self._plan = plan
        self._screen = screen
        self._board = StatusBoard(table.full_name for table in plan.tables)
        self._slot = SlotWatch(database, plan.slot)
        file, layout = plan.trim_file, LAYOUTS[plan.layout]
        self._trim = TrimFile(file, layout) if file else None
        self._port = plan.port
        self._recopy = plan.recopy
        self._status_port = 0
        self._serving = asyncio.Event()
        self._url = plan.endpoint or ""
        self._stop, self._hurry = asyncio.Event(), asyncio.Event()
        self._http = AsyncHttp()
        self._environment = environment
        #: Parts by name, in the order in which they are started.
        self._parts: dict[str, tuple[CommandProcess, asyncio.Task[None]]] = {}

    async def run(self, *, until: Lsn | None) -> None:
        """Publish until a signal stops it, or until the archives have everything before `until`."""
        loop = asyncio.get_running_loop()
        for number in stop_signals():
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            await self._unless_stopped(self._publish(until))
        finally:
            await self._stop_parts()
            self._slot.close()

    def _on_signal(self, number: signal.Signals) -> None:
        if number is signal.SIGHUP:
            # The terminal is gone. Its shell and the kernel each send SIGHUP, so the second is not
            # a request to hurry.
            self._screen.hang_up()
        elif self._stop.is_set():
            self._hurry.set()
        else:
            note = "Stopping: the last changes are written; Ctrl-C again to stop at once."
            self._screen.note(note)
        self._stop.set()

    async def _unless_stopped(self, work: Awaitable[None]) -> None:
        """Wait for `work`, a stop, or a part's permanent failure, which is raised."""
        working = asyncio.ensure_future(work)
        stopping = asyncio.create_task(self._stop.wait())
        try:
            while not (working.done() or stopping.done()):
                parts = [task for _, task in self._parts.values()]
                await asyncio.wait(
                    {working, stopping, *parts},
                    timeout=_LOOK,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for task in parts:
                    if task.done():
                        task.result()
            if working.done():
                working.result()
        finally:
            working.cancel()
            stopping.cancel()
            await asyncio.gather(working, stopping, return_exceptions=True)

    async def _publish(self, until: Lsn | None) -> None:
        if self._plan.endpoint is None:
            self._plan.snapshotter_address.unlink(missing_ok=True)  # left by an earlier run
            self._start("server", self._on_server)
            await self._serving.wait()
        await self._create_basin()
        self._announce()
        self._start("ingest", self._board.on_ingest)
        while not await self._is_done(until):
            await self._look()
            self._screen.show(self._board.tables())
            if "snapshotter" not in self._parts and await self._can_start_snapshotter():
                self._plan.snapshotter_file.write_text(self._plan.snapshotter(self._url))
                self._start("snapshotter", self._on_snapshotter)
            await asyncio.sleep(_LOOK)

    def _start(self, name: str, on_object: Any) -> None:
        part = CommandProcess(
            name,
            {"server": self._serve, "ingest": self._ingest, "snapshotter": self._snapshotter}[name],
            self._plan.log(name),
            environment=self._environment_of(name),
            on_object=on_object,
            on_note=partial(self._on_part, name),
        )
        self._parts[name] = (part, asyncio.create_task(part.run(), name=name))

    def _environment_of(self, part: str) -> dict[str, str]:
        """Return a part's environment variables. Only the ingester gets those of the database."""
        if part == "ingest":
            return {**os.environ, **self._environment}
        database = (*self._environment, "PG")
        return {name: one for name, one in os.environ.items() if not name.startswith(database)}

    def _on_part(self, name: str, note: str) -> None:
        """Show what happened to a part, and drop its outdated status."""
        self._board.forget(name)
        self._screen.note(note)

    def _serve(self) -> list[str]:
        # This process has the state folder locked, so a server in it was left by a killed run.
        address = self._plan.snapshotter_address
        return [*self._plan.serve(self._port, f"@{address}"), "--take-over"]

    def _ingest(self) -> list[str]:
        arguments = self._plan.ingest(self._url)
        if self._plan.trim_file is not None:
            arguments += ["--trim-file", str(self._plan.trim_file)]
        return [*arguments, "--recopy"] if self._recopy else arguments

    def _snapshotter(self) -> list[str]:
        self._status_port = 0
        self._plan.snapshotter_address.unlink(missing_ok=True)
        return ["snapshotter", "run", "--config", str(self._plan.snapshotter_file)]

    def _on_server(self, line: dict[str, Any]) -> None:
        # A restarted server keeps its port, because the other parts know it.
        self._url, self._port = line["url"], line["port"]
        self._serving.set()

    def _on_snapshotter(self, line: dict[str, Any]) -> None:
        self._status_port = line["port"]
        self._plan.snapshotter_address.write_text(f"http://127.0.0.1:{line['port']}")

    def _announce(self) -> None:
        plan = self._plan
        folders = {table.full_name: plan.archives.of(table) for table in plan.tables}
        shape: dict[str, object] = {
            "server": self._url,
            "state_folder": str(plan.state),
            "archives": folders,
        }
        lines = [f"Publishing {table} to {folder}" for table, folder in folders.items()]
        if plan.endpoint is None:
            lines.append(f"Open {self._url}/console in a browser.")
        lines.append(f"State and logs are in {plan.state}; Ctrl-C stops, the same command resumes.")
        self._screen.announce(shape, *lines)

    async def _create_basin(self) -> None:
        async with self._client() as client:
            # A stream's last record is where its table is resumed, so it must not expire.
            basin_config = BasinConfig(
                default_stream_config=StreamConfig(retention_policy="infinite")
            )
            try:
                await client.create_basin(self._plan.basin, config=basin_config)
            except S2Error as error:
                if getattr(error, "code", "") != _EXISTS:
                    raise failure_from_s2(error, self._target(), changes=False) from error

    async def _can_start_snapshotter(self) -> bool:
        """Return whether all tables are copied. Raises if one needs records that were trimmed."""
        if not self._board.all_copied:
            return False
        if not self._plan.recopy and self._plan.on_trimmed != PUBLISH:  # a new copy needs none
            try:
                async with self._client() as client:
                    basin = open_basin(client, self._plan.basin)
                    await check_archives_have_what_was_trimmed(self._plan, basin)
            except RetryLaterError:
                return False  # the server is being restarted
        return True

    def _client(self) -> S2:
        return open_client(self._target())

    def _target(self) -> Target:
        return find_target(self._url, self._plan.token_file, None)

    async def _look(self) -> None:
        """Poll the status of database and snapshotter. Without a response, their last status stays."""
        try:
            self._board.on_slot(await asyncio.to_thread(self._slot.read))
        except StreamfoldError as error:
            self._board.database_error = error.message
        if self._status_port:
            here = httpx.URL(f"http://127.0.0.1:{self._status_port}")
            asked = build_request("GET", here, "/status", {}, timeout=_STATUS_TIMEOUT)
            with suppress(httpx.TransportError):
                async with self._http.send(asked) as answer:
                    response = msgspec.json.decode(await answer.aread(), type=_Statuses)
                self._board.on_snapshotter(response.tables)
                if self._trim is not None:
                    self._trim.update(response.tables.values())
        if self._board.all_copied:
            self._recopy = False

    async def _is_done(self, until: Lsn | None) -> bool:
        """Return whether the snapshotter has read everything that the database had at `until`.

        Raises VerbFailedError if it has given up a table, once it has read the others.
        """
        statuses = self._board.statuses()
        if until is None or self._board.confirmed < until or not statuses:
            return False
        left = {name: s for name, s in statuses.items() if not s.state.is_final}
        if any(not status.ready for status in left.values()):
            return False
        try:
            async with self._client() as client:
                basin = open_basin(client, self._plan.basin)
                tails = {name: (await basin.stream(name).check_tail()).seq_num for name in left}
        except S2Error:
            return False  # the server is being restarted
        if any((left[name].position or 0) < tail - 1 for name, tail in tails.items()):
            return False
        for name, status in statuses.items():
            if status.state.is_final and (error := status.last_error) is not None:
                raise VerbFailedError(
                    error.code,
                    f"snapshotter: table {name} is {status.state}: {error.message} "
                    f"(log: {self._plan.log('snapshotter')})",
                )
        return True

    async def _stop_parts(self) -> None:
        """Stop the parts in order. Raises the first error of a part that could not stop cleanly."""
        errors: list[BaseException] = []
        for name, timeout in _STOP.items():
            if name not in self._parts:
                continue
            part, task = self._parts[name]
            hurrying = asyncio.create_task(self._hurry.wait())
            stopping = asyncio.create_task(part.stop(timeout))
            await asyncio.wait({hurrying, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if hurrying.done():
                part.kill()
            await stopping
            # A process that was just being started when asked to stop gets the same time again.
            await asyncio.wait(
                {hurrying, task}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
            hurrying.cancel()
            if not task.done():
                part.kill()
            try:
                await task
            except StreamfoldError as error:
                errors.append(error)
        if errors and not self._hurry.is_set():
            raise errors[0]


@contextmanager
def locked_state(folder: Path) -> Iterator[None]:
    """Hold the state folder. Raises ConflictError if another process does.

    The lock ends with the process.
    """
    (folder / "log").mkdir(parents=True, exist_ok=True, mode=0o700)
    with (folder / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConflictError(
                f"{folder} is in use by another `streamfold publish`: stop that one, or name another "
                "--state"
            ) from None
        yield
