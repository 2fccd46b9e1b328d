from __future__ import annotations

import json
from pathlib import Path

import jsonschema  # type: ignore[import-untyped]  # has no types
import pytest

from tests.archive.manifest.json_schema import manifest_schema, schema_text

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "archive" / "golden"


def test_the_published_schema_is_the_models() -> None:
    published = (ROOT / "docs" / "reference" / "manifest.schema.json").read_text()
    assert published == schema_text(), "run python -m tests.archive.manifest.json_schema"


@pytest.mark.parametrize("name", ["published.json", "streamfold-v1.json"])
def test_golden_manifests_fit_the_schema(name: str) -> None:
    jsonschema.validate(json.loads((GOLDEN / name).read_text()), manifest_schema())


def test_the_schema_refuses_what_readers_refuse() -> None:
    raw = json.loads((GOLDEN / "streamfold-v1.json").read_text())
    raw["artifacts"][0]["kind"] = "delta"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(raw, manifest_schema())
