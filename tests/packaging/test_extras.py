"""The wheel with each extra alone: working features, and hints for missing extras.

pip installs the wheel into a fresh environment that holds exactly what the extra asks for. Those
packages are linked from the environment of the tests, which is quick; pip itself looks whether they are
what the wheel requires.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, distribution
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

from tests.archive.reading import write_history
from tests.packaging.conftest import run

#: Seconds: another process of the test run may be compiling, and this one then waits for it.
pytestmark = pytest.mark.timeout(1800)

#: What a command or an import needs.
COMMANDS = {
    "--version": None,
    "serve --help": "server",
    "lite --help": "server",
    "ls --endpoint http://127.0.0.1:9": "client",
    "snapshot plan s2://a-basin/b --endpoint http://127.0.0.1:9": "client",
    "archive show /nowhere": "archive",
    "snapshotter validate --config /nowhere": "spark",
    "ingest tables --help": "postgres",
}
IMPORTS = {
    "streamfold": None,
    "streamfold.store": None,
    "streamfold.follow": None,
    "streamfold.blob": None,
    "streamfold.follow.clients.s2": "client",
    "streamfold.follow.encoding.arrow_codec": "archive",
    "streamfold.archive": "archive",
    "streamfold.archive.manifest.model": "archive",
    "streamfold.archive.engines.sql": "archive",
    "streamfold.server.main": "server",
    "streamfold.tracing": None,
    "streamfold.snapshotter.config": "spark",
    "streamfold.spark": "spark",
    "streamfold.ingest": None,
    "streamfold.ingest.postgres.ingester": "postgres",
    "streamfold.testing": None,
    "streamfold.testing.blob_kit": "testing",
    "streamfold.testing.store_machine": "testing",
}
EXTRAS = [
    None, "server", "client", "archive", "duckdb", "delta", "iceberg", "aws", "spark", "postgres",
    "fast", "testing",
]  # fmt: skip
#: Verbs of `archive` that need another extra as well; USERS is the folder of an archive.
ENGINES = {
    "duckdb": ["sql", "USERS", "from users"],
    "delta": ["export", "USERS", "copy", "--delta"],
    "iceberg": ["export", "USERS", "copy", "--iceberg"],
}

PROBE = """
import contextlib, importlib, io, json, sys
from streamfold.cli.main import main

found = {}
for name in json.loads(sys.argv[1]):
    try:
        importlib.import_module(name)
        found[name] = ""
    except ImportError as error:
        found[name] = f"{type(error).__name__}: {error}"
        # Submodules that loaded before the failure would let a later import of them pass.
        for loaded in [loaded for loaded in sys.modules if loaded.startswith(name + ".")]:
            del sys.modules[loaded]
for command in json.loads(sys.argv[2]):
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
        with contextlib.suppress(SystemExit):
            main(command.split())
    found[command] = stderr.getvalue()
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Environment:
    """A fresh environment with the wheel and one extra."""

    folder: Path

    @property
    def python(self) -> str:
        return str(self.folder / "bin/python")

    @property
    def packages(self) -> Path:
        (found,) = self.folder.glob("lib/python*/site-packages")
        return found

    def install(self, wheel: Path, extra: str | None) -> None:
        venv.create(self.folder)
        for found in required(f"streamfold[{extra or ''}]", wheel):
            link(found, self.packages)
        what = f"{wheel}[{extra}]" if extra else str(wheel)
        pip = (sys.executable, "-m", "pip", "--python", self.python, "--disable-pip-version-check")
        # Most modules are never imported there, and to compile them all takes a second.
        run(*pip, "install", "--quiet", "--no-index", "--no-compile", what)


@pytest.fixture(scope="module")
def installed(
    wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str | None], Environment]:
    """Gives the environment of an extra, which is made once."""

    @cache
    def find(extra: str | None) -> Environment:
        environment = Environment(tmp_path_factory.mktemp("environment"))
        environment.install(wheel, extra)
        return environment

    return find


def required(root: str, wheel: Path) -> Iterator[Distribution]:
    """What pip would install for a requirement, besides the wheel itself."""
    seen: set[tuple[str, str]] = set()
    wanted = [Requirement(root)]
    while wanted:
        requirement = wanted.pop()
        for extra in requirement.extras or {""}:
            if (requirement.name.lower(), extra) in seen:
                continue
            seen.add((requirement.name.lower(), extra))
            is_root = requirement.name == "streamfold"
            found = None if is_root else distribution(requirement.name)
            if found is not None:
                yield found
            lines = requires_of(wheel) if found is None else found.requires or []
            for line in lines:
                further = Requirement(line)
                if further.marker is None or further.marker.evaluate({"extra": extra}):
                    wanted.append(further)


