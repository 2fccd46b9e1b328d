"""Rebuilds a table from the files of its archive with plain Python: `rebuild_table.py FOLDER`."""

import hashlib
import json
import sys
from pathlib import Path

folder = Path(sys.argv[1])
manifest = json.loads((folder / "manifest.json").read_text())
table: dict[tuple[object, ...], object] = {}
for artifact in manifest["artifacts"]:
    is_base = artifact["kind"] == "snapshot"
    table = {} if is_base else table
    for part in artifact["formats"]["jsonl"]["parts"]:
        data = (folder / part["path"]).read_bytes()
        assert hashlib.sha256(data).hexdigest() == part["sha256"], f"{part['path']} was changed"
        for line in map(json.loads, data.splitlines()):
            change = {"action": "INSERT", "new": line} if is_base else line
            row = change.get("new") or change.get("old") or {}
            key = tuple(row.get(name) for name in manifest["key_fields"])
            if change["action"] in ("INSERT", "UPDATE"):
                table[key] = row
            elif change["action"] == "DELETE":
                table.pop(key, None)
            else:  # TRUNCATE
                table.clear()
print(json.dumps(list(table.values()), indent=1))
