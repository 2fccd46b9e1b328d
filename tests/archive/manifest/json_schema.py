"""The JSON schema of the manifest, made from the model: `docs/reference/manifest.schema.json`.

python -m tests.archive.manifest.json_schema > docs/reference/manifest.schema.json
"""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec

from streamfold.archive.manifest.model import Manifest

TITLE = "Streamfold archive manifest, version 1"
DESCRIPTION = (
    "What is live in the archive of one table. Readers ignore fields that they do not know and "
    "refuse a manifest_version above 1. Rules between fields are in archive-format.md."
)


def manifest_schema() -> dict[str, Any]:
    """Return the schema; unknown fields are allowed everywhere, as the format says."""
    schema = msgspec.json.schema(Manifest)
    for definition in schema["$defs"].values():
        definition["properties"].pop("extra", None)
        for field in definition["properties"].values():
            field.pop("default", None)
    required = schema["$defs"]["Manifest"]["required"]
    schema["$defs"]["Manifest"]["required"] = ["manifest_version", *required]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": TITLE,
        "description": DESCRIPTION,
        **schema,
    }


def schema_text() -> str:
    """Return the schema as it is published."""
    return json.dumps(manifest_schema(), indent=2) + "\n"


if __name__ == "__main__":
    sys.stdout.write(schema_text())