def requires_of(wheel: Path) -> list[str]:
    """The requirements that the wheel itself names."""
    with ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith("/METADATA"))
        metadata = files.read(name).decode()
    return [
        line.removeprefix("Requires-Dist: ")
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist: ")
    ]


def link(found: Distribution, packages: Path) -> None:
    """Link the folders and files of a package into another environment."""
    for top in {Path(str(file)).parts[0] for file in found.files or []} - {"..", "__pycache__"}:
        target = packages / top
        if not target.exists():
            target.symlink_to(Path(str(found.locate_file(top))))


@pytest.mark.parametrize("extra", EXTRAS)
def test_what_an_extra_lacks_is_named_in_one_sentence(
    extra: str | None, installed: Callable[[str | None], Environment]
) -> None:
    environment = installed(extra)
    probe = (json.dumps(list(IMPORTS)), json.dumps(list(COMMANDS)))
    found = json.loads(run(environment.python, "-c", PROBE, *probe))
    # The pipeline and the engines read archives, and ingest appends to streams.
    readers = dict.fromkeys(("spark", "duckdb", "delta", "iceberg"), "archive")
    provided = {None, extra, {**readers, "postgres": "client"}.get(extra or "")}
    for what, needed in (IMPORTS | COMMANDS).items():
        reported = found[what]
        if needed in provided:
            assert "pip install" not in reported, f"{what}: {reported}"
            assert "ModuleNotFoundError" not in reported, f"{what}: {reported}"
        else:
            assert reported.count("\n") <= 1, f"{what}: {reported}"
            assert "is not installed: run pip install" in reported, f"{what}: {reported}"
            assert f"'streamfold[{needed}]'" in reported, f"{what}: {reported}"
    assert all(found[name] == "" for name, needed in IMPORTS.items() if needed in provided)


def test_engines_without_their_extras_are_refused_with_its_name(
    installed: Callable[[str | None], Environment], tmp_path: Path
) -> None:
    asyncio.run(write_history(tmp_path / "users"))
    users = str(tmp_path / "users")
    for extra, command in ENGINES.items():
        arguments = ["archive", *(users if part == "USERS" else part for part in command)]
        script = f"from streamfold.cli.main import main; main({arguments!r})"
        done = subprocess.run(
            [installed("archive").python, "-c", script], capture_output=True, text=True, timeout=120,
            check=False,
        )  # fmt: skip
        assert done.returncode == 1
        assert f"pip install 'streamfold[{extra}]'" in done.stderr
        assert "Traceback" not in done.stderr


#: Everything that a server installs. numpy and the native part are more than a third of the bytes.
SERVER = {
    "aeg", "anyio", "backports.zstd", "blake3", "certifi", "cffi", "click", "cryptography",
    "h11", "httpcore", "httpx", "idna", "msgspec", "numpy", "obstore", "prometheus_client",
    "pycparser", "typing_extensions", "uvloop",
}  # fmt: skip


def test_a_server_installs_neither_a_compiler_nor_what_tables_need(wheel: Path) -> None:
    found = {dist.name.replace("-", "_"): dist for dist in required("streamfold[server]", wheel)}
    assert found.keys() <= SERVER, "say in docs/guides/deployment.md what a server gains by it"
    sizes = [file.size or 0 for dist in found.values() for file in dist.files or ()]
    assert sum(sizes) < 175e6


def test_profiles_of_aws_without_their_extra_are_refused_with_its_name(
    installed: Callable[[str | None], Environment],
) -> None:
    environment = installed("server")
    script = (
        "import os; os.environ['AWS_PROFILE'] = 'work'; os.environ.pop('AWS_ACCESS_KEY_ID', None);"
        "from streamfold.cli.main import main; main(['serve', '--port', '0', '--bucket', 'b'])"
    )
    done = subprocess.run(
        [environment.python, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    *_, last = done.stderr.splitlines()
    assert last.startswith("error: AWS profiles")
    assert "pip install 'streamfold[aws]'" in last
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("module", ["config", "decoding", "net_changes", "transactions"])
def test_the_snapshotter_is_imported_without_its_metrics(module: str) -> None:
    script = f"import sys, streamfold.snapshotter.{module}; print(*sys.modules)"
    assert "prometheus_client" not in run(sys.executable, "-c", script).split()
