"""Decodes rows and changes from an archive's files, in the reader's preferred format.

Every count in the manifest is checked, and errors name the file. Archives by other writers may have
no schema. Types are then inferred, and a change's key is taken from its images.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

import pyarrow as pa

from streamfold.archive.errors import ArtifactCorruptError, ManifestInvalidError
from streamfold.archive.formats.format import FORMATS, Format, format_of
from streamfold.archive.manifest.model import Artifact, FormatFiles, Manifest, Part
from streamfold.archive.read.untyped import DeclaredTypes, with_keys
from streamfold.archive.schema import TableSchema
from streamfold.errors import FormatUnsupportedError, InvalidError
from streamfold.wording import noun

#: Key of tables for which neither the manifest nor the caller names one: the published default.
DEFAULT_KEY = ("id",)


@dataclass(slots=True)
class DecodedLimit:
    """Limits how much of an archive's files may be decoded: small files may expand to very much."""

    max_bytes: int
    max_rows: int
    #: Command that reads the same without a limit.
    command: str
    _bytes: int = 0
    _rows: int = 0

    def count(self, batch: pa.RecordBatch) -> None:
        """Count a decoded batch. Raises InvalidError beyond the limit."""
        self._bytes += batch.nbytes
        self._rows += len(batch)
        if self._bytes > self.max_bytes or self._rows > self.max_rows:
            raise InvalidError(
                f"the files decode to more than {self.max_bytes} bytes or {self.max_rows} rows, the "
                f"most that is read here: run '{self.command}'"
            )


@dataclass(frozen=True, slots=True)
class ChosenFiles:
    """One artifact in one format."""

    artifact: Artifact
    form: Format
    schema: TableSchema | None
    parts: tuple[Part, ...]
    #: Columns as declared in another writer's manifest, for files without a schema.
    declared: DeclaredTypes = field(default_factory=DeclaredTypes)
    limit: DecodedLimit | None = None

    def rows(
        self, part: Part, source: BinaryIO, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one file of a base. `columns` needs a schema."""
        batches = self._form(part).read_rows(source, self.schema, columns)
        rows = batches if self.schema else map(self.declared.rows, batches)
        return self._counted(part, rows)

    def changes(
        self, part: Part, source: BinaryIO, keys: Sequence[str]
    ) -> Iterator[pa.RecordBatch]:
        """Yield the changes of one file of a diff, with the key fields in `key`."""
        for batch in self._counted(part, self._form(part).read_changes(source, self.schema)):
            yield batch if self.schema else with_keys(self.declared.changes(batch), keys)

    def _form(self, part: Part) -> Format:
        """Return the format to read a file with. A file that has a hash was already verified."""
        return self.form.for_hashed_file() if part.sha256 else self.form

    def _counted(self, part: Part, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        count = 0
        try:
            for batch in batches:
                count += len(batch)
                if self.limit is not None:
                    self.limit.count(batch)
                yield batch
        except ArtifactCorruptError as error:
            raise ArtifactCorruptError(f"file {part.path!r}: {error.message}") from None
        # Manifests by other writers state counts only for artifacts, which then have one part.
        said = count_of(self.artifact) if part.rows is None else part.rows
        if count != said:
            raise ArtifactCorruptError(
                f"file {part.path!r} holds {count} {noun(count, 'row')}, the manifest says {said}: "
                "restore it, or read another format of it"
            )


@dataclass(frozen=True, slots=True)
class Decoding:
    """Sets how an archive's files are read: the caller's wishes, and facts that the manifest lacks."""

    #: Preferred formats, best first. None prefers the fastest to read.
    formats: tuple[str, ...] | None = None
    #: For archives whose manifest has no schema.
    schema: TableSchema | None = None
    key_fields: tuple[str, ...] | None = None
    limit: DecodedLimit | None = None

    def __post_init__(self) -> None:
        if unknown := [name for name in self.formats or () if name not in FORMATS]:
            raise InvalidError(f"formats {unknown} are not known: name some of {FORMATS.ids()}")

    def choose(self, manifest: Manifest, artifact: Artifact) -> ChosenFiles:
        """Return the artifact in its best available format."""
        for name in self._preferred(artifact):
            if files := artifact.formats.get(name):
                form = format_in(name, files)
                _check_parts(manifest, artifact, name, files)
                schema, declared = self.schema_of(manifest, artifact), DeclaredTypes.of(manifest)
                return ChosenFiles(artifact, form, schema, files.parts, declared, self.limit)
        raise FormatUnsupportedError(
            f"an artifact of table {manifest.table!r} at {artifact.to_position!r} exists as "
            f"{sorted(artifact.formats)}, and none of {list(self.formats or FORMATS.ids())} is "
            "wanted or known"
        )

    def _preferred(self, artifact: Artifact) -> Sequence[str]:
        if self.formats is not None:
            return self.formats
        kinds = sorted(FORMATS.existing(artifact.formats), key=lambda kind: kind.read_cost)
        return [kind.id for kind in kinds]

    def only(self, name: str) -> Decoding:
        """Return the same settings for one format alone."""
        return Decoding((name,), self.schema, self.key_fields, self.limit)

    def schema_of(self, manifest: Manifest, artifact: Artifact) -> TableSchema | None:
        """Return the schema in which the artifact is written, or None if it is unknown."""
        if artifact.schema_id is None:
            return self.schema
        try:
            return TableSchema.from_json(manifest.schemas[artifact.schema_id])
        except InvalidError as error:
            raise ManifestInvalidError(
                f"schema {artifact.schema_id} of table {manifest.table!r}: {error.message}"
            ) from None

    def keys(self, manifest: Manifest) -> tuple[str, ...]:
        """Return the key fields: the manifest's, the caller's, those in `columns`, or the default.

        The first source that names any decides. `columns` are those of another writer's manifest.
        """
        if manifest.key_fields is not None:
            return tuple(manifest.key_fields)
        if self.key_fields is not None:
            return self.key_fields
        if self.schema is not None:
            return self.schema.key_fields
        return _published_keys(manifest) or DEFAULT_KEY


def format_in(name: str, files: FormatFiles) -> Format:
    """Return the format in which these files are written."""
    try:
        return format_of(name, files.compression or "none")
    except InvalidError as error:
        raise FormatUnsupportedError(error.message) from None


def _published_keys(manifest: Manifest) -> tuple[str, ...]:
    columns = [c for c in manifest.columns or [] if isinstance(c, dict) and c.get("PrimaryKey")]
    columns.sort(key=lambda column: column.get("PrimaryKeyOrdinal", 0))
    return tuple(str(column.get("Name")) for column in columns)


def count_of(artifact: Artifact) -> int:
    """Return the rows of a base, or the changes of a diff. A missing count means none."""
    return (artifact.row_count if artifact.is_base else artifact.change_count) or 0


def _check_parts(manifest: Manifest, artifact: Artifact, name: str, files: FormatFiles) -> None:
    rows = [part.rows for part in files.parts]
    counts = [count for count in rows if count is not None]
    complete = len(counts) == len(rows)
    if (complete and sum(counts) != count_of(artifact)) or (not complete and len(rows) > 1):
        raise ManifestInvalidError(
            f"the {artifact.kind} of table {manifest.table!r} at {artifact.to_position!r} has "
            f"{count_of(artifact)} {noun(count_of(artifact), 'row')}, and its parts as {name} have "
            f"{rows}: one of them is wrong"
        )
