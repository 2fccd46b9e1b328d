"""The JSON that the archive commands print, and the equivalent text for people.

Members may be added, but are never renamed, removed or given another type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamfold.cli.json_output import Shape
from streamfold.errors import StreamfoldError
from streamfold.wording import noun

if TYPE_CHECKING:
    from streamfold.archive import (
        Archive,
        Artifact,
        Collected,
        Manifest,
        SourceRange,
        TablePlan,
        Verification,
    )


def listed_shape(uri: str, manifest: Manifest | StreamfoldError) -> Shape:
    """Describe one archive in a listing, or why it is unusable."""
    if isinstance(manifest, StreamfoldError):
        return {"uri": uri, "error": {"code": manifest.code, "message": manifest.message}}
    return manifest_shape(uri, manifest)


def listed_line(uri: str, manifest: Manifest | StreamfoldError) -> str:
    if isinstance(manifest, StreamfoldError):
        return f"{'cannot be used':30}  {uri}  {manifest.message}"
    return manifest_line(uri, manifest)


def manifest_shape(uri: str, manifest: Manifest) -> Shape:
    """Return the fields that identify an archive."""
    return {
        "uri": uri,
        "table": manifest.table,
        "epoch": manifest.epoch,
        "head_position": manifest.head_position,
        "oldest_readable_position": manifest.artifacts[0].to_position,
        "incomplete_before": manifest.incomplete_before,
        "updated_at": manifest.updated_at,
        "dead_letters": _dead_letters(manifest),
        "artifacts": len(manifest.artifacts),
    }


def _dead_letters(manifest: Manifest) -> int:
    return (manifest.source.dead_letters or 0) if manifest.source else 0


def manifest_line(uri: str, manifest: Manifest) -> str:
    before, count = manifest.incomplete_before, _dead_letters(manifest)
    return (
        f"{manifest.table:30}  epoch {manifest.epoch:>4}  head {manifest.head_position:>16}  "
        f"{manifest.updated_at}  {uri}"
        + (f"  incomplete before {before}" if before else "")
        + (f"  {count} dead {noun(count, 'letter')}" if count else "")
    )


def archive_shape(archive: Archive, plan: TablePlan) -> Shape:
    """Describe everything in the manifest, and what a rebuild would read."""
    manifest = archive.manifest
    return {
        **manifest_shape(archive.uri, manifest),
        "key_fields": list(archive.key_fields),
        "schema": archive.schema.to_json() if archive.schema else None,
        "writer": manifest.writer.id if manifest.writer else None,
        "artifacts": [artifact_shape(artifact) for artifact in manifest.artifacts],
        "pins": [
            {"id": pin.id, "epoch": pin.epoch, "expires_at": pin.expires_at, "reason": pin.reason}
            for pin in manifest.pins
        ],
        "plan": {
            "position": plan.position,
            "base": plan.base.to_position,
            "diffs": [[diff.from_position, diff.to_position] for diff in plan.diffs],
            "source_position": plan.source_position,
            "incomplete_before": plan.incomplete_before,
        },
    }


def archive_text(archive: Archive, plan: TablePlan) -> str:
    from streamfold.archive.read.plan import describe

    manifest = archive.manifest
    count = _dead_letters(manifest)
    columns = [f"{f.name} {f.type}" for f in archive.schema.arrow] if archive.schema else []
    lines = [
        f"table    {manifest.table}",
        f"head     {manifest.head_position}  of epoch {manifest.epoch}, {manifest.updated_at}",
        f"oldest   {manifest.artifacts[0].to_position}",
        *([f"letters  {count} {noun(count, 'record')} could not be decoded"] if count else []),
        *(
            [f"missing  changes before {before}: rows that only they hold are not in the table"]
            if (before := manifest.incomplete_before)
            else []
        ),
        *([f"layout   {manifest.layout}"] if manifest.layout else []),
        f"key      {', '.join(archive.key_fields)}",
        f"columns  {', '.join(columns) or 'not recorded'}",
        *(f"pin      {pin.id}  epoch {pin.epoch}  until {pin.expires_at}" for pin in manifest.pins),
        "artifacts",
        *(describe(artifact) for artifact in manifest.artifacts),
        f"plan: {plan}",
    ]
    return "\n".join(lines)


def artifact_shape(artifact: Artifact) -> Shape:
    return {
        "kind": artifact.kind,
        "epoch": artifact.epoch,
        "from_position": artifact.from_position,
        "to_position": artifact.to_position,
        "created_at": artifact.created_at,
        "rows": (artifact.row_count if artifact.is_base else artifact.change_count) or 0,
        "formats": {name: files.size_bytes for name, files in artifact.formats.items()},
        "rebase_reason": artifact.rebase_reason,
        "source_range": source_shape(artifact.source_range),
    }


def source_shape(source: SourceRange | None) -> Shape | None:
    """Describe the source commits that an artifact contains, or with which a plan ends."""
    if source is None:
        return None
    return {
        "first": source.first,
        "last": source.last,
        "time": source.time,
        "copying": source.copying,
    }


def verification_shape(check: Verification) -> Shape:
    return {
        "ok": check.ok,
        "table": check.table,
        "head_position": check.head_position,
        "artifacts": check.artifacts,
        "files": check.files,
        "bytes": check.size_bytes,
        "rows": check.rows,
        "files_without_hash": check.unhashed,
        "bases_compared": check.compared,
        "problems": [
            {"path": file.path, "code": file.problem.code, "message": file.problem.message}
            for file in check.problems
            if file.problem
        ],
    }


def verification_text(check: Verification) -> str:
    problems = [f"{file.path}: {file.problem}" for file in check.problems]
    unhashed = f", {check.unhashed} of them without a hash" if check.unhashed else ""
    verdict = "no problems" if check.ok else f"{len(problems)} {noun(len(problems), 'problem')}"
    compared = (
        f", {check.compared} {noun(check.compared, 'base')} compared" if check.compared else ""
    )
    files = f"{check.files} {noun(check.files, 'file')} of {check.size_bytes:,} bytes{unhashed}"
    last = (
        f"table {check.table} up to {check.head_position}: {files}, {check.rows:,} rows and changes"
        f"{compared}: {verdict}"
    )
    return "\n".join([*problems, last])


def collected_shape(collected: Collected) -> Shape:
    return {
        "dry_run": collected.dry_run,
        "epochs": list(collected.epochs),
        "files": [
            {"destination": file.destination, "path": file.path, "bytes": file.size_bytes}
            for file in collected.files
        ],
        "bytes": sum(file.size_bytes for file in collected.files),
    }


def collected_text(collected: Collected) -> str:
    files = [
        f"{file.destination}{file.path}  {file.size_bytes:,} bytes" for file in collected.files
    ]
    epochs = ", ".join(map(str, collected.epochs)) or "none"
    size = sum(file.size_bytes for file in collected.files)
    title = "to delete" if collected.dry_run else "deleted"
    return "\n".join([*files, f"{title}: {len(files)} files, {size:,} bytes; epochs: {epochs}"])
