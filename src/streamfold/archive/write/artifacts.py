"""Artifacts put together from parts, as the manifest names them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from streamfold.archive.errors import ArtifactCorruptError
from streamfold.archive.formats.format import Format
from streamfold.archive.manifest.model import Artifact, FormatFiles, Manifest
from streamfold.archive.manifest.updates import TableShape
from streamfold.archive.schema.table_schema import TableSchema
from streamfold.archive.write.parts import PartPlan, WrittenPart
from streamfold.errors import InvalidError


def build_artifact(
    plan: PartPlan,
    parts: Sequence[WrittenPart],
    *,
    created_at: str,
    reason: str | None = None,
    record_count: int | None = None,
) -> Artifact:
    """Return the artifact that consists of these parts, all formats with the same rows."""
    if not parts:
        raise InvalidError("an artifact has at least one part: write an empty one if it is empty")
    formats = {form.id: _files(form, parts) for form in plan.formats}
    counts = {name: sum(p.rows or 0 for p in files.parts) for name, files in formats.items()}
    if len(set(counts.values())) > 1:
        raise ArtifactCorruptError(f"formats hold different numbers of rows: {counts}")
    [count] = set(counts.values())
    return Artifact(
        kind="snapshot" if plan.is_base else "diff",
        epoch=plan.epoch,
        from_position=plan.from_position,
        to_position=plan.to_position,
        created_at=created_at,
        row_count=count if plan.is_base else None,
        change_count=None if plan.is_base else count,
        record_count=record_count,
        formats=formats,
        schema_id=plan.schema.id,
        rebase_reason=reason,
    )


def reused_parts(
    manifest: Manifest | None, plan: PartPlan, buckets: Iterable[int]
) -> list[WrittenPart]:
    """Return the parts of the last base for `buckets`, which had no change since."""
    wanted = sorted(set(buckets))
    if not wanted:
        return []
    if manifest is None or manifest.base.schema_id != plan.schema.id:
        raise InvalidError(
            f"buckets {wanted} cannot be reused: no base has schema {plan.schema.id}; "
            "write them all"
        )
    return [_reused_part(manifest.base, plan, bucket) for bucket in wanted]


def _reused_part(base: Artifact, plan: PartPlan, bucket: int) -> WrittenPart:
    files = {}
    for form in plan.formats:
        known = base.formats.get(form.id)
        found = [part for part in known.parts if part.bucket == bucket] if known else []
        if len(found) != 1 or known is None or known.compression != form.compression:
            raise InvalidError(
                f"bucket {bucket} cannot be reused: the last base does not have it as "
                f"{form.id}{form.extension}; write it"
            )
        files[form.id] = found[0]
    return WrittenPart(files)


def table_shape(schema: TableSchema) -> TableShape:
    """Return what the manifest says about the columns."""
    return TableShape(schema.id, schema.to_json(), schema.key_fields, _columns(schema))


def _columns(schema: TableSchema) -> list[dict[str, Any]]:
    # The published names of these fields are capitalised.
    keys = schema.key_fields
    return [
        {
            "Name": field.name,
            "Type": str(field.type),
            "Nullable": field.nullable,
            "PrimaryKey": field.name in keys,
            "OrdinalPosition": number,
            "PrimaryKeyOrdinal": keys.index(field.name) + 1 if field.name in keys else 0,
        }
        for number, field in enumerate(schema.arrow, 1)
    ]


def _files(form: Format, parts: Sequence[WrittenPart]) -> FormatFiles:
    found = tuple(part.files[form.id] for part in parts)
    return FormatFiles(
        uri=found[0].uri,
        size_bytes=sum(part.size_bytes for part in found),
        compression=form.compression,
        parts=found,
    )
