"""A reader from the published description alone: it imports nothing of the archive."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from streamfold.blob import BlobStore
from streamfold.errors import BlobNotFoundError

States = list[tuple[str, dict[int, str]]]


async def read_states(blobs: BlobStore) -> States:
    """Return the table at the end of every artifact, oldest first; none before the first base."""
    try:
        manifest = json.loads(await blobs.get("manifest.json"))
    except BlobNotFoundError:
        return []
    assert manifest["manifest_version"] == 1
    states: States = []
    table: dict[int, str] = {}
    for artifact in manifest["artifacts"]:
        lines = await _lines(blobs, artifact["formats"]["jsonl"])
        if artifact["kind"] == "snapshot":
            table = {line["id"]: line["name"] for line in lines}
            assert len(table) == artifact["row_count"]
        else:
            assert artifact["from_position"] == states[-1][0]
            table = dict(table)
            for line in lines:
                _apply(table, line)
            assert len(lines) == artifact["change_count"]
        states.append((artifact["to_position"], table))
    assert manifest["head_position"] == states[-1][0]
    return states


async def read_table(blobs: BlobStore) -> dict[int, str]:
    """Return the table at the head."""
    return (await read_states(blobs))[-1][1]


async def _lines(blobs: BlobStore, files: Any) -> list[Any]:
    found = []
    for part in files["parts"]:
        data = await blobs.get(part["path"])
        assert (len(data), hashlib.sha256(data).hexdigest()) == (part["size_bytes"], part["sha256"])
        found += [json.loads(line) for line in data.splitlines()]
    return found


def _apply(table: dict[int, str], change: Any) -> None:
    if change["action"] == "TRUNCATE":
        table.clear()
    elif change["action"] == "DELETE":
        table.pop(change["old"]["id"], None)
    else:
        table[change["new"]["id"]] = change["new"]["name"]
