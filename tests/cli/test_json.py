"""`--json` of every command: JSON lines on standard output with the documented members."""

from __future__ import annotations

import asyncio
import gc
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
from click.testing import CliRunner

from streamfold.cli.exit_status import VerbFailedError
from streamfold.cli.main import streamfold
from streamfold.model.records import Record
from streamfold.store import StoreSettings, open_store
from tests.archive.reading import write_history
from tests.cli.commands import Shell, ending_of, line_of
from tests.cli.conftest import create
from tests.cli.documented_json import documented
from tests.cli.test_failures import PROTOCOLS, VERBS

ROOT: Final = Path(__file__).parents[2]
BASIN: Final = "json-basin"
#: Calls of verbs that end, in their order; a later one may need what an earlier one made.
CALLS: Final = (
    "config set endpoint http://127.0.0.1:1 --context other",
    "config set access_token abcdefghijklmnop --context other",
    "config use other", "config list", "config get endpoint", "config show",
    "config unset access_token", "config delete other",
    "completion bash",
    "doctor",
    "top --once --interval 0.1",
    "list-basins", "create-basin json-basin-2", "get-basin-config json-basin",
    "reconfigure-basin json-basin --create-stream-on-append", "delete-basin json-basin-2 --yes",
    "ls", "ls s2://json-basin", "list-streams json-basin", "create-stream json-basin/more",
    "get-stream-config json-basin/more", "reconfigure-stream json-basin/more --retention-policy 1d",
    "delete-stream json-basin/more --yes",
    "append {stream} --input {lines}", "check-tail {stream}",
    "trim json-basin/trimmed 0 --yes", "fence json-basin/trimmed token",
    "diff {resources}", "apply {resources}", "copy {stream} json-basin/copied",
    "bench json-basin --duration 5m --max-bytes 64KiB --record-size 128",
    "issue-access-token json --basins= --op-group-perms account=r", "list-access-tokens",
    "revoke-access-token json",
    "get-account-metrics active-basins", "get-basin-metrics json-basin storage",
    "get-stream-metrics {stream} storage",
    "snapshot plan {stream} {snapshots}", "snapshot take {stream} --fold counter {snapshots}",
    "snapshot list {stream} {snapshots}", "snapshot restore {stream} --fold counter {snapshots}",
    "snapshot restore {stream} --fold counter {snapshots} --output {folder}/state.json",
    "append {stream} --input {lines}", "snapshot take {stream} --fold counter {snapshots}",
    "snapshot prune {stream} {snapshots} --keep 1",
    "archive ls {folder}", "archive show {table}", "archive verify {table}",
    "archive restore {table} --output {folder}/users.parquet", "archive diff {table} 9",
    "archive export {table} {folder}/copy", "archive export {table} {folder}/db --duckdb",
    "archive pin {table} audit", "archive pin {table} audit --remove",
    "archive gc {table} --keep-epochs 1 --grace 0",
    "check {store}", "backup {store} {folder}/backups", "restore {folder}/backups {folder}/restored",
    "snapshotter validate --config {configuration}", "snapshotter pack {folder}/job",
)  # fmt: skip
#: Calls that print rows, whose members are columns.
ROWS: Final = ("archive restore {table}", 'archive sql {table} "from users"')
#: Calls of verbs that run until they are stopped, which they are after their first line.
RUNNING: Final = (
    "read {stream} --follow",
    "tail {stream} --follow",
    "serve --host 127.0.0.1 --port 0 --no-access-log",
    "lite --host 127.0.0.1 --port 0 --no-access-log",
    "archive follow {table}",
    "snapshot run {stream} --fold counter --records 1 --snapshots file://{folder}/running",
    "snapshotter run --config {configuration}",
)
#: Verbs that need PostgreSQL, and the tests that compare their lines.
ELSEWHERE: Final = {
    "ingest postgres": "tests/ingest/test_verbs.py",
    "ingest tables": "tests/ingest/test_verbs.py",
    "ingest status": "tests/ingest/test_verbs.py",
    "ingest drop": "tests/ingest/test_verbs.py",
    "publish": "tests/ingest/test_publish.py",
}
#: Verbs that also fail when they have shown what they found.
JUDGING: Final = ("doctor", "diff", "check")


