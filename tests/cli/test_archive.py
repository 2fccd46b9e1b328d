"""Archive commands and their JSON, which is a contract."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import pty
import subprocess
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pv
import pyarrow.parquet as pq
import pytest

from streamfold.archive import ArchiveWriter, Destination
from streamfold.archive.manifest.model import Source
from tests.archive.reading import HISTORY, names_by_id, write_commits, write_history
from tests.archive.tables import START, changes, open_writer, rows
from tests.cli.commands import COMMAND, Shell, ending_of, line_of, read_terminal
from tests.s3 import S3Server


@pytest.fixture(scope="module")
def shell() -> Shell:
    """A shell that knows of no server."""
    return Shell({})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "users"
    asyncio.run(write_history(path))
    return path


def printed(text: str) -> dict[int, str]:
    found = [json.loads(line) for line in text.splitlines()]
    return {row["id"]: row["name"] for row in found}


def applied(changes_printed: list[dict[str, object]], state: dict[int, str]) -> dict[int, str]:
    found = dict(state)
    for change in changes_printed:
        new, old = change.get("new"), change.get("old")
        if change["action"] == "TRUNCATE":
            found.clear()
        elif change["action"] == "DELETE":
            assert isinstance(old, dict)
            found.pop(old["id"], None)
        else:
            assert isinstance(new, dict)
            found[new["id"]] = new["name"]
    return found


def test_archives_are_listed_with_their_heads(shell: Shell, folder: Path) -> None:
    found = shell.json("archive", "ls", str(folder.parent))
    assert found == {
        "uri": folder.as_uri() + "/",
        "table": "public.users",
        "epoch": 2,
        "head_position": "31",
        "oldest_readable_position": "9",
        "incomplete_before": None,
        "updated_at": "2026-06-03T12:04:00.000000Z",
        "dead_letters": 0,
        "artifacts": 6,
    }
    assert "public.users" in shell.ok("archive", "ls", folder.as_uri()).text
    assert shell.ok("archive", "ls", str(folder / "epoch=1"), "--json").objects == []


def test_a_bad_manifest_is_listed_as_bad_and_keeps_no_other_out(shell: Shell, folder: Path) -> None:
    bad = folder.parent / "aa" / "manifest.json"
    bad.parent.mkdir()
    bad.write_text("{")
    found = shell("archive", "ls", str(folder.parent), "--json")
    assert (found.status, found.error["code"]) == (1, "manifest_invalid")
    first, second = found.objects
    assert (first["uri"], first["error"]["code"]) == (
        bad.parent.as_uri() + "/",
        "manifest_invalid",
    )
    assert second["table"] == "public.users"
    text = shell("archive", "ls", str(folder.parent)).text
    assert ["cannot be used" in line for line in text.splitlines()] == [True, False]


def test_an_archive_is_shown_with_its_plan(shell: Shell, folder: Path) -> None:
    found = shell.json("archive", "show", str(folder), "--at", "20")
    assert found["key_fields"] == ["id"]
    assert [column["name"] for column in found["schema"]["columns"]] == ["id", "name"]
    assert found["plan"] == {
        "position": "20",
        "base": "9",
        "diffs": [["9", "14"], ["14", "20"]],
        "source_position": None,
        "incomplete_before": None,
    }
    assert [(a["kind"], a["rows"]) for a in found["artifacts"]] == [
        ("snapshot", 2), ("diff", 2), ("diff", 1), ("diff", 1), ("snapshot", 3), ("diff", 1),
    ]  # fmt: skip
    assert "key      id" in shell.ok("archive", "show", str(folder)).text


def test_a_table_that_lacks_changes_is_listed_and_shown_as_incomplete(
    shell: Shell, tmp_path: Path
) -> None:
    async def write() -> None:
        writer = await open_writer(Destination.open((tmp_path / "users").as_uri()))
        await writer.write_base(rows({1: "a"}), "9", reason="first", incomplete_before="5")

    asyncio.run(write())
    uri = str(tmp_path / "users")
    found = shell.json("archive", "show", uri)
    assert found["incomplete_before"] == found["plan"]["incomplete_before"] == "5"
    assert "missing  changes before 5: " in shell.ok("archive", "show", uri).text
    assert shell.json("archive", "ls", uri)["incomplete_before"] == "5"
    assert "incomplete before 5" in shell.ok("archive", "ls", uri).text


def test_a_table_with_dead_letters_is_listed_with_their_number(
    shell: Shell, tmp_path: Path
) -> None:
    async def write() -> None:
        writer = await open_writer(Destination.open((tmp_path / "users").as_uri()))
        source = Source(name="basin/users", dead_letters=2)
        await writer.write_base(rows({1: "a"}), "9", reason="first", source=source)

    asyncio.run(write())
    uri = str(tmp_path / "users")
    assert shell.json("archive", "ls", uri)["dead_letters"] == 2
    assert shell.ok("archive", "ls", uri).text.endswith("  2 dead letters\n")


def test_a_table_is_shown_and_restored_at_a_position_of_its_database(
    shell: Shell, tmp_path: Path
) -> None:
    asyncio.run(write_commits(tmp_path / "users"))
    uri = str(tmp_path / "users")
    found = shell.json("archive", "show", uri, "--at-source", "0/30")
    assert found["artifacts"][2]["source_range"] == {
        "first": "0/20", "last": "0/2F", "time": None, "copying": False,
    }  # fmt: skip
    assert (found["plan"]["position"], found["plan"]["source_position"]) == ("14", "0/2F")
    assert "source 0/20 to 0/2F" in shell.ok("archive", "show", uri).text
    assert printed(shell.ok("archive", "restore", uri, "--at-source", "0/30").text) == HISTORY["14"]
    refused = shell("archive", "restore", uri, "--at-source", "0/20", "--json")
    assert (refused.status, refused.error["code"]) == (1, "position_invalid")


def test_what_is_not_there_ends_with_status_4(shell: Shell, folder: Path) -> None:
    nowhere = shell("archive", "show", str(folder / "nowhere"), "--json")
    assert (nowhere.status, nowhere.error["code"]) == (4, "manifest_not_found")
    early = shell("archive", "restore", str(folder), "--at", "3", "--json")
    assert (early.status, early.error["code"]) == (4, "position_pruned")
    late = shell("archive", "restore", str(folder), "--at", "99", "--json")
    assert (late.status, late.error["code"]) == (1, "position_invalid")


def test_verification_ends_with_status_1_when_a_file_is_wrong(shell: Shell, folder: Path) -> None:
    whole = shell.json("archive", "verify", str(folder))
    assert (whole["ok"], whole["files"], whole["rows"], whole["problems"]) == (True, 6, 10, [])
    assert "no problems" in shell.ok("archive", "verify", str(folder)).text
    path = next(folder.glob("epoch=2/snapshot-*"))
    path.write_bytes(path.read_bytes()[:-1])
    outcome = shell("archive", "verify", str(folder), "--json")
    assert (outcome.status, outcome.error["code"]) == (1, "artifact_corrupt")
    [found] = outcome.objects
    [problem] = found["problems"]
    assert problem["path"].endswith(path.name)
    assert problem["code"] == "artifact_corrupt"


def test_a_table_is_restored_to_standard_output(shell: Shell, folder: Path) -> None:
    assert printed(shell.ok("archive", "restore", str(folder)).text) == HISTORY["31"]
    names = shell.ok("archive", "restore", str(folder), "--column", "name")
    assert sorted(json.loads(line)["name"] for line in names.text.splitlines()) == ["A", "D", "c"]


def test_at_names_a_position_or_a_time_and_the_earlier_options_are_still_accepted(
    shell: Shell, folder: Path
) -> None:
    restore = ("archive", "restore", str(folder))
    moment = (START + timedelta(minutes=2)).isoformat()
    for given, position in (
        ("--at", "14"),
        ("--position", "14"),
        ("--at", moment),
        ("--time", moment),
    ):
        state = HISTORY["14" if position == "14" else "20"]
        assert printed(shell.ok(*restore, given, position).text) == state
    twice = shell(*restore, "--at", "14", "--time", moment)
    assert twice.status == 2
    assert "--at and --time exclude each other: give one of them" in twice.stderr
    neither = shell(*restore, "--at", "noon")
    assert neither.status == 2
    assert "--at 'noon' is not a time, and" in neither.stderr
    mistyped = shell(*restore, "--at", "014")
    assert mistyped.status == 2
    assert "--at '014' is not a time, and" in mistyped.stderr
    beyond = shell(*restore, "--time", "9" * 20)
    assert beyond.status == 2
    assert "is not a time: write one of the years 1 to 9999" in beyond.stderr


@pytest.mark.parametrize("ending", ["parquet", "csv", "arrow", "jsonl", "jsonl.gz"])
def test_a_table_is_restored_to_a_file_of_any_kind(
    shell: Shell, folder: Path, tmp_path: Path, ending: str
) -> None:
    path = tmp_path / f"users.{ending}"
    reported = shell.json("archive", "restore", str(folder), "--output", str(path))
    assert reported == {"file": str(path), "position": "31", "rows": 3}
    match ending:
        case "parquet":
            table = pq.read_table(path)
        case "csv":
            table = pv.read_csv(path)
        case "arrow":
            table = pa.ipc.open_file(path.read_bytes()).read_all()
        case _:
            text = gzip.decompress(path.read_bytes()) if ending == "jsonl.gz" else path.read_bytes()
            table = pa.Table.from_pylist([json.loads(line) for line in text.splitlines()])
    assert names_by_id(table) == HISTORY["31"]
    assert {found.name for found in tmp_path.iterdir()} == {"users", path.name}


def test_a_failed_restore_leaves_the_file_as_it_was(
    shell: Shell, folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "users.parquet"
    path.write_bytes(b"of yesterday")
    next(folder.glob("epoch=2/snapshot-*")).unlink()
    outcome = shell("archive", "restore", str(folder), "--output", str(path), "--json")
    assert (outcome.status, outcome.error["code"]) == (1, "artifact_corrupt")
    assert path.read_bytes() == b"of yesterday"
    assert {found.name for found in tmp_path.iterdir()} == {"users", "users.parquet"}
    unknown = shell("archive", "restore", str(folder), "--output", str(tmp_path / "users.xls"))
    assert unknown.status == 1
    assert ".parquet" in unknown.stderr
    nowhere = shell(
        "archive", "restore", str(folder), "--output", str(path / "users.csv"), "--json"
    )
    assert (nowhere.status, nowhere.error["code"]) == (1, "output")
    unsaid = shell("archive", "restore", str(folder), "--format", "parquet")
    assert unsaid.status == 2
    unknown = shell("archive", "restore", str(folder), "--format", "xls")
    assert unknown.status == 2
    assert "protobuf-typed, csv, arrow" in unknown.stderr


def test_an_empty_table_is_restored_with_its_columns(shell: Shell, tmp_path: Path) -> None:
    async def write() -> None:
        writer = await open_writer(Destination.open((tmp_path / "empty").as_uri()))
        await writer.write_base(rows({}), "-1", reason="first")

    asyncio.run(write())
    path = tmp_path / "empty.parquet"
    shell.ok("archive", "restore", str(tmp_path / "empty"), "--output", str(path))
    table = pq.read_table(path)
    assert (len(table), table.column_names) == (0, ["id", "name"])


def test_changes_are_printed_as_lines_that_can_be_applied(shell: Shell, folder: Path) -> None:
    lines = shell.ok("archive", "diff", str(folder), "9").text.splitlines()
    assert applied([json.loads(line) for line in lines], HISTORY["9"]) == HISTORY["31"]
    found = shell.ok("archive", "diff", str(folder), "9", "--until", "20", "--json").objects
    assert [(item["from_position"], item["to_position"]) for item in found] == [
        ("9", "14"), ("9", "14"), ("14", "20"),
    ]  # fmt: skip
    assert applied([item["change"] for item in found], HISTORY["9"]) == HISTORY["20"]
    between = shell("archive", "diff", str(folder), "10", "--json")
    assert (between.status, between.error["code"]) == (1, "chain_gap")


async def test_following_prints_the_table_and_then_its_changes(
    shell: Shell, tmp_path: Path
) -> None:
    writer = await write_history(tmp_path)
    async with shell.running(
        "archive", "follow", str(tmp_path), "--poll", "1", "--json"
    ) as process:
        seen = [json.loads(await line_of(process)) for _ in range(4)]
        assert {item["to_position"] for item in seen} == {"31"}
        state = applied([item["change"] for item in seen], {5: "of long ago"})
        assert state == HISTORY["31"]
        await writer.write_diff(changes(("DELETE", 1, None)), "31", "40")
        item = json.loads(await line_of(process))
        assert (item["from_position"], item["to_position"]) == ("31", "40")
        assert applied([item["change"]], state) == {3: "c", 4: "D"}
        process.terminate()


def test_following_without_a_pause_is_refused(shell: Shell, folder: Path) -> None:
    refused = shell("archive", "follow", str(folder), "--poll", "0")
    assert refused.status == 2
    assert "at least 1s" in refused.stderr


async def test_following_from_a_position_begins_with_the_changes(
    shell: Shell, tmp_path: Path
) -> None:
    await write_history(tmp_path)
    async with shell.running("archive", "follow", str(tmp_path), "--since", "25") as process:
        assert json.loads(await line_of(process))["action"] == "UPDATE"
        assert process.stdout is not None
        process.stdout._transport.close()  # type: ignore[attr-defined]  # as `| head -1` does
        assert (await ending_of(process)).status == 141


def test_collection_says_what_would_go_and_then_lets_it_go(shell: Shell, folder: Path) -> None:
    for path in folder.glob("epoch=*/*"):
        os.utime(path, (1, 1))
    given = ("archive", "gc", str(folder), "--keep-epochs", "1", "--grace", "0")
    planned = shell.json(*given, "--dry-run")
    assert (planned["dry_run"], planned["epochs"], planned["files"]) == (True, [1], [])
    kept = shell.json("archive", "pin", str(folder), "audit", "--epoch", "1", "--for", "1h")
    assert (kept["id"], kept["epoch"]) == ("audit", 1)
    assert shell.json(*given)["epochs"] == []
    pins = shell.json("archive", "show", str(folder))["pins"]
    assert [pin["id"] for pin in pins] == ["audit"]
    removed = shell.json("archive", "pin", str(folder), "audit", "--remove")
    assert removed == {"id": "audit", "removed": True}
    assert shell.json(*given)["epochs"] == [1]
    shell.ok(*given)
    assert not list(folder.glob("epoch=1/*"))
    assert printed(shell.ok("archive", "restore", str(folder)).text) == HISTORY["31"]
    assert shell.json("archive", "verify", str(folder))["ok"]


def test_an_export_is_an_archive_of_its_own_and_goes_forward(
    shell: Shell, tmp_path: Path, s3_server: S3Server
) -> None:
    remote = Shell(s3_server.environment())
    origin = tmp_path / "origin"
    writers: list[ArchiveWriter] = []

    async def write() -> None:
        writers.append(await write_history(origin))

    async def go_on() -> None:
        await writers[0].write_diff(changes(("INSERT", 9, "i")), "31", "40")

    async def write_other() -> None:
        other = await open_writer(Destination.open((tmp_path / "other").as_uri()), ids="other")
        await other.write_base(rows({1: "other"}), "99", reason="first")

    asyncio.run(write())
    target = f"s3://{s3_server.bucket}/exported/users"
    first = remote.json("archive", "export", str(origin), target)
    assert (first["uri"], first["head_position"], first["files"]) == (target + "/", "31", 6)
    assert printed(remote.ok("archive", "restore", target).text) == HISTORY["31"]
    asyncio.run(go_on())
    again = remote.json("archive", "export", str(origin), target)
    assert (again["head_position"], again["files"]) == ("40", 1)
    assert remote.json("archive", "verify", target)["ok"]
    assert remote.json("archive", "show", target)["head_position"] == "40"
    asyncio.run(write_other())
    taken = remote("archive", "export", str(tmp_path / "other"), target, "--json")
    assert (taken.status, taken.error["code"]) == (1, "commit_conflict")
    assert printed(remote.ok("archive", "restore", target).text) == HISTORY["31"] | {9: "i"}


def test_the_cache_serves_what_was_fetched_before(
    tmp_path: Path, s3_server: S3Server, folder: Path
) -> None:
    remote = Shell(s3_server.environment())
    target = f"s3://{s3_server.bucket}/cached/users"
    remote.ok("archive", "export", str(folder), target)
    cache = tmp_path / "cache"
    given = ("archive", "restore", target, "--cache", str(cache), "--cache-size", "1MiB")
    assert printed(remote.ok(*given).text) == HISTORY["31"]
    assert len(list(cache.glob("??/*"))) == 2
    assert printed(remote.ok(*given).text) == HISTORY["31"]


@pytest.mark.parametrize(
    ("given", "label"), [(["verify", "--deep"], "verifying"), (["gc", "--grace", "0"], "deleting")]
)
def test_progress_is_for_people_at_a_terminal(
    shell: Shell, folder: Path, given: list[str], label: str
) -> None:
    orphan = folder / "epoch=1" / "diff-left-by-a-crash.jsonl"
    orphan.write_text("{}")
    os.utime(orphan, (1, 1))
    assert shell.ok("archive", "verify", str(folder)).stderr == ""
    master, slave = pty.openpty()
    command = [*COMMAND, "archive", given[0], str(folder), *given[1:], "--json"]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=slave,
        timeout=120,
        env=shell.environment,
        check=True,
    )
    os.close(slave)
    shown = read_terminal(master).decode()
    assert label in shown
    assert "100%" in shown
    assert json.loads(done.stdout)
    assert orphan.exists() == (label == "verifying")


def test_an_archive_without_keys_asks_for_them(shell: Shell, tmp_path: Path) -> None:
    row = {"code": "x", "n": 1}
    change = {"action": "UPDATE", "key": "x", "old": row, "new": {"code": "x", "n": 2}}
    artifacts = []
    for name, start, content in (("snapshot-1", None, row), ("diff-1-2", "1", change)):
        file = tmp_path / "epoch=1" / f"{name}.jsonl"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(content) + "\n")
        artifacts.append(
            {
                "kind": "diff" if start else "snapshot",
                "epoch": 1,
                "from_position": start,
                "to_position": "2" if start else "1",
                "created_at": "2026-06-03T18:00:00Z",
                "change_count" if start else "row_count": 1,
                "formats": {"jsonl": {"uri": file.as_uri(), "size_bytes": file.stat().st_size}},
            }
        )
    about = {"manifest_version": 1, "table": "t", "epoch": 1, "updated_at": "2026-06-03T18:00:00Z"}
    manifest = about | {"head_position": "2", "artifacts": artifacts}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    refused = shell("archive", "verify", str(tmp_path))
    assert refused.status == 1
    assert "give --key" in refused.stderr
    assert "'code', 'n'" in refused.stderr
    assert "wrong" not in refused.stderr
    assert shell.json("archive", "verify", str(tmp_path), "--key", "code")["files"] == 2
