"""A standalone cluster on this machine: a master, two workers of one core, and their Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import psutil
from pyspark.find_spark_home import _find_spark_home

from streamfold.spark import find_java
from tests.ports import free_port
from tests.spark.cluster import mortal
from tests.spark.snapshotter.waiting import wait_for

WORKERS = 2
#: Start in half the time; the work of the tests is short.
QUICK = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:-UsePerfData"
_HOST = "127.0.0.1"
_DEPLOY = "org.apache.spark.deploy"
_EXECUTOR = "org.apache.spark.executor.CoarseGrainedExecutorBackend"


class Cluster:
    """Spark's own daemons, as the package pyspark brings them; no ssh, no fixed ports."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port, self._web_port = free_port(), free_port()
        self._processes: list[subprocess.Popen[bytes]] = []
        self.environment = folder / "environment"
        self.python = bare_python(self.environment)

    @property
    def url(self) -> str:
        return f"spark://{_HOST}:{self._port}"

    def start(self) -> Cluster:
        ports = ("--port", str(self._port), "--webui-port", str(self._web_port))
        self._daemon("master.Master", os.environ, *ports)
        # The second worker has no Java but the packaged one, which starts through a script.
        for number, environ in enumerate((os.environ, {"PATH": ""})):
            limits = ("--cores", "1", "--memory", "1g", "--webui-port", "0")
            work = ("--work-dir", str(self._folder / f"work-{number}"))
            self._daemon("worker.Worker", environ, *limits, *work, self.url)
        wait_for(self.workers, lambda found: len(found) == WORKERS)
        return self

    def workers(self) -> list[dict[str, Any]]:
        """The workers that the master knows to be alive."""
        found: list[dict[str, Any]] = self._told().get("workers", [])
        return [worker for worker in found if worker["state"] == "ALIVE"]

    def applications(self) -> list[str]:
        """Names of the applications that run."""
        return [application["name"] for application in self._told().get("activeapps", [])]

    def order_death(self, victim: str) -> None:
        """Have a process of the next task that writes something killed, see `mortal`."""
        (self.environment / mortal.ORDERS / victim).touch()

    def awaits_death(self) -> list[str]:
        """Orders that are not carried out yet."""
        return [order.name for order in (self.environment / mortal.ORDERS).iterdir()]

    def is_at_work(self) -> bool:
        """Whether tasks in Python run, or have run, on a worker."""
        commands = (
            command_of(child) for process in self.executors() for child in process.children()
        )
        return any("pyspark.daemon" in command for command in commands)

    def executors(self) -> list[psutil.Process]:
        """The executors that live, which are children of the workers."""
        return [
            child
            for worker in self._processes[1:]
            for child in psutil.Process(worker.pid).children()
            if _EXECUTOR in command_of(child)
        ]

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
            process.wait(240)

    def logs(self) -> str:
        """The last output of every process, for a test that fails."""
        files = [*self._folder.glob("*.log"), *self._folder.glob("work-*/*/*/stderr")]
        return "\n".join(f"== {file}\n{file.read_text()[-2000:]}" for file in sorted(files))

    def _daemon(self, name: str, environ: Mapping[str, str], *arguments: str) -> None:
        settings = {
            "JAVA_HOME": str(find_java(environ).home),
            "SPARK_HOME": _find_spark_home(),
            "SPARK_CONF_DIR": str(self._folder),
            "SPARK_DAEMON_MEMORY": "128m",
            "SPARK_DAEMON_JAVA_OPTS": QUICK,
        }
        command = [f"{_find_spark_home()}/bin/spark-class", f"{_DEPLOY}.{name}", "--host", _HOST]
        log = self._folder / f"{len(self._processes)}-{name}.log"
        with log.open("wb") as output:
            self._processes.append(
                subprocess.Popen(
                    [*command, *arguments],
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **settings},
                )
            )

    def _told(self) -> dict[str, Any]:
        """What the master says of itself; nothing while it starts."""
        try:
            with urlopen(f"http://{_HOST}:{self._web_port}/json/", timeout=240) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except (URLError, json.JSONDecodeError):  # its page for people is there a moment before
            return {}


def bare_python(folder: Path) -> Path:
    """A Python with everything that this one has, but for Streamfold: what a worker is given."""
    venv.create(folder, symlinks=True, with_pip=False)
    target = next(folder.glob("lib/python*/site-packages"))
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if "streamfold" not in package.name and package.suffix != ".pth":
            (target / package.name).symlink_to(package)
    (folder / mortal.ORDERS).mkdir()
    (target / "sitecustomize.py").symlink_to(mortal.__file__)
    return folder / "bin" / Path(sys.executable).name


def command_of(process: psutil.Process) -> str:
    """What it was started with; nothing if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # or a zombie, which is one of these
        return ""