@dataclass(frozen=True)
class Setting:
    """A server with a stream, and an archive in a folder."""

    variables: dict[str, str]
    folder: Path

    def words(self, call: str) -> list[str]:
        """Return the arguments of a call, and --json."""
        names = {
            "stream": f"s2://{BASIN}/orders",
            "folder": self.folder,
            "table": self.folder / "users",
            "store": self.folder / "store",
            "lines": self.folder / "lines",
            "resources": self.folder / "resources.json",
            "configuration": self.folder / "snapshotter.toml",
            "snapshots": f"--snapshots file://{self.folder}/snapshots",
        }
        return [*shlex.split(call.format(**names)), "--json"]

    def lines(self, call: str) -> list[object]:
        """Run a verb to its end, and return its lines of JSON."""
        environment = {**self.variables, "STREAMFOLD_CONFIG": str(self.folder / "config.toml")}
        done = CliRunner().invoke(streamfold, self.words(call), env=environment)
        gc.unfreeze()  # verbs freeze what is imported, which is right for a process of their own
        fails = call.split()[0] in JUDGING and isinstance(done.exception, VerbFailedError)
        assert done.exit_code == 0 or fails, (call, done.output, done.exception)
        return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def setting(variables: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Setting:
    folder = tmp_path_factory.mktemp("json")
    create(variables, f"basins/{BASIN}")
    for name in ("orders", "trimmed"):
        create(variables, f"streams/{name}", BASIN)
    (folder / "lines").write_text("1\n2\n")
    wanted = {"name": BASIN, "streams": [{"name": "wanted"}]}
    (folder / "resources.json").write_text(json.dumps({"basins": [wanted]}))
    (folder / "snapshotter.toml").write_text(
        'source = { server = "127.0.0.1:1", table = "orders" }\n'
        f'destinations = [{{ type = "local", path = "{folder}" }}]\n'
        'http = { port = 0, host = "127.0.0.1" }\n'
    )
    asyncio.run(write_history(folder / "users"))
    asyncio.run(write_store(folder / "store"))
    return Setting(variables, folder)


async def write_store(folder: Path) -> None:
    """A store with a basin, of which one chunk file was lost."""
    async with open_store(folder.as_uri(), StoreSettings(chunk_file_bytes=1)) as store:
        await store.create_basin(BASIN)
        await store.create_stream(BASIN, "orders")
        await store.append(BASIN, "orders", [Record(b"record")])
    [file] = [path for path in (folder / "chunks").rglob("*-*-*") if path.is_file()]
    file.unlink()


def _verb(call: str) -> str:
    """Return the verb of a call by its full name."""
    first, second = (*call.split(), "")[:2]
    return first if first in VERBS else f"{first} {second}"


def test_every_verb_prints_the_json_lines_that_are_documented(setting: Setting) -> None:
    for call in CALLS:
        lines = setting.lines(call)
        assert lines, call
        shapes = documented(_verb(call))
        for line in lines:
            assert any(shape.fits(line) for shape in shapes), (call, line, shapes)


def test_rows_are_json_lines_with_the_columns_as_members(setting: Setting) -> None:
    for call in ROWS:
        assert {"id": 1, "name": "A"} in setting.lines(call)


@pytest.mark.parametrize("call", RUNNING)
async def test_a_verb_that_runs_until_it_is_stopped_prints_documented_lines(
    setting: Setting, call: str
) -> None:
    await asyncio.to_thread(setting.lines, "append {stream} --input {lines}")
    async with Shell(setting.variables).running(*setting.words(call)) as process:
        first = await line_of(process)
        process.terminate()
        others = (await ending_of(process)).objects
    for line in (json.loads(first), *others):
        assert any(shape.fits(line) for shape in documented(_verb(call))), line


def test_no_verb_is_left_out() -> None:
    verbs = [verb for verb in VERBS if verb not in PROTOCOLS]
    assert sorted({_verb(call) for call in (*CALLS, *ROWS, *RUNNING)} | {*ELSEWHERE}) == sorted(
        verbs
    )
    assert [verb for verb in verbs if verb != "archive sql" and not documented(verb)] == []
    for verb, test in ELSEWHERE.items():
        assert "documented(" in (ROOT / test).read_text(), verb
