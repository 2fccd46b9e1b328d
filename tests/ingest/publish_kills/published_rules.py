"""A reader of archives written from docs/reference/archive-format.md alone, without Streamfold."""

from __future__ import annotations

import hashlib
import json
from itertools import pairwise
from pathlib import Path
from typing import Any


class RuleBrokenError(Exception):
    """An archive breaks a rule of the published format."""


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the table at the head of an archive, as JSON values, from its uncompressed JSON lines."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    _check(manifest["manifest_version"] == 1, "manifest_version is 1")
    artifacts = manifest["artifacts"]
    _check_chain(manifest, artifacts)
    start = max(n for n, artifact in enumerate(artifacts) if artifact["kind"] == "snapshot")
    base, *diffs = artifacts[start:]
    schema = manifest["schemas"][artifacts[-1]["schema_id"]]
    columns = [column["name"] for column in schema["columns"]]

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in manifest["key_fields"])

    rows = [row for lines in _read_parts(folder, base) for row in lines]
    table = {key(row): row for row in rows}
    _check(
        len(rows) == len(table) == base.get("row_count", 0), "a base has row_count different keys"
    )
    for diff in diffs:
        parts = _read_parts(folder, diff)
        changes = [change for lines in parts for change in lines]
        _check(len(changes) == diff.get("change_count", 0), "change_count is that of the files")
        if any(lines and lines[0]["action"] == "TRUNCATE" for lines in parts):
            table.clear()
        net = [change for change in changes if change["action"] != "TRUNCATE"]
        keys = {key(change["old" if change["action"] == "DELETE" else "new"]) for change in net}
        _check(len(keys) == len(net), "a diff has at most one change for each key")
        for change in net:
            if change["action"] == "DELETE":
                table.pop(key(change["old"]), None)
            else:
                table[key(change["new"])] = change["new"]
    return [{name: row.get(name) for name in columns} for row in table.values()]


def _check_chain(manifest: dict[str, Any], artifacts: list[dict[str, Any]]) -> None:
    _check(artifacts[0]["kind"] == "snapshot", "the first artifact is a base")
    _check(manifest["position_order"] == "seq_num", "positions are those of a stream")
    for artifact in artifacts:
        is_base = artifact["kind"] == "snapshot"
        _check((artifact["from_position"] is None) == is_base, "only bases begin nowhere")
    for before, after in pairwise(artifacts):
        ends = int(before["to_position"]), int(after["to_position"])
        if after["kind"] == "snapshot":
            _check(after["epoch"] > before["epoch"], "a base opens a higher epoch")
            _check(ends[0] <= ends[1], "a base is not before the end of the artifact before it")
        else:
            _check(after["epoch"] == before["epoch"], "a diff has the epoch of the one before")
            _check(after["from_position"] == before["to_position"], "a diff begins at the last end")
            _check(ends[0] < ends[1], "a diff ends after its beginning")
    last = artifacts[-1]
    _check(manifest["head_position"] == last["to_position"], "the head is the last end")
    _check(manifest["epoch"] == last["epoch"], "the epoch is the last one")


def _read_parts(folder: Path, artifact: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Return the lines of each part, whose files are as the manifest describes them."""
    files = artifact["formats"]["jsonl"]
    _check(files.get("compression", "none") == "none", "these JSON lines are not compressed")
    parts, total = [], 0
    for part in files["parts"]:
        content = (folder / part["path"]).read_bytes()
        total += len(content)
        _check(len(content) == part["size_bytes"], f"{part['path']} has its size_bytes")
        _check(
            hashlib.sha256(content).hexdigest() == part["sha256"], f"{part['path']} has its sha256"
        )
        parts.append([json.loads(line) for line in content.split(b"\n") if line.strip()])
    _check(total == files["size_bytes"], "size_bytes is the sum over the parts")
    return parts


def _check(holds: bool, rule: str) -> None:
    if not holds:
        raise RuleBrokenError(f"broken rule: {rule}")
